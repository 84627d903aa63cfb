#!/usr/bin/env python3
"""Proves a run's adapters without tlora_megatron: loads each with PEFT on the base and generates.

Nothing of the training code is used: transformers reads the base and the tokenizer, PEFT the
adapter, and greedy generation over the evaluation rows gives the exact match, which must be the one
that summary.json reports. A row counts when every generated token equals the completion's, its end
included.

usage: verify_adapters.py RUN_DIR [--rows N] [--show N] [--batch-size N] [--device DEVICE]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

SLACK = {"float32": 0.0, "bfloat16": 0.05}
"""Share of rows that may differ: in bf16 two token scores often round to the same value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One evaluation row as tokens; the run truncated it to the job's max_seq_len."""

    prompt: str
    prompt_ids: tuple[int, ...]
    target_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of generation for one job, beside what the run reported."""

    name: str
    rows: int
    rows_total: int
    matches_base: int
    matches: int
    reported: float
    slack: float

    @property
    def agrees(self) -> bool:
        """True if the matches seen can belong to the reported share of all rows.

        With only some of the rows seen, the unseen ones may all match, or none of them.
        """
        low, high = expected_matches(self.reported, self.rows, self.rows_total, self.slack)
        return low <= self.matches <= high


def expected_matches(reported: float, rows: int, rows_total: int, slack: float) -> tuple[int, int]:
    """Fewest and most matches in `rows` of `rows_total` rows of which the share `reported` match.

    `slack` is the share of the rows seen by which rounding may change the count.
    """
    matches_total = round(reported * rows_total)
    spare = math.floor(slack * rows)
    low = max(0, matches_total - (rows_total - rows)) - spare
    return low, min(rows, matches_total) + spare


def read_rows(path: Path, tokenizer: PreTrainedTokenizerBase, max_seq_len: int) -> list[Row]:
    """The rows of a prompt/completion JSONL file in the project's tokens.

    Raises:
        ValueError: if a line has no prompt and completion, which generation needs.
    """
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        record = json.loads(line)
        if not {"prompt", "completion"} <= record.keys():
            raise ValueError(
                f"{path}:{number} must hold prompt and completion, got {sorted(record)}"
            )
        prompt_ids = tokenizer(record["prompt"])["input_ids"]
        target_ids = tokenizer(record["completion"], add_special_tokens=False)["input_ids"]
        target_ids = [*target_ids, tokenizer.eos_token_id][: max(0, max_seq_len - len(prompt_ids))]
        if prompt_ids and target_ids:
            row = Row(
                prompt=record["prompt"], prompt_ids=tuple(prompt_ids), target_ids=tuple(target_ids)
            )
            rows.append(row)
    return rows


@torch.inference_mode()
def generate(model: Any, rows: list[Row], end: int, batch_size: int) -> list[list[int]]:
    """Greedily generated token ids of each row, as many as its target has at most."""
    found = []
    for batch in _batches(rows, batch_size):
        longest = max(len(row.prompt_ids) for row in batch)
        pads = [longest - len(row.prompt_ids) for row in batch]
        ids = [[end] * pad + list(row.prompt_ids) for pad, row in zip(pads, batch, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in pads]
        output = model.generate(
            input_ids=torch.tensor(ids, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            max_new_tokens=max(len(row.target_ids) for row in batch),
            do_sample=False,
            eos_token_id=end,
            pad_token_id=end,
        )
        for row, tokens in zip(batch, output[:, longest:].tolist(), strict=True):
            found.append(tokens[: len(row.target_ids)])
    return found


def _batches(rows: list[Row], size: int) -> Iterator[list[Row]]:
    for begin in range(0, len(rows), size):
        yield rows[begin : begin + size]


def _num_matches(rows: list[Row], generated: list[list[int]]) -> int:
    return sum(list(row.target_ids) == tokens for row, tokens in zip(rows, generated, strict=True))


class Verifier:
    """The base model of a run, and what its adapters generate on it."""

    def __init__(self, run_dir: Path, arguments: argparse.Namespace, console: Console) -> None:
        self.config = json.loads((run_dir / "config.json").read_text())
        self.summary = json.loads((run_dir / "summary.json").read_text())
        self.run_dir, self.arguments, self.console = run_dir, arguments, console
        base = self.config["base_model"]
        if base["path"] is None:
            raise ValueError("base_model.path must be a Hugging Face directory, got random weights")
        self.dtype: str = base["dtype"]
        self.tokenizer = AutoTokenizer.from_pretrained(base["path"])
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            base["path"], dtype=getattr(torch, self.dtype)
        )
        self.base: Any = model.to(arguments.device).eval()

    def verify(self, job: dict[str, Any]) -> Finding | None:
        """Generates for one job and prints examples; None if it has nothing to be compared with."""
        name, result = job["name"], self.summary["jobs"].get(job["name"], {})
        reason = None
        if not result.get("adapter"):
            reason = f"has no adapter: {result.get('status')}, {result.get('reason')}"
        elif job["data"]["eval"] is None or result.get("exact_match_after") is None:
            reason = "has no evaluation"
        if reason:
            self.console.print(f"job {name} {reason}", style="yellow", markup=False)
            return None
        everything = read_rows(Path(job["data"]["eval"]), self.tokenizer, job["max_seq_len"])
        rows = everything[: self.arguments.rows] if self.arguments.rows else everything
        end, size = self.tokenizer.eos_token_id, self.arguments.batch_size
        before = generate(self.base, rows, end, size)
        adapted = PeftModel.from_pretrained(self.base, self._adapter_folder(result)).eval()
        after = generate(adapted, rows, end, size)
        self.base = adapted.unload()
        self._print_examples(name, rows, before, after)
        return Finding(
            name=name,
            rows=len(rows),
            rows_total=len(everything),
            matches_base=_num_matches(rows, before),
            matches=_num_matches(rows, after),
            reported=result["exact_match_after"],
            slack=SLACK[self.dtype],
        )

    def _adapter_folder(self, result: dict[str, Any]) -> Path:
        folder = Path(result["adapter"])
        return folder if folder.is_dir() else self.run_dir / folder

    def _print_examples(
        self, name: str, rows: list[Row], before: list[list[int]], after: list[list[int]]
    ) -> None:
        table = Table(title=f"{name}: generated by transformers + PEFT", title_justify="left")
        for column in ("prompt", "expected", "base model says", "adapter says"):
            table.add_column(column, overflow="fold")
        shown = list(zip(rows, before, after, strict=True))[: self.arguments.show]
        for row, base_ids, adapter_ids in shown:
            texts = [
                row.prompt.strip(),
                *map(self._text, (list(row.target_ids), base_ids, adapter_ids)),
            ]
            table.add_row(*(text.replace("[", r"\[") for text in texts))
        self.console.print(table)

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip()


def print_findings(console: Console, findings: list[Finding]) -> None:
    """The exact match of each job, generated against reported."""
    table = Table(title="exact match of greedy generation", title_justify="left")
    table.add_column("job")
    for column in ("rows", "base model", "adapter", "reported by the run", "agrees"):
        table.add_column(column, justify="right")
    for finding in findings:
        table.add_row(
            finding.name,
            f"{finding.rows} of {finding.rows_total}",
            f"{finding.matches_base / finding.rows:.3f}",
            f"{finding.matches / finding.rows:.3f}",
            f"{finding.reported:.3f}",
            "yes" if finding.agrees else "NO",
        )
    console.print(table)


def read_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run_dir", type=Path, help="output directory of `tlora train`")
    parser.add_argument("--rows", type=int, default=0, help="rows a job; 0 = all")
    parser.add_argument("--show", type=int, default=3, help="examples a job")
    parser.add_argument("--batch-size", type=int, default=32, help="rows generated together")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Exit status 1 if an adapter does not do what the run says it does."""
    arguments = read_arguments(argv)
    console = Console()
    disable_progress_bar()
    try:
        verifier = Verifier(arguments.run_dir, arguments, console)
        found = [verifier.verify(job) for job in verifier.config["jobs"]]
    except (OSError, ValueError) as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 1
    findings = [finding for finding in found if finding is not None]
    if not findings:
        console.print("no job has an adapter and evaluation rows", style="red")
        return 1
    print_findings(console, findings)
    wrong = [finding.name for finding in findings if not finding.agrees]
    if wrong:
        console.print(f"not what the run reported: {', '.join(wrong)}", style="red", markup=False)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
