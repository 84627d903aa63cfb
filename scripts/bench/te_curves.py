"""Loss curves of `te_adapters.py train`: their file and their figure."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from result_rows import write_rows
from te_models import LORAS


def write(path: Path, curves: Mapping[str, Sequence[Sequence[float]]], tp_size: int) -> None:
    """One row a mode, step and job.

    Args:
        curves: by mode, losses by step and job.
    """
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    same = {"tp_size": tp_size, "gpu": gpu, "torch": torch.__version__}
    rows = [
        {"mode": mode, "step": step, "job": job, "loss": f"{loss:.6g}", **same}
        for mode, curve in curves.items()
        for step, losses in enumerate(curve, start=1)
        for job, loss in enumerate(losses)
    ]
    write_rows(path, rows)
    print(f"wrote {path}", flush=True)


def plot(source: Path, target: Path) -> None:
    """Draws the curves, a panel a job; says so where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        print(f"matplotlib is not installed; draw {source} elsewhere with `plot`", flush=True)
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with source.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    jobs = sorted({row["job"] for row in rows})
    figure, axes = plt.subplots(1, len(jobs), figsize=(4 * len(jobs), 3.2), squeeze=False)
    for panel, job in zip(axes[0], jobs, strict=True):
        for number, mode in enumerate(dict.fromkeys(row["mode"] for row in rows)):
            own = [row for row in rows if (row["mode"], row["job"]) == (mode, job)]
            steps, losses = ([float(row[key]) for row in own] for key in ("step", "loss"))
            panel.plot(steps, losses, ("-", "--", ":", "-.")[number % 4], label=mode)
        panel.set(title=f"job {job}, rank {LORAS[int(job)].rank}", xlabel="step", ylabel="loss")
    axes[0][0].legend()
    figure.suptitle(f"{rows[0]['gpu']}, TP {rows[0]['tp_size']}")
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    print(f"wrote {target}", flush=True)
