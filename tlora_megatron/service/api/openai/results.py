"""The file with the steps of a job that has ended, as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from tlora_megatron.service.history import Told

COLUMNS = (
    *("step", "train_loss", "train_accuracy", "valid_loss", "valid_mean_token_accuracy"),
    *("learning_rate", "grad_norm", "tokens", "valid_exact_match"),
)
"""The first five are the API's; accuracies of single tokens are not measured and stay empty."""
_FROM_STEP = {
    "train_loss": "loss",
    "learning_rate": "lr",
    "grad_norm": "grad_norm",
    "tokens": "tokens",
}
_FROM_EVALUATION = {"valid_loss": "eval_loss", "valid_exact_match": "eval_exact_match"}


def results_csv(told: Sequence[Told]) -> bytes:
    """A line for each step, with the evaluation after it where there was one."""
    lines: dict[int, dict[str, Any]] = {}
    for _, row in told:
        if row["kind"] != "event":
            names = _FROM_STEP if row["kind"] == "step" else _FROM_EVALUATION
            line = lines.setdefault(row["step"], {"step": row["step"]})
            line |= {to: row.get(name) for to, name in names.items()}
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines[step] for step in sorted(lines))
    return text.getvalue().encode()
