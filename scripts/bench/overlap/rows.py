"""Times of steps that take turns, and the rows that they make."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from scripts.bench.harness.clock import wait_for_all
from scripts.bench.harness.rows import gpu_name
from scripts.bench.overlap.cases import Bench, Step

_COLUMNS = (
    *("gpu", "world", "commit", "model", "tokens", "adapters", "mechanism", "nano_batches"),
    *("step_ms", "no_comm_ms", "no_split_ms", "hidden_share", "cpu_ms", "p20_ms", "p80_ms"),
    *("layers", "sequence_parallel", "graph", "settled_steps", "links", "connections", "torch"),
)


class Timer:
    """Milliseconds of the steps of one case, and of the host's part in them.

    Args:
        before: steps that run untimed first. GPUs at their power limit clock by what they did a
            moment ago: another variant, with more or fewer waits.
        in_a_row: steps that are timed together, as a run has them: a round trip to the device is
            shared.
    """

    def __init__(self, device: torch.device, *, before: int = 1, in_a_row: int = 3) -> None:
        self.device = device
        self._before, self._in_a_row = before, in_a_row
        self.samples: dict[str, list[tuple[float, ...]]] = {}

    def run(self, key: str, call: Callable[[], None]) -> None:
        """Times a few calls in a row and keeps the sample under a key."""
        for _ in range(self._before):
            call()
        wait_for_all()
        begin = time.perf_counter()
        for _ in range(self._in_a_row):
            call()
        started = time.perf_counter()
        wait_for_all()
        ended = time.perf_counter()
        pair = tuple((t - begin) * 1e3 / self._in_a_row for t in (ended, started))
        self.samples.setdefault(key, []).append(pair)

    def result(self) -> dict[str, dict[str, float]]:
        """Medians of the slowest process's times, by key."""
        found = {}
        for key, pairs in self.samples.items():
            slowest = torch.tensor(pairs, dtype=torch.float64, device=self.device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            steps, host = (sorted(column) for column in slowest.t().tolist())
            found[key] = {
                "step_ms": statistics.median(steps),
                "p20_ms": steps[len(steps) // 5],
                "p80_ms": steps[-1 - len(steps) // 5],
                "cpu_ms": statistics.median(host),
            }
        return found


def captured(step: Step) -> Callable[[], None]:
    """A CUDA graph of the step."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Autograd's backward runs on threads of its own, which a global mode would refuse.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    return graph.replay


def row(
    bench: Bench, step: Step, times: Mapping[str, Mapping[str, float]], key: str, commit: str
) -> dict[str, Any]:
    """The row of one variant, by column.

    Args:
        times: of all variants of the case, by key.
        key: the variant's.
    """
    case, variant, mine = bench.case, step.variant, times[key]
    frozen = "frozen " if variant.frozen else ""
    whole = times[f"{frozen}none 1"]["step_ms"]
    bare = times.get(f"{frozen}none skipped 1", {}).get("step_ms", float("nan"))
    exposed = whole - bare
    values = _about(bench) | {
        "commit": commit,
        "model": case.model,
        "tokens": f"{case.sequences}x{case.length}",
        "adapters": 0 if variant.frozen else case.adapters,
        "mechanism": variant.name,
        "nano_batches": step.parts,
        "no_comm_ms": round(bare, 3),
        "no_split_ms": round(whole, 3),
        "hidden_share": round((whole - mine["step_ms"]) / exposed, 3) if exposed else "",
        "graph": key.endswith("graph"),
        "settled_steps": "",
    }
    values |= {name: round(value, 3) for name, value in mine.items()}
    return {name: values[name] for name in _COLUMNS}


def _about(bench: Bench) -> dict[str, Any]:
    """The columns that all rows of a case share."""
    return {
        "gpu": gpu_name(),
        "world": dist.get_world_size(),
        "layers": bench.spec.num_layers,
        "sequence_parallel": bench.layout.sequence_parallel,
        "links": "no P2P" if os.environ.get("NCCL_P2P_DISABLE") == "1" else "P2P",
        "connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", ""),
        "torch": torch.__version__,
    }
