#!/usr/bin/env python3
"""Tensor-parallel collectives alone and beside the GEMMs of another nano-batch.

    PYTHONPATH=. CUDA_DEVICE_MAX_CONNECTIONS=32 torchrun --standalone --nproc-per-node 4 \
        scripts/bench/tp_collectives.py [--seconds 55] [--mechanisms ...] [--csv OUT.csv]

Messages are a nano-batch's rows of Llama-3.1-8B and 70B. Beside a collective run the base GEMMs of
half a layer (the piece of another nano-batch that would hide it), from cuBLAS or from csrc/. Each
mechanism is checked first; a wrong one is not timed.

Times are medians over rounds of several calls in a row, the slowest process's; the GPU begins once
the host has enqueued them all. `hidden_share` is (alone + gemm - both) / alone. `MECHANISM:host` is
what the host takes for a call.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from bench_world import out_of_time
from result_rows import append_rows, checkout_commit
from tp_mechanisms import MECHANISMS, PARTS, make_mechanism, part_call
from tp_timer import Timer

from tests.helpers.collectives_case import LANES, check
from tlora_megatron.ops.lora.cuda.calls import GemmTile, gemm, multiprocessors
from tlora_megatron.ops.lora.cuda.fit import gemm_tile
from tlora_megatron.parallel.transport.copy_engine import CopyEngineCollectives
from tlora_megatron.parallel.transport.tensor_collectives import TensorCollectives

RESULTS = Path(__file__).parent / "results" / "tp_collectives.csv"
MODELS = {4096: ("8b", 6144, 14336), 8192: ("70b", 10240, 28672)}
"""Hidden size: name, outputs of the qkv linear, and the MLP's width."""
MESSAGES = ((4096, 8192), (8192, 8192), (4096, 4096), (8192, 4096), (2048, 4096), (16384, 8192))
"""Rows and features, the most telling first."""
GEMMS = ("cublas", "csrc")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measurement; the fields are the CSV's columns."""

    gpu: str
    world: int
    torch: str
    commit: str
    connections: str
    model: str
    rows: int
    hidden: int
    operation: str
    mechanism: str
    piece: str
    gemms: str
    """cublas or csrc. In rows of commit 7c17e5f csrc-N: N multiprocessors left free, since given
    up, for it costs the GEMMs more than copy engines gain."""
    alone_us: float
    bandwidth_gb_s: float
    """Bytes of the whole tensor over the time alone."""
    gemm_us: float
    both_us: float
    gemm_beside_us: float
    hidden_share: float


class Piece:
    """The base GEMMs of half a layer on this process, without adapters."""

    def __init__(self, rows: int, hidden: int, name: str, gemms: str, world: int) -> None:
        _, qkv, ffn = MODELS[hidden]
        inner = hidden if name == "attention" else ffn
        outer = qkv if name == "attention" else 2 * ffn
        self._own = gemms == "csrc"
        sizes = ((hidden, outer // world), (inner // world, hidden))
        self._operands = [_operands(rows, depth, width) for depth, width in sizes]

    def __call__(self) -> None:
        for x, weight_NK, out in self._operands:
            if self._own:
                _own_gemm(x, weight_NK, out)
            else:
                torch.mm(x, weight_NK.t(), out=out)


def _operands(rows: int, depth: int, width: int) -> tuple[torch.Tensor, ...]:
    x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(width, depth, device="cuda", dtype=torch.bfloat16).div_(depth**0.5)
    return x, weight, x.new_empty(rows, width)


def _own_gemm(x: torch.Tensor, weight_NK: torch.Tensor, out: torch.Tensor) -> None:
    tile: GemmTile = gemm_tile(len(x), len(weight_NK), multiprocessors(x.device) // 2)
    gemm(x, weight_NK, out, tile, transposed=True)


class Collective:
    """A call of a mechanism, in place where it sums all."""

    def __init__(
        self, collectives: TensorCollectives, operation: str, rows: int, hidden: int, world: int
    ) -> None:
        rows = rows // world if operation == "all_gather" else rows
        self._x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
        self._method = getattr(collectives, operation)

    def __call__(self) -> None:
        self._method(self._x, 0)

    def renew(self) -> None:
        """Summed in place over and over, values would overflow."""
        self._x.normal_()


class Bench:
    """All measurements of one world."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.world = dist.get_world_size()
        self.timer = Timer()
        self.pieces = tuple(arguments.pieces)
        self.gemms = tuple(arguments.gemms)
        self.operations = tuple(arguments.operations)
        self._facts = {
            "gpu": torch.cuda.get_device_name().removeprefix("NVIDIA "),
            "world": self.world,
            "torch": torch.__version__,
            "commit": arguments.commit,
            "connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "default"),
        }

    def parts(
        self, name: str, collectives: CopyEngineCollectives, rows: int, hidden: int
    ) -> Iterator[Row]:
        """What each part of a copy-engine all-reduce takes alone."""
        x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
        for part in PARTS:
            us = self.timer.alone(part_call(collectives, x, part))
            yield self._row(rows, hidden, "all_reduce", f"{name}:{part}", us)

    def measure(
        self, name: str, collectives: TensorCollectives, rows: int, hidden: int
    ) -> Iterator[Row]:
        """One mechanism at one size, alone and beside each piece."""
        for operation in self.operations:
            if operation != "all_reduce" and name not in ("copy_engine", "nccl"):
                continue
            call = Collective(collectives, operation, rows, hidden, self.world)
            alone_us = self.timer.alone(call)
            yield self._row(rows, hidden, operation, name, alone_us)
            yield self._row(rows, hidden, operation, f"{name}:host", self.timer.host(call))
            for piece_name in self.pieces:
                for gemms in self.gemms:
                    piece = Piece(rows, hidden, piece_name, gemms, self.world)
                    gemm_us = self.timer.compute(piece)
                    both_us, beside_us = self.timer.both(call, piece)
                    yield self._row(
                        rows,
                        hidden,
                        operation,
                        name,
                        alone_us,
                        piece=piece_name,
                        gemms=gemms,
                        gemm_us=gemm_us,
                        both_us=both_us,
                        gemm_beside_us=beside_us,
                        hidden_share=(alone_us + gemm_us - both_us) / alone_us,
                    )

    def _row(
        self,
        rows: int,
        hidden: int,
        operation: str,
        mechanism: str,
        alone_us: float,
        **more: object,
    ) -> Row:
        empty = {"piece": "", "gemms": ""} | dict.fromkeys(
            ("gemm_us", "both_us", "gemm_beside_us", "hidden_share"), 0.0
        )
        return Row(
            **self._facts,  # type: ignore[arg-type]
            model=MODELS[hidden][0],
            rows=rows,
            hidden=hidden,
            operation=operation,
            mechanism=mechanism,
            alone_us=alone_us,
            bandwidth_gb_s=rows * hidden * 2 / alone_us / 1e3,
            **empty | more,  # type: ignore[arg-type]
        )


def _sound(name: str, collectives: TensorCollectives, device: torch.device) -> bool:
    """Whether the mechanism is right on every process; says what is not."""
    problem = None
    try:
        collectives.prepare(LANES)
        bitwise = name == "copy_engine"
        group = dist.distributed_c10d._get_default_group()
        check(collectives, group, device, bitwise=bitwise)
    except AssertionError as error:
        problem = str(error)
        print(f"{name} is wrong on process {dist.get_rank()}: {problem[:2000]}", flush=True)
    wrong = torch.tensor([problem is not None], device=device, dtype=torch.float32)
    dist.all_reduce(wrong)
    return not wrong.item()


def _cells(row: Row) -> dict[str, object]:
    """By column, floats with the digits that a measurement has."""
    cells = dataclasses.asdict(row).items()
    return {name: f"{c:.4g}" if isinstance(c, float) else c for name, c in cells}


def _show(row: Row) -> None:
    text = f"{row.model} {row.rows}x{row.hidden} {row.operation} {row.mechanism}: "
    text += f"{row.alone_us:.0f} us, {row.bandwidth_gb_s:.0f} GB/s"
    if row.piece:
        text += (
            f"; {row.piece} {row.gemms} {row.gemm_us:.0f}, both {row.both_us:.0f}, GEMMs beside "
            f"{row.gemm_beside_us:.0f} us, hidden {row.hidden_share:.0%}"
        )
    print(text, flush=True)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=55, help="begin nothing after so long")
    parser.add_argument("--mechanisms", nargs="+", default=MECHANISMS, choices=MECHANISMS)
    parser.add_argument("--operations", nargs="+", default=["all_reduce"])
    parser.add_argument("--pieces", nargs="+", default=["mlp", "attention"])
    parser.add_argument("--gemms", nargs="+", default=GEMMS, choices=GEMMS)
    parser.add_argument("--messages", type=int, default=len(MESSAGES), help="how many of them")
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--commit", default=checkout_commit(), help="where git is not at hand")
    arguments = parser.parse_args()
    begin = time.monotonic()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl")
    bench, rows = Bench(arguments), []
    messages = MESSAGES[: arguments.messages]
    max_bytes = max(r * h * 2 for r, h in messages)
    made = {
        name: make_mechanism(name, dist.group.WORLD, device, max_bytes)
        for name in arguments.mechanisms
    }
    sound = {name: c for name, c in made.items() if _sound(name, c, device)}
    if dist.get_rank() == 0:
        print("sound:", *sound, flush=True)
    for message in messages:
        for name, collectives in sound.items():
            if out_of_time(begin, arguments.seconds):
                break
            found = list(bench.measure(name, collectives, *message))
            if isinstance(collectives, CopyEngineCollectives):
                found += bench.parts(name, collectives, *message)
            rows += found
            if dist.get_rank() == 0:
                for row in found:
                    _show(row)
    if dist.get_rank() == 0:
        append_rows(arguments.csv, [_cells(row) for row in rows])
    for collectives in made.values():
        collectives.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
