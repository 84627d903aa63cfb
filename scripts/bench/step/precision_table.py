"""The tables of docs/benchmarks.md from rows of steps on bases of two precisions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

_HEAD = ("tokens/s", "ms", "ms of the floor", "step / floor", "rate over bf16", "peak GiB")


def precision_tables(rows: Sequence[Mapping[str, str]]) -> str:
    """Markdown: a table for each GPU and layout; of rows of one cell the last counts."""
    cells = {
        (row["gpu"], row["jobs"], row["precision"]): row
        for row in rows
        if row["mode"] in ("together", "hf_peft")
    }
    gpus = dict.fromkeys(gpu for gpu, *_ in cells)
    return "\n\n".join("\n".join(_table(gpu, cells)) for gpu in gpus)


def _table(gpu: str, cells: Mapping[tuple[str, str, str], Mapping[str, str]]) -> Iterator[str]:
    models = {row["model"] for (name, *_), row in cells.items() if name == gpu}
    yield f"| {', '.join(sorted(models))}, {gpu} | " + " | ".join(_HEAD) + " |"
    yield "|---" * (1 + len(_HEAD)) + "|"
    for (name, jobs, precision), row in cells.items():
        if name != gpu:
            continue
        is_peft = row["mode"] == "hf_peft"
        wide = cells.get((gpu, jobs, "bf16"))
        rate, step_ms = float(row["tokens_per_s"]), float(row["step_ms"])
        floor_ms = float(row["floor_ms"] or 0.0)
        values = (
            f"{rate:,.0f}",
            f"{step_ms:.1f}",
            f"{floor_ms:.1f}" if floor_ms else "",
            f"{step_ms / floor_ms:.2f}" if floor_ms else "",
            "" if is_peft or wide is None else f"{rate / float(wide['tokens_per_s']):.2f}",
            f"{int(row['peak_bytes']) / 2**30:.0f}",
        )
        what = "PEFT" if is_peft else precision
        yield f"| {what}: {jobs} | " + " | ".join(values) + " |"
