#!/usr/bin/env python3
"""Writes docs/configuration.md: every key of a run's file, from the classes that read it.

    python scripts/configuration_page.py

A test compares the page with what this would write, so that no key goes without its line.
"""

from __future__ import annotations

import json
import types
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tlora_megatron.config.job import HF_TARGETS, JobSpec
from tlora_megatron.config.schema import BaseModelSpec, ParallelSpec, RunSpec

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"

_HEAD = """\
# Every key of the configuration

<!-- Written by scripts/configuration_page.py from the classes of tlora_megatron/config. -->

Every key that a job file may hold, with its default. The file is YAML, or JSON if its name ends
with `.json`. `tlora train` reads all sections; the file of `--tlora-config`
([megatron_lm.md](megatron_lm.md)) and DeepSpeed's `tlora` section ([deepspeed.md](deepspeed.md))
leave out what the trainer's own arguments decide.

- An unknown key, a wrong type or a value out of range is refused with the path of the value.
- `--set PATH=VALUE` sets one key on the command line, for example `--set jobs.chat.lora.rank=32`.
- `tlora inspect FILE` shows what is read.
- Relative paths in `base_model` and in jobs start at the file's folder, `run.output_dir` at the
  working directory.

## Lines of data
A data file holds JSON lines, one JSON array, or with `.[data]` a Parquet table; gzipped or not. A
row is one of these:
```
{"prompt": "What is 2 + 2? ", "completion": "4"}
{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
{"text": "all of it is learnt"}
{"prompt": "What is 2 + 2? ", "chosen": "4", "rejected": "5"}
```
- `prompt` and `completion` are tokenized apart, the prompt with the tokenizer's own special tokens.
  The completion alone is learnt, with the end-of-sequence token that is appended to it.
- `messages` are written by the chat template. What the assistant says is learnt with its end of
  turn, but for answers with `"weight": 0`; a warning tells when no token that stops generation
  ends an answer. Rows may have OpenAI's `tools` and calls, `reasoning_content` (`thinking`,
  `reasoning`) and `chat_template_kwargs`; a call's arguments are an object, or JSON of one.
- `chosen` and `rejected`, texts or messages, are the data of jobs with `preference`, by TRL's or
  OpenAI's names; without a prompt, it is what both begin with. Only answers are learnt, by orpo's
  cross entropy, too. Metrics have TRL's names.
- `text` is learnt as a whole, with the tokenizer's own special tokens. Write an end-of-sequence
  token where a text should end.
- Also chats: `prompt` and `completion` as lists of messages, of which the latter's answers are
  learnt; ShareGPT's `conversations`; Alpaca's `instruction`, `input`, `output`.

Any other key is an error with its row, as is everything in a chat that the template passes over;
null counts as absent. `tlora data check FILE --base DIR` shows what is learnt, `tlora data import
ORG/NAME` fetches a data set.
"""

_SECTIONS: tuple[tuple[str, type, str], ...] = (
    ("base_model", BaseModelSpec, "Exactly one of `path` and `config`."),
    ("parallel", ParallelSpec, "May be left out."),
    ("run", RunSpec, ""),
    (
        "jobs",
        JobSpec,
        "A list. Each job has exactly one of `max_steps` and `epochs`. The section `defaults` "
        "holds the\nsame keys except `name`, for all jobs that do not say otherwise.",
    ),
)
_LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def page() -> str:
    """The page as it is to be."""
    parts = [_HEAD]
    for name, kind, note in _SECTIONS:
        head = f"## {name}\n{note}\n\n" if note else f"## {name}\n"
        rows = "".join(f"| {' | '.join(row)} |\n" for row in _rows(kind, ""))
        parts.append(f"{head}| key | value | default | |\n|---|---|---|---|\n{rows}")
    return "\n".join(parts)


def _rows(kind: Any, prefix: str) -> list[tuple[str, str, str, str]]:
    rows = []
    hints = get_type_hints(kind)
    for item in fields(kind):
        hint = hints[item.name]
        if is_dataclass(hint):
            rows += _rows(hint, f"{prefix}{item.name}.")
            continue
        doc = item.metadata["doc"].replace("|", "\\|").replace("None", "null")
        rows.append((f"`{prefix}{item.name}`", _value(hint, item), _default(item), doc))
        for option in filter(is_dataclass, get_args(hint)):
            rows += _rows(option, f"{prefix}{item.name}.")
    return rows


def _value(hint: Any, item: Field[Any]) -> str:
    limits = [
        f"{words} {item.metadata[key]}" for key, words in _LIMITS.items() if key in item.metadata
    ]
    return ", ".join([_type(hint), *limits])


def _type(hint: Any) -> str:
    origin, options = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{option}`" for option in options)
    if is_dataclass(hint):
        return "mapping"
    if origin in (Union, types.UnionType):
        return " or ".join(_type(option) for option in options)
    if origin is tuple:
        count = "" if options[-1] is Ellipsis else f"{len(options)} "
        return f"list of {count}{_type(options[0])}s"
    names = {int: "integer", float: "number", str: "string", bool: "`true`, `false`"}
    return names.get(hint, "`null`")


def _default(item: Field[Any]) -> str:
    if item.default is MISSING:
        return "required"
    if item.default == HF_TARGETS:
        return "all seven linears"
    return f"`{json.dumps(item.default)}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
