#!/usr/bin/env python3
"""Times what the host does for a layer with adapters on all seven targets, by part.

    python scripts/bench/host_time.py                  # here, with or without a GPU
    python scripts/bench/host_time.py --profile 40     # and cProfile's table
    python scripts/bench/host_time.py --nano-batches 2 # in lanes that communicate nothing
    python scripts/bench/host_time.py --lora-sharding s_lora   # two ranks that exchange nothing

Layers are so small that a GPU keeps up with the host. Without a GPU, what would start a kernel does
nothing: the functions of the CUDA extension, Triton's driver, flash attention. All else runs as it
does on a GPU: work lists, argument structs, allocations, autograd functions, Triton's binding of
arguments. `launch` then is what the stand-ins take; on a GPU it holds the driver's own time.

One row a part: microseconds a layer, forward and backward, without the parts inside it. `between`
is what no other part is: the chain of calls, lanes, Megatron's block. `whole` is the least of all
turns, for what else runs on the machine only adds, without the clocks that the parts need.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import gc
import pstats
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, get_args

import torch
from host_stand_ins import without_gpu, without_ranks

from tlora_megatron.layers import black_box, linear, rank_sharded
from tlora_megatron.layers.multi_adapter import (
    MultiAdapterMixin,
    RankExchangeMixin,
    RankShardedMixin,
)
from tlora_megatron.model.layout import LoraSharding, ParallelLayout
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.extension import Extension
from tlora_megatron.ops.frozen import (
    triton_rms_norm,
    triton_rotary,
    triton_swiglu,
    varlen_attention,
)
from tlora_megatron.ops.lora.cuda import calls as cuda_calls
from tlora_megatron.ops.lora.cuda.ops import CudaOps
from tlora_megatron.ops.lora.plan_tensors import PlanTensors, WorkItems
from tlora_megatron.ops.lora.rank_places import RankPlaces
from tlora_megatron.ops.routing.segments import (
    Document,
    MicroBatchView,
    join_nano_batches,
    pack_micro_batch,
    use_micro_batch,
)
from tlora_megatron.parallel.transport.tensor_collectives import make_tensor_collectives
from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.profiling.synthetic_run import SyntheticRun

RANKS = (8, 16, 32, 64)
_WARM_UP = 5


class Clock:
    """Time in each part, that of the parts inside it left out."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: defaultdict[str, int] = defaultdict(int)
        self._inner = [0.0]

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Replaces a function by itself with a clock."""
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            begin = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                spent = time.perf_counter() - begin
                self.seconds[part] += spent - self._inner.pop()
                self.calls[part] += 1
                self._inner[-1] += spent

        static = isinstance(vars(owner).get(name), staticmethod)
        setattr(owner, name, staticmethod(timed) if static else timed)


def clock_parts(clock: Clock) -> None:
    """Puts clocks on everything that a layer calls of this project."""
    for name in ("down", "linear", "up", "backward_up", "dgrad", "branch_dgrad", "backward_down"):
        clock.wrap(CudaOps, name, f"linear: {name}")
    clock.wrap(cuda_calls, "_launch", "linear: library call")
    clock.wrap(Extension, "call", "linear: launch")
    for once in (PlanTensors, WorkItems):
        clock.wrap(once, "__init__", "work lists, once a micro-batch")
    for mixin in (MultiAdapterMixin, RankExchangeMixin, RankShardedMixin):
        clock.wrap(mixin, "product_vjp", "linear: around")
    for module in (linear, black_box, rank_sharded):
        clock.wrap(module._Call, "backward", "linear: around")
    clock.wrap(RankPlaces, "take", "linear: exchanged values")
    clock.wrap(RankPlaces, "put", "linear: exchanged values")
    launches = {
        "norm": (triton_rms_norm, "launch_forward", "launch_backward"),
        "swiglu": (triton_swiglu, "launch_forward", "launch_backward"),
        "heads": (triton_rotary, "launch_unpack", "launch_pack"),
        "attention": (varlen_attention, "_forward", "_backward"),
    }
    for part, (module, *names) in launches.items():
        for name in names:
            clock.wrap(module, name, part)


def block(
    layers: int, tokens: int, num_nano_batches: int, layout: ParallelLayout
) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Forward of a block of layers, and the backward of what it returns."""
    spec = ModelSpec(
        model_type="llama",
        num_layers=layers,
        hidden_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        ffn_size=256,
        vocab_size=1024,
        max_positions=4096,
        norm_eps=1e-5,
        rope_theta=5e5,
    )
    run = SyntheticRun(spec, layout, dtype=torch.bfloat16)
    lengths = LengthHistogram.single(tokens // len(RANKS))
    loads = [JobLoad(name=f"job{r}", rank=r, batch_size=1, lengths=lengths) for r in RANKS]
    run.super_model(loads, tokens)
    device = run.groups.device
    if num_nano_batches > 1:
        nano_batches = run.engine.nano_batches
        nano_batches.use(make_tensor_collectives(None, device))
    hidden = torch.randn(tokens, 1, spec.hidden_size, dtype=torch.bfloat16, device=device)
    hidden.requires_grad_()
    dy = torch.randn_like(hidden)
    decoder = run.engine.model.decoder

    def forward() -> torch.Tensor:
        with use_micro_batch(micro_batch(tokens, num_nano_batches)):
            return decoder(hidden_states=hidden, attention_mask=None)

    def backward(out: torch.Tensor) -> None:
        torch.autograd.backward(out, dy, inputs=[hidden])
        hidden.grad = None

    return forward, backward


def micro_batch(tokens: int, num_nano_batches: int) -> MicroBatchView:
    """A document of each job, in as many nano-batches of as many documents."""
    each = len(RANKS) // num_nano_batches
    length = tokens // len(RANKS)
    parts = [
        pack_micro_batch(
            [Document(slot=slot, length=length) for slot in range(begin, begin + each)],
            num_slots=len(RANKS),
            num_tokens=each * length,
            token_budget=tokens,
            num_parts=num_nano_batches,
        )
        for begin in range(0, len(RANKS), each)
    ]
    return parts[0] if num_nano_batches == 1 else join_nano_batches(parts)


def times_s(
    forward: Callable[[], Any], backward: Callable[[Any], None], turns: int, clock: Clock | None
) -> list[tuple[float, float]]:
    """Both passes of every turn; a clock's parts hold the sum over all turns."""
    rounds = []
    for turn in range(turns + _WARM_UP):
        if turn == _WARM_UP and clock is not None:
            clock.seconds.clear()
            clock.calls.clear()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        out = forward()
        middle = time.perf_counter()
        backward(out)
        rounds.append((middle - begin, time.perf_counter() - middle))
    return rounds[_WARM_UP:]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="rows of the micro-batch")
    parser.add_argument("--nano-batches", type=int, default=1, choices=(1, 2, 4))
    sharding = {"choices": get_args(LoraSharding), "help": "of two ranks; one by default"}
    parser.add_argument("--lora-sharding", **sharding)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--profile", type=int, default=0, metavar="ROWS", help="cProfile's table")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        without_gpu()
    layout = ParallelLayout()
    if args.lora_sharding is not None:
        without_ranks(2)
        layout = ParallelLayout(tp_size=2, lora_sharding=args.lora_sharding)
    forward, backward = block(args.layers, args.tokens, args.nano_batches, layout)
    gc.collect()
    gc.freeze()  # as training does
    rounds = times_s(forward, backward, args.turns, None)
    whole = [min(times) / args.layers * 1e6 for times in zip(*rounds, strict=True)]
    if args.profile:
        _print_profile(forward, backward, args.profile)
    clock = Clock()
    clock_parts(clock)
    clocked = sum(map(sum, times_s(forward, backward, args.turns, clock)))
    count = args.turns * args.layers
    print(f"{'part':32}{'us a layer':>12}{'calls':>8}")
    for part, seconds in sorted(clock.seconds.items()):
        print(f"{part:32}{seconds / count * 1e6:12.1f}{clock.calls[part] / count:8.1f}")
    between = (clocked - sum(clock.seconds.values())) / count * 1e6
    print(f"{'between':32}{between:12.1f}")
    print(f"{'whole: forward':32}{whole[0]:12.1f}")
    print(f"{'whole: backward':32}{whole[1]:12.1f}")
    print(f"{'whole':32}{sum(whole):12.1f}")


def _print_profile(forward: Callable[[], Any], backward: Callable[[Any], None], rows: int) -> None:
    with cProfile.Profile() as profile:
        for _ in range(10):
            backward(forward())
    pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(rows)


if __name__ == "__main__":
    main()
