"""TRL's DPOTrainer on pairs that are tokens already: run by a Python that has TRL.

    $TRL_PYTHON tests/helpers/oracle_preference.py REQUEST.json

The request names the base, the PEFT adapter to start from (which is the reference, too), the pairs
in the order of the steps, and the settings; `out` gets the log of every step, `adapter` the end.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any


def main(path: str) -> None:
    import datasets.fingerprint
    import torch
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    # dill 0.4 cannot hash the map functions of datasets 5 on every Python.
    numbers = itertools.count()
    datasets.fingerprint.Hasher.hash = classmethod(lambda *_: f"{next(numbers):016x}")

    class Trainer(DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    request = json.loads(Path(path).read_text())
    settings = DPOConfig(
        output_dir=request["out"] + ".trainer",
        logging_steps=1,
        report_to=[],
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        save_strategy="no",
        optim="adamw_torch",
        disable_tqdm=True,
        max_length=None,
        lr_scheduler_type="constant",
        disable_dropout=False,
        **request["settings"],
    )
    base = AutoModelForCausalLM.from_pretrained(request["base"], dtype=torch.float32)
    trainer = Trainer(
        model=PeftModel.from_pretrained(base, request["init"], is_trainable=True),
        args=settings,
        train_dataset=Dataset.from_list(request["pairs"]),
        processing_class=AutoTokenizer.from_pretrained(request["base"]),
    )
    trainer.train()
    Path(request["out"]).write_text(json.dumps(trainer.state.log_history))
    trainer.model.save_pretrained(request["adapter"])


if __name__ == "__main__":
    main(sys.argv[1])
