"""Jobs that are saved without a model. As a worker, `saver_case.py DIR` in two processes, over
NCCL where there are GPUs: saves adapters whose parts are tensor parallel, then slices of one
replica's state on both, and changes them before they are copied.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.layout_sites import SPEC, sites_of_ranks
from tests.helpers.tiny_models import random_factors
from tests.helpers.variants import begin_world, end_world
from tlora_megatron.config.job import DataSpec, JobSpec, LoraSpec
from tlora_megatron.config.schema import RunSpec
from tlora_megatron.layers.adapter_bank import Adapter
from tlora_megatron.layers.slab import AdapterSlab, StatePlacement
from tlora_megatron.layers.slab_layout import slab_layout
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.training.formats.checkpoint import find_checkpoint
from tlora_megatron.training.job_files import JobFiles
from tlora_megatron.training.job_state import JobState
from tlora_megatron.training.saving.saver import Saver, Target

CPU = torch.device("cpu")
BUFFERS = ("master", "exp_avg", "exp_avg_sq")


def lone_groups(device: torch.device = CPU) -> Any:
    """The groups of a run of one process, without a process group."""
    return SimpleNamespace(
        layout=ParallelLayout(),
        device=device,
        is_writer=True,
        is_first_replica=True,
        model_group=None,  # one rank gathers nothing
    )


def make_job(name: str, *, rank: int = 4, device: torch.device = CPU) -> JobState:
    lora = LoraSpec(rank=rank, alpha=rank)
    slab = AdapterSlab(slab_layout(sites_of_ranks(SPEC, 1)[0], lora), device)
    for seed, buffer in enumerate(BUFFERS):
        slab.load(random_factors(SPEC, lora, seed=seed + 10 * rank).__getitem__, buffer)
    data: Any = SimpleNamespace(train=(), fingerprint="none")
    plan: Any = SimpleNamespace(num_steps=10)
    spec = JobSpec(name=name, data=DataSpec(train="unused.jsonl"), lora=lora, max_steps=10)
    adapter = Adapter(name=name, lora=lora, slab=slab)
    return JobState(spec=spec, data=data, plan=plan, adapter=adapter)


def make_saver(*jobs: JobState, memory_gb: float | None = None) -> Saver:
    groups = lone_groups(jobs[0].adapter.slab.master.device)
    return Saver(jobs, SPEC, groups, memory_gb)


def _files(folder: Path) -> JobFiles:
    run = RunSpec(output_dir=str(folder))
    return JobFiles(run, base_model="base", quantisation=None, has_metrics=False)


def checkpoint(folder: Path, job: JobState, errors: list[Exception] | None = None) -> Target:
    found = [] if errors is None else errors
    return _files(folder).checkpoint(job, found.append)


def adapter(folder: Path, job: JobState, errors: list[Exception] | None = None) -> Target:
    found = [] if errors is None else errors
    return _files(folder).adapter(job, found.append)


def whole_values(job: JobState, buffer: str) -> dict[str, torch.Tensor]:
    slab = job.adapter.slab
    views = slab.layout.views(slab.buffers()[buffer].cpu())
    return {
        f.name: (v if f.which == "lora_a" else v.t()).clone()
        for f, v in zip(slab.layout.factors, views, strict=True)
    }


def main() -> None:
    device = begin_world()
    for case in ("tensor parallel", "slices"):
        _save(Path(sys.argv[1]) / case, case, dist.get_rank(), device)
    end_world()


def _save(folder: Path, case: str, rank: int, device: torch.device) -> None:
    world: Any = dist.group.WORLD
    is_tp = case == "tensor parallel"
    groups = ParallelGroups(
        layout=ParallelLayout(tp_size=2) if is_tp else ParallelLayout(dp_size=2),
        tp_rank=rank if is_tp else 0, pp_rank=0, cp_rank=0, dp_rank=0 if is_tp else rank,
        tp_group=world, dp_cp_group=world, model_group=world, device=device,
    )  # fmt: skip
    whole = make_job("a")
    lora = whole.spec.lora
    sites = sites_of_ranks(SPEC, 2)[rank] if is_tp else sites_of_ranks(SPEC, 1)[0]
    placement = StatePlacement() if is_tp else StatePlacement(group=world)
    slab = AdapterSlab(slab_layout(sites, lora), device, placement)
    for seed, buffer in enumerate(BUFFERS):
        slab.load(random_factors(SPEC, lora, seed=seed).__getitem__, buffer)
    whole.adapter = Adapter(name="a", lora=lora, slab=slab)
    saver, errors = Saver([whole], SPEC, groups, None), list[Exception]()
    for _ in range(3):
        if saver._taker._stream is not None:
            with torch.cuda.stream(saver._taker._stream):
                torch.cuda._sleep(200_000_000)
        saver.save(whole, [checkpoint(folder, whole, errors), adapter(folder, whole, errors)])
        slab.wait_for_readers()
        for buffer in slab.buffers().values():
            buffer.mul_(2)
        whole.step += 1
    saver.drain()
    assert not errors, errors
    saver.close()
    if rank == 0:
        _check(folder, whole.spec.lora)


def _check(folder: Path, lora: Any) -> None:
    """The last save is the initial values times four."""
    found = find_checkpoint(folder / "jobs/a/checkpoints")
    assert found is not None
    assert found.step == 2
    again = make_job("a")
    found.restore(again)
    for seed, buffer in enumerate(BUFFERS):
        expected = AdapterSlab(again.adapter.slab.layout, torch.device("cpu"))
        expected.load(random_factors(SPEC, lora, seed=seed).__getitem__)
        assert torch.equal(again.adapter.slab.buffers()[buffer], expected.master * 4), buffer
    print("saved", folder.name, flush=True)


if __name__ == "__main__":
    main()
