"""Gathers tensors of several types by one launch and one by one: every rank says if equal."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from tlora_megatron.parallel.collectives import gather_rows, gather_together


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    generator = torch.Generator("cuda").manual_seed(rank)
    for rows in (1, 17, 4096):
        codes = torch.randint(256, (rows, 4096), generator=generator, device="cuda")
        scales = torch.rand(rows, generator=generator, device="cuda")
        tensors = [codes.to(torch.uint8), scales, scales.bfloat16()]
        together = [pending.wait() for pending in gather_together(tensors, None)]
        for found, x in zip(together, tensors, strict=True):
            assert torch.equal(found, gather_rows(x, None).wait()), (rows, x.dtype)
            assert torch.equal(found[rank * rows : (rank + 1) * rows], x)
    print(f"rank {rank}: all equal")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
