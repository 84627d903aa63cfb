#!/usr/bin/env python
"""Reinforcement loops of many tenants on one service at once, beside each alone.

    scripts/tinker_clients.sh DIR
    COOKBOOK_PYTHON=DIR/cookbook/bin/python python -m scripts.rl_tenants [--tenants N] [--steps N]

Every tenant runs tinker-cookbook's own loop, unmodified, in a process of its own: 32 answers a step
by the quickstart's base, right if they hold the tenant's letter. First all loop at once, then one
after another, on the same service. Rates are of the time in which all loop; a tenant's publish is
from its trained step to a client of the new weights; its gap is what the cookbook calls
`kl_sample_train`: far from 0 if samples were of other weights, or of another tenant's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from tests.helpers.launch import REPO
from tests.helpers.served_http import ServedHttp, serving_quickstart

LOOP = REPO / "tests" / "helpers" / "tinker" / "cookbook_rl.py"
LETTERS = "eaoistnrludc"
ROLES = {
    "service.api": "HTTP", "sampling.process": "sampler", "worker": "gang", LOOP.name: "loops",
}  # fmt: skip
"""Parts of the service by what their commands hold."""
_LOOK_S, _START_S = 0.02, 600.0


@dataclass(slots=True)
class Loop:
    """One tenant's loop, and what it has written."""

    tenant: str
    letter: str
    log: Path
    steps: list[dict[str, Any]] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    """When each step ended."""

    @property
    def rewards(self) -> list[float]:
        return [step["env/all/reward/total"] for step in self.steps]

    def seconds(self, name: str) -> float:
        """The median time of a part of a step; the first one compiles and starts."""
        return statistics.median(step[f"time/{name}"] for step in self.steps[1:])

    def follow(self) -> None:
        """Reads the steps that have been written since the last look."""
        path = self.log / "metrics.jsonl"
        # Behind the last line's end there may be half of the next one.
        lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        found = [step for step in map(json.loads, lines) if "env/all/reward/total" in step]
        self.times_s += [time.perf_counter()] * (len(found) - len(self.steps))
        self.steps = found


def run(served: ServedHttp, loops: Sequence[Loop], steps: int) -> dict[str, float]:
    """Runs loops that begin together; returns the CPU cores that each part took while all did.

    Raises:
        RuntimeError: with what a loop said that failed.
    """
    go = loops[0].log.with_suffix(".go")
    running = []
    for loop in loops:
        loop.log.mkdir(parents=True)
        env = {**os.environ, "TINKER_BASE_URL": served.address, "TINKER_TELEMETRY": "0"}
        env |= {"TINKER_API_KEY": served.token(loop.tenant), "HF_HUB_OFFLINE": "1"}
        env.pop("PYTHONPATH", None)
        words = (LOOP, loop.log, steps, "importance_sampling", loop.letter, go)
        out = (loop.log / "said.txt").open("wb")
        command = [os.environ["COOKBOOK_PYTHON"], *map(str, words)]
        running.append(
            subprocess.Popen(
                command, cwd=REPO / "configs/quickstart", env=env, stdout=out, stderr=out
            )
        )
    try:
        end_s = time.perf_counter() + _START_S
        while not all((loop.log / "ready").exists() for loop in loops):
            _check(loops, running)
            if time.perf_counter() > end_s:
                raise RuntimeError(
                    f"loops must be ready within {_START_S:g} s, got some that are not"
                )
            time.sleep(_LOOK_S)
        go.touch()
        began, used, is_over = Counter[str](), Counter[str](), False
        while any(process.poll() is None for process in running):
            _check(loops, running)
            before = sum(len(loop.steps) for loop in loops)
            for loop in loops:
                loop.follow()
            counts = [len(loop.steps) for loop in loops]
            if sum(counts) > before and min(counts) >= 1 and not is_over:
                used, is_over = _cpu_s(served, running), max(counts) == steps
                began = began or used
            time.sleep(_LOOK_S)
        _check(loops, running)
        span_s = rates(loops)["span_s"]
        return {role: (used[role] - began[role]) / span_s for role in used}
    finally:
        for process in running:
            process.kill()
            process.wait()


def _check(loops: Sequence[Loop], running: Sequence[subprocess.Popen[bytes]]) -> None:
    for loop, process in zip(loops, running, strict=True):
        if process.poll():
            said = (loop.log / "said.txt").read_text()[-3000:]
            raise RuntimeError(
                f"the loop of {loop.tenant} must end well, got {process.poll()}: {said}"
            )


def _cpu_s(served: ServedHttp, running: Sequence[subprocess.Popen[bytes]]) -> Counter[str]:
    """CPU seconds of each part until now."""
    found: Counter[str] = Counter()
    service = psutil.Process(served.process.pid)
    pids = {service.pid, *(child.pid for child in service.children(recursive=True))}
    pids |= {process.pid for process in (*running, *served.ranks())}
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            words, times = " ".join(process.cmdline()), process.cpu_times()
            role = next((role for word, role in ROLES.items() if word in words), "controller")
            found[role] += times.user + times.system
    return found


def rates(loops: Sequence[Loop]) -> dict[str, float]:
    """Sampled and trained tokens a second while all loop, behind the first step of each."""
    begin_s = max(loop.times_s[0] for loop in loops)
    end_s = min(loop.times_s[-1] for loop in loops)
    found = {"span_s": end_s - begin_s}
    for kind in ("sampled", "trained"):
        tokens = sum(
            step[f"tokens/{kind}"]
            for loop in loops
            for step, at_s in zip(loop.steps, loop.times_s, strict=True)
            if begin_s < at_s <= end_s
        )
        found[kind] = tokens / (end_s - begin_s)
    return found


def show(together: Sequence[Loop], alone: Sequence[Loop]) -> float:
    """Prints a row a tenant and the sums; returns the whole rate over the mean of one alone."""
    table = Table(title=f"{len(together)} tenants at once | each alone")
    for name in ("tenant", "rewards by step", "last quarter", "step s", "sampling s", "training s",
                 "publish s", "gap", "sampled/s", "trained/s"):  # fmt: skip
        table.add_column(name)
    for loop, own in zip(together, alone, strict=True):
        table.add_row(
            f"{loop.tenant} ({loop.letter})",
            f"{_line(loop.rewards)}\n{_line(own.rewards)}",
            *(f"{cell(loop)}\n{cell(own)}" for cell in (
                lambda x: f"{_late(x.rewards):.2f}",
                lambda x: f"{x.seconds('total'):.2f}",
                lambda x: f"{x.seconds('sampling'):.2f}",
                lambda x: f"{x.seconds('train_step'):.2f}",
                lambda x: f"{x.seconds('save_checkpoint_and_get_sampling_client'):.3f}",
                lambda x: f"{max(abs(s['optim/kl_sample_train_v1']) for s in x.steps):.0e}",
                lambda x: f"{rates([x])['sampled']:.0f}",
                lambda x: f"{rates([x])['trained']:.0f}",
            )),
        )  # fmt: skip
    Console(width=170).print(table)
    whole, ones = rates(together), [rates([own]) for own in alone]
    kinds = ("sampled", "trained")
    gains = {kind: whole[kind] / statistics.mean(one[kind] for one in ones) for kind in kinds}
    for kind, gain in gains.items():
        print(f"{kind} tokens/s: {whole[kind]:.0f} of all at once, {gain:.2f} times one alone")
    late = [_late(loop.rewards) for loop in together], [_late(own.rewards) for own in alone]
    print(f"reward of the last quarter: {statistics.mean(late[0]):.3f} at once, "
          f"{statistics.mean(late[1]):.3f} alone")  # fmt: skip
    return min(gains.values())


def _line(rewards: Sequence[float]) -> str:
    return " ".join(f"{reward:.1f}" for reward in rewards[:: max(1, len(rewards) // 8)])


def _late(rewards: Sequence[float]) -> float:
    return statistics.mean(rewards[-max(1, len(rewards) // 4) :])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()
    if "COOKBOOK_PYTHON" not in os.environ:
        parser.error("COOKBOOK_PYTHON must name an interpreter with tinker-cookbook, got nothing")
    if not 1 <= args.tenants <= len(LETTERS):
        parser.error(f"--tenants must be between 1 and {len(LETTERS)}, got {args.tenants}")
    root = Path(tempfile.mkdtemp(prefix="rl-tenants-"))
    names = [(f"tenant{i}", LETTERS[i]) for i in range(args.tenants)]
    with serving_quickstart(root, "float32") as served:
        run(served, [Loop("warm", "e", root / "warm")], 2)
        together = [Loop(*name, root / "together" / name[0]) for name in names]
        alone = [Loop(*name, root / "alone" / name[0]) for name in names]
        cores = run(served, together, args.steps)
        one = [run(served, [loop], args.steps) for loop in alone]
    show(together, alone)
    for name, used in (("at once", cores), ("one alone", one[0])):
        parts = ", ".join(f"{role} {count:.2f}" for role, count in used.items())
        print(f"CPU cores of {os.cpu_count()}, {name}: {parts}; {sum(used.values()):.2f} together")
    return 0


if __name__ == "__main__":
    sys.exit(main())
