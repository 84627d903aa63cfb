"""Checks tensor-parallel collectives against sums that every process makes of all inputs.

Under torchrun, on GPUs if the first argument is `cuda`:
`collectives_case.py DEVICE KIND [graph | halves]`. Prints "all equal". With `halves` each half of
the processes is a group, as two replicas of a tensor-parallel model are.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from typing import NamedTuple, get_args

import torch
import torch.distributed as dist

from tests.helpers.kernel_case import poisoned_memory
from tests.helpers.variants import end_world
from tlora_megatron.parallel.collectives import TensorCollectives, make_tensor_collectives
from tlora_megatron.parallel.copy_engine import Operation

LANES = 3
_ROWS = (1, 2, 5, 16, 96, 333)
_FEATURES = (1, 24, 64, 520)
_LARGE = {"rows": 4096, "features": 1024}
"""A tensor in some draws on a GPU: several rounds of a lane of 4 MiB."""
MAX_BYTES = 4 << 20


class Call(NamedTuple):
    """A collective with every process's operand."""

    operation: Operation
    lane: int
    operands: list[torch.Tensor]

    def expected(self, rank: int, sums: torch.dtype = torch.float32) -> torch.Tensor:
        """This process's result: summed up in rank order, rounded once."""
        if self.operation == "all_gather":
            return torch.cat(self.operands)
        total = self.operands[0].to(sums)
        for operand in self.operands[1:]:
            total = total + operand.to(sums)
        total = total.to(self.operands[0].dtype)
        if self.operation == "all_reduce":
            return total
        rows = len(total) // len(self.operands)
        return total[rank * rows : (rank + 1) * rows]


def draw_call(number: int, size: int, device: torch.device) -> Call:
    """The same call on every process, with fresh operands."""
    draw = random.Random(number)
    operation = draw.choice(get_args(Operation))
    rows, features = draw.choice(_ROWS), draw.choice(_FEATURES)
    dtype = draw.choice([torch.bfloat16, torch.float16, torch.float32])
    if device.type == "cuda" and draw.random() < 0.25:
        rows, features = _LARGE["rows"] + draw.choice([0, 1]), _LARGE["features"]
    if operation == "reduce_scatter":
        rows = -(-rows // size) * size
    generator = torch.Generator(device).manual_seed(number)
    operands = [
        torch.randn(rows, features, generator=generator, device=device).to(dtype)
        for _ in range(size)
    ]
    lane = draw.randrange(LANES)
    if operation == "all_gather" and number % 2:  # codes travel, too: any bytes
        operands = [
            torch.randint(256, (rows, 4 * features), generator=generator, device=device).byte()
            for _ in range(size)
        ]
    return Call(operation, lane, operands)


def check(
    collectives: TensorCollectives,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    calls: int = 50,
    seed: int = 0,
    bitwise: bool = True,
) -> None:
    """Runs lanes beside each other, on streams that lag at random; then compares everything.

    Args:
        bitwise: with the sum in rank order; else each result's error in fp64 is bounded.

    Raises:
        AssertionError: at the first call whose result is wrong.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    drawn = [draw_call(1000 * seed + i, size, device) for i in range(calls)]
    own = [call.operands[rank].clone() for call in drawn]
    lag = random.Random(seed * size + rank)
    streams = [torch.cuda.Stream() for _ in range(LANES)] if device.type == "cuda" else None
    results = []
    with poisoned_memory():
        if streams is not None:
            torch.cuda.synchronize()
        for call, x in zip(drawn, own, strict=True):
            with contextlib.ExitStack() as stack:
                if streams is not None:
                    stack.enter_context(torch.cuda.stream(streams[call.lane]))
                    torch.cuda._sleep(lag.choice([0, 0, 10_000, 300_000]))
                results.append(getattr(collectives, call.operation)(x, call.lane))
        if streams is not None:
            torch.cuda.synchronize()
    for number, (call, result) in enumerate(zip(drawn, results, strict=True)):
        _compare(call, result, rank, f"call {number}, {call.operation}", bitwise=bitwise)


def _compare(call: Call, result: torch.Tensor, rank: int, name: str, *, bitwise: bool) -> None:
    expected = call.expected(rank)
    assert result.shape == expected.shape, name
    if bitwise:
        torch.testing.assert_close(result, expected, rtol=0, atol=0, msg=lambda m: f"{name}: {m}")
    wide = call._replace(operands=[operand.double() for operand in call.operands])
    sizes = call._replace(operands=[operand.abs() for operand in wide.operands])
    error = (result.double() - wide.expected(rank, torch.float64)).norm()
    # Each of the sums in between is rounded once.
    roundings = torch.finfo(result.dtype).eps if result.dtype.is_floating_point else 0.0
    bound = len(call.operands) * roundings * sizes.expected(rank, torch.float64).norm()
    assert error <= bound, f"{name}: error {error} over {bound}"


def check_graph(collectives: TensorCollectives, group: dist.ProcessGroup) -> None:
    """A captured chain of collectives, replayed on fresh inputs."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    shape = (48 * size, 256)
    held = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)

    def chain() -> torch.Tensor:
        part = collectives.reduce_scatter(held.clone(), 1)
        return collectives.all_reduce(collectives.all_gather(part, 1), 0)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output = chain()
    for number in range(5):
        generator = torch.Generator("cuda").manual_seed(number)
        operands = [
            torch.randn(shape, generator=generator, device="cuda").bfloat16() for _ in range(size)
        ]
        held.copy_(operands[rank])
        graph.replay()
        summed = Call("all_reduce", 0, operands).expected(rank)
        expected = Call("all_reduce", 0, [summed] * size).expected(rank)
        torch.testing.assert_close(output, expected, rtol=0, atol=0)
        dist.barrier(group)


def halves() -> dist.ProcessGroup:
    everyone = list(range(dist.get_world_size()))
    middle = len(everyone) // 2
    groups = [dist.new_group(half) for half in (everyone[:middle], everyone[middle:])]
    return groups[dist.get_rank() >= middle]


def main() -> None:
    device_type, kind, *rest = sys.argv[1:]
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    group = halves() if rest == ["halves"] else dist.group.WORLD
    collectives = make_tensor_collectives(group, device, kind, max_bytes=MAX_BYTES)  # type: ignore[arg-type]
    collectives.prepare(LANES)
    if rest == ["graph"]:
        check_graph(collectives, group)
    else:
        for seed in range(4):
            check(collectives, group, device, seed=seed, bitwise=kind != "nccl")
    rank = dist.get_rank()
    collectives.close()
    del group
    if rank == 0:
        print(f"{collectives.name}: all equal")
    end_world()


if __name__ == "__main__":
    main()
