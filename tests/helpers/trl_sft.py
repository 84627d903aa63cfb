"""Runs in the interpreter of scripts/trl_oracle.sh: says what TRL makes of rows.

Input: `base`, a folder; `template`, a chat template; `public`, the name of one of TRL's; `rows`.
Output, for each row: ids and learnt places by `SFTTrainer`, and the text that `public` writes.
"""

import contextlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import datasets
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

_NUMBERS = itertools.count()
# dill cannot pickle what the trainer maps with, under Python 3.11.
datasets.fingerprint.Hasher.hash = staticmethod(lambda value: f"{next(_NUMBERS):016x}")


def main() -> None:
    asked = json.load(sys.stdin)
    tokenizer = AutoTokenizer.from_pretrained(asked["base"])
    tokenizer.chat_template = asked["template"]
    model = AutoModelForCausalLM.from_pretrained(asked["base"])
    public = Path(trl.__file__).parent / "chat_templates" / f"{asked['public']}.jinja"

    def told(row: dict[str, Any]) -> dict[str, Any]:
        messages = row.get("messages")
        if isinstance(row.get("prompt"), list):
            messages = row["prompt"] + row["completion"]
        as_text = {"tools": json.dumps(row["tools"])} if "tools" in row else {}
        only = messages is not None
        settings = trl.SFTConfig(
            assistant_only_loss=only, max_length=None, use_cpu=True, bf16=False, report_to=[]
        )
        data = datasets.Dataset.from_list([{**row, **as_text}])
        trainer = trl.SFTTrainer(
            model, args=settings, train_dataset=data, processing_class=tokenizer
        )
        (made,) = trainer.train_dataset
        ids, text = made["input_ids"], None
        if messages is not None:
            (text,), _ = render_jinja_template(
                [messages], tools=row.get("tools"), chat_template=public.read_text()
            )
        learnt = [label != -100 for label in made.get("labels", ids)]
        return {"ids": ids, "learnt": learnt, "text": text}

    with contextlib.redirect_stdout(sys.stderr):
        rows = [told(row) for row in asked["rows"]]
    print(json.dumps(rows))


main()
