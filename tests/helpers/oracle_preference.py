"""A job of pairs as TRL's DPOTrainer trains it, on our tokens: run by a Python that has TRL.

    $TRL_PYTHON -m tests.helpers.oracle_preference CONFIG.json LOG.json

The configuration's first job begins with an adapter of PEFT's, which is the reference, too.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

from tlora_megatron.config.load import load_config
from tlora_megatron.training.data.job_data import BatchPlan, load_job_data
from tlora_megatron.training.data.tokenize import load_tokenizer


def main(config: Path, log: Path) -> None:
    import datasets.fingerprint
    import torch
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from trl import DPOConfig, DPOTrainer

    # dill 0.4 cannot hash the map functions of datasets 5 on every Python.
    numbers = itertools.count()
    datasets.fingerprint.Hasher.hash = classmethod(lambda *_: f"{next(numbers):016x}")

    class Trainer(DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    loaded = load_config(config)
    job, folder = loaded.jobs[0], loaded.base_model.folder
    assert job.preference is not None, "the job is one of pairs"
    tokenizer = load_tokenizer(folder)
    data = load_job_data(job, tokenizer, len(tokenizer)).train
    plan, pairs = BatchPlan.for_job(job, len(data)), []
    for index in itertools.chain(*map(plan.indices, range(plan.num_steps))):
        chosen, rejected = data[2 * index], data[2 * index + 1]
        begin = int(chosen.is_target.argmax())
        pairs.append({
            "prompt_ids": chosen.tokens[:begin].tolist(),
            "chosen_ids": chosen.tokens[begin:].tolist(),
            "rejected_ids": rejected.tokens[begin:].tolist(),
        })  # fmt: skip
    weights = [1.0, job.preference.sft_weight or 0.0]
    settings = DPOConfig(
        output_dir=str(log) + ".trainer", logging_steps=1, report_to=[], disable_tqdm=True,
        use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no",
        optim="adamw_torch", lr_scheduler_type="constant", max_length=None, disable_dropout=False,
        loss_type=["sigmoid", "sft"], loss_weights=weights, beta=job.preference.beta,
        learning_rate=job.optimizer.lr, max_grad_norm=job.optimizer.max_grad_norm,
        per_device_train_batch_size=job.batch_size, max_steps=plan.num_steps,
    )  # fmt: skip
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(job.init_from), is_trainable=True)
    dataset = Dataset.from_list(pairs)
    trainer = Trainer(model=model, args=settings, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    log.write_text(json.dumps([row for row in trainer.state.log_history if "loss" in row]))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
