"""The recipes of tinker-cookbook that need no sandbox, no images and no other service.

They run unmodified in a folder where the names that they give to the Hugging Face Hub are folders:
a tiny base with 4,096 positions, and a few rows of each data set in its own columns.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer

MODEL = "meta-llama/Llama-3.1-8B"
"""Whose renderer, `role_colon`, needs no tokens of its own."""
ANSWERER = "Qwen/Qwen3.5-9B"
"""The other player of twenty questions."""
_MARKS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
_ROWS = 8


def _chat(number: int, answer: str = "") -> list[dict[str, str]]:
    asked = {"role": "user", "content": f"What is {number} and {number}?"}
    return [asked, {"role": "assistant", "content": answer or str(2 * number)}]


def _pair(number: int) -> dict[str, str]:
    begin = f"\n\nHuman: What is {number}?\n\nAssistant:"
    return {"chosen": f"{begin} A number.", "rejected": f"{begin} No."}


def _question(number: int) -> dict[str, Any]:
    choices = {"label": ["A", "B"], "text": ["yes", "no"]}
    kind = {"domain": "Chemistry", "details": {"level": "L3"}, "type": "mcq-2-choices"}
    answers = {"answerKey": "A", "answer": "yes", "prompt": {"default": "Choose."}}
    return {"question": f"Is {number} one?", "choices": choices, **kind, **answers}


DATA: dict[str, tuple[str, tuple[str, ...], Any]] = {
    "HuggingFaceH4/no_robots": ("default", ("train", "test"), lambda n: {"messages": _chat(n)}),
    "openai/gsm8k": (
        "main",
        ("train", "test"),
        lambda n: {"question": f"{n} + {n}?", "answer": f"#### {2 * n}"},
    ),
    "Anthropic/hh-rlhf": ("default", ("train", "test"), _pair),
    "zwhe99/DeepMath-103K": (
        "default",
        ("train", "test"),
        lambda n: {"question": f"{n} + {n}?", "final_answer": str(2 * n)},
    ),
    "allenai/tulu-3-sft-mixture": ("default", ("train",), lambda n: {"messages": _chat(n)}),
    "open-thoughts/OpenThoughts3-1.2M": (
        "default",
        ("train",),
        lambda n: {
            "conversations": [
                {"from": "human", "value": f"{n}?"},
                {"from": "gpt", "value": str(n)},
            ]
        },
    ),
    "hicai-zju/SciKnowEval": ("default", ("test",), _question),
    "Salesforce/wikitext": (
        "wikitext-103-raw-v1",
        ("train",),
        lambda n: {"text": f" The number {n} is the sum of {n - 1} and the number one . " * 200},
    ),
    "HuggingFaceH4/MATH-500": (
        "default",
        ("test",),
        lambda n: {"problem": f"{n} + {n}?", "solution": f"\\boxed{{{2 * n}}}"},
    ),
}
"""Name on the Hub -> configuration, splits, and the row of a number."""


def lay_out(folder: Path) -> None:
    """Writes base and data into a folder."""
    base = make_tiny_model(
        folder / MODEL, "llama", vocab_size=VOCAB_SIZE + 8, max_position_embeddings=4096
    )
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": list(_MARKS)})
    tokenizer.save_pretrained(base)
    (folder / ANSWERER).parent.mkdir(parents=True)
    (folder / ANSWERER).symlink_to(base)
    for name, (config, splits, row) in DATA.items():
        place = folder / name
        place.mkdir(parents=True)
        files = [{"split": split, "path": f"{split}.jsonl"} for split in splits]
        head = {"configs": [{"config_name": config, "data_files": files}]}
        (place / "README.md").write_text(f"---\n{json.dumps(head)}\n---\n")
        rows = "".join(json.dumps(row(number)) + "\n" for number in range(1, _ROWS * 16 + 1))
        for split in splits:
            (place / f"{split}.jsonl").write_text(rows)
    (folder / "tinker_cookbook" / "example_data").mkdir(parents=True)  # of rubric.generate_data
    chats = [{"messages": _chat(number)} for number in range(1, _ROWS + 1)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))


_NAME = f"model_name={MODEL}"
_LOG = ("max_steps=2", "log_path=log", "save_every=0")
_SL = (_NAME, *_LOG, "batch_size=4")
_RL = (_NAME, *_LOG, "max_tokens=8")
_GROUPS = ("eval_every=0", "group_size=2", "groups_per_batch=4")
_SMALL = ("batch_size=4", "group_size=2")
_PLAYER = ("eval_every=0", "renderer_name=role_colon")
_GSM8K = (
    "dataset_builder=tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder",
    f"dataset_builder.model_name_for_tokenizer={MODEL}",
    "dataset_builder.renderer_name=role_colon",
    *(f"dataset_builder.{size}" for size in _SMALL),
)
_PAGES = ("task.num_pages_min=2", "task.num_pages_max=3", "task.page_chars=200")

RECIPES: dict[str, tuple[str, ...]] = {
    "sl_loop": _SL,
    "sl_basic": (_NAME, *_LOG, "eval_every=1"),
    "chat_sl.train": (*_SL, "dataset=no_robots", "eval_every=1"),
    "rl_loop": (*_RL, *_SMALL),
    "rl_loop gspo": (*_RL, "loss_fn=gspo", *_SMALL),
    "rl_basic": (*_RL, *_GSM8K),
    "math_rl.train": (*_RL, *_GROUPS),
    "math_rl.train gsm8k": (*_RL, "env=gsm8k", *_GROUPS),
    "math_rl.train async": (*_RL, "max_steps_off_policy=1", *_GROUPS),
    "multiplayer_rl.guess_number.train": (*_RL, *_PLAYER, *_SMALL),
    "multiplayer_rl.twenty_questions.train": (*_RL, *_PLAYER, *_SMALL),
    "multiplayer_rl.text_arena.train": (*_RL, *_PLAYER, "batch_size=4", "num_train_datapoints=8"),
    "preference.dpo.train": (_NAME, "max_steps=2", "log_path=log", "dataset=hhh", "batch_size=4"),
    "preference.shorter.train": (_NAME, *_LOG[:2], "max_tokens=8", "eval_every=0", *_SMALL),
    "prompt_distillation.train": (*_SL, "file_path=chats.jsonl"),
    "rl_numerics_check.train": (*_RL, *_GROUPS, *_PAGES, "renderer_name=qwen3_instruct"),
    "sdft.train": (*_RL, "eval_every=0", "groups_per_batch=4"),
    "distillation.on_policy_distillation": (*_RL, f"teacher_model={MODEL}", *_GROUPS),
    "distillation.off_policy_reasoning": _SL,
    "rubric.generate_data": (),
    "rubric.train": (*_RL, *_PLAYER, f"grader_llm_name={MODEL}", "groups_per_batch=4"),
    "decisions.demo": (_NAME,),
}
"""Module below `tinker_cookbook.recipes`, with a word to tell two apart -> its arguments."""
