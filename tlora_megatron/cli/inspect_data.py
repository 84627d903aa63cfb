"""`tlora inspect FILE --data`: what each job's data are once tokenized, and one row as trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from tlora_megatron.cli.tables import make_table
from tlora_megatron.config.job import JobSpec
from tlora_megatron.config.schema import RunConfig
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.training.data.job_data import BatchPlan, TokenizerFolder, load_job_data
from tlora_megatron.training.data.jsonl_file import files_of
from tlora_megatron.training.data.rows import parse_row
from tlora_megatron.training.data.tokenize import TokenSequence

_MOST_BAD_LINES = 5
_MOST_TOKENS = 400
"""Tokens of the row that is shown."""


def describe_data(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Describes the data of each job that has some, by name; of bad data, the first bad lines."""
    tokenizer = TokenizerFolder(config.base_model.folder).tokenizer
    vocab_size = read_model_spec(config.base_model.config_file).vocab_size
    return {
        job.name: _describe(replace(job, seed=job.seed + config.run.seed), tokenizer, vocab_size)
        for job in config.jobs
        if not job.driven
    }


def print_data(console: Console, jobs: dict[str, dict[str, Any]]) -> None:
    """Prints the result of `describe_data`: a row for each job, then a row of each one's data."""
    counts = ("rows", "eval rows", "tokens", "learnt", "longest")
    columns = (*counts, "steps", "epochs", "steps an epoch")
    table = make_table("job", *columns, right=columns, words=("job",))
    for name, data in jobs.items():
        if "errors" not in data:
            numbers = [data[column.replace(" ", "_")] for column in columns]
            table.add_row(name, *(f"{number:,}" for number in numbers))
    if table.row_count:
        console.print(table, soft_wrap=False)
    for name, data in jobs.items():
        if "errors" in data:
            for error in data["errors"]:
                console.print(f"error: {error}", style="red")
            continue
        console.print(f"{name}: the first row that it trains on; ⟦what is learnt⟧", style="bold")
        row = Text()
        for part in data["row"]:
            row.append(*((f"⟦{part['text']}⟧", "green") if part["learnt"] else (part["text"], "")))
        console.print(row)


def _describe(job: JobSpec, tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    try:
        data = load_job_data(job, tokenizer, vocab_size)
    except ValueError as error:
        return {"errors": list(islice(_bad_lines(job), _MOST_BAD_LINES)) or [str(error)]}
    plan = BatchPlan.for_job(job, len(data.train))
    return {
        "rows": len(data.train),
        "eval_rows": len(data.eval),
        "cut": data.num_truncated,
        "left_out": data.num_dropped,
        "tokens": sum(len(sequence.tokens) for sequence in data.train),
        "learnt": sum(int(sequence.is_target.sum()) for sequence in data.train),
        "longest": max(len(sequence.tokens) for sequence in data.train),
        "steps_an_epoch": -(-len(data.train) // job.batch_size),
        "steps": plan.num_steps,
        "epochs": round(plan.num_epochs, 2),
        "row": list(_parts(data.train[plan.indices(0)[0]], tokenizer)),
    }


def _bad_lines(job: JobSpec) -> Iterator[str]:
    """What is wrong with each line that is no row."""
    for file in filter(None, files_of(job)):
        for number, line in enumerate(file.read().removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
            try:
                if line.strip():
                    parse_row(line, f"{file.where} line {number}")
            except ValueError as error:
                yield str(error)


def _parts(sequence: TokenSequence, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """The text of a sequence in parts that are learnt or are not."""
    tokens, learnt = sequence.tokens[:_MOST_TOKENS], sequence.is_target[:_MOST_TOKENS]
    ends = [*(np.flatnonzero(np.diff(learnt.astype(np.int8))) + 1).tolist(), len(tokens)]
    for begin, end in zip([0, *ends], ends, strict=False):
        yield {"text": tokenizer.decode(tokens[begin:end].tolist()), "learnt": bool(learnt[begin])}
    if len(sequence.tokens) > _MOST_TOKENS:
        rest = len(sequence.tokens) - _MOST_TOKENS
        yield {"text": f" ... and {rest:,} tokens", "learnt": False}
