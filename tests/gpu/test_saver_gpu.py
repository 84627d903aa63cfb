"""Saving beside training on a GPU: copies on a side stream into memory that is page-locked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.launch import torchrun
from tests.helpers.saver_case import (
    BUFFERS,
    adapter,
    checkpoint,
    make_job,
    make_saver,
    whole_values,
)
from tlora_megatron.training.job_state import JobState
from tlora_megatron.training.saving.saver import Saver

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
WORKER = Path(__file__).parents[1] / "helpers" / "saver_case.py"


def hold_copies(saver: Saver) -> None:
    """Keeps the side stream busy for a while, so that a save's copies come late."""
    stream = saver._taker._stream
    assert stream is not None
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)


def expected_of(job: JobState) -> dict[str, torch.Tensor]:
    moments = {f"{b}.{n}": t for b in BUFFERS[1:] for n, t in whole_values(job, b).items()}
    return whole_values(job, "master") | moments


def assert_saved(folder: Path, name: str, step: int, expected: dict[str, torch.Tensor]) -> None:
    path = folder / "jobs" / name / "checkpoints" / f"step_{step:08d}"
    found = load_file(path / "adapter.safetensors") | load_file(path / "optimizer.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_memory_is_page_locked(tmp_path: Path) -> None:
    saver = make_saver(make_job("a", device=GPU))
    assert saver._memory is not None
    assert saver._memory.flat().is_pinned()
    saver.close()
    assert not saver._memory.flat().is_pinned()


def test_the_host_does_not_wait_and_the_next_step_does(tmp_path: Path) -> None:
    job = make_job("a", device=GPU)
    saver, slab = make_saver(job), job.adapter.slab
    assert saver._memory is not None
    saver._memory.flat()
    expected = expected_of(job)
    for step in range(3):
        torch.cuda.synchronize()
        hold_copies(saver)
        saver.save(job, [checkpoint(tmp_path, job), adapter(tmp_path, job)])
        copied = slab._read_until
        assert copied is not None
        assert not copied.query(), "the host has waited for the copy"
        slab.wait_for_readers()
        assert not copied.query(), "the host has waited for the copy"
        for buffer in slab.buffers().values():
            buffer.add_(1)
        saver.drain()
        assert_saved(tmp_path, "a", step, expected)
        expected, job.step = expected_of(job), job.step + 1
    saver.close()


def test_rounds_go_on_before_the_copy_is_done(tmp_path: Path) -> None:
    """Only the job's own step waits: work of the training stream does not."""
    job = make_job("a", device=GPU)
    saver = make_saver(job)
    assert saver._memory is not None
    saver._memory.flat()  # both take longer the first time than the copies are held
    torch.ones(1000, device=GPU).sum().item()
    hold_copies(saver)
    saver.save(job, [checkpoint(tmp_path, job)])
    torch.ones(1000, device=GPU).sum().item()  # waits for the training stream
    copied = job.adapter.slab._read_until
    assert copied is not None
    assert not copied.query()
    saver.close()


def test_a_jobs_memory_may_go_while_it_is_copied(tmp_path: Path) -> None:
    job = make_job("a", rank=16, device=GPU)
    saver, expected = make_saver(job), expected_of(job)
    sizes = [buffer.numel() for buffer in job.adapter.slab.buffers().values()]
    target = checkpoint(tmp_path, job)
    torch.cuda.synchronize()
    hold_copies(saver)
    saver.save(job, [target])
    del job
    trash = [torch.full((size,), torch.nan, device=GPU) for size in sizes * 4]
    saver.close()
    assert_saved(tmp_path, "a", 0, expected)
    assert len(trash) == 12


def test_memory_for_one_is_enough_for_three(tmp_path: Path) -> None:
    jobs = [make_job(name, rank=rank, device=GPU) for name, rank in (("a", 8), ("b", 4), ("c", 3))]
    saver, expected = make_saver(*jobs, memory_gb=1e-9), {}
    for _ in range(3):
        for job in jobs:
            saver.save(job, [checkpoint(tmp_path, job)])
            expected[job.name] = expected_of(job)
        for job in jobs:
            job.adapter.slab.wait_for_readers()
            for buffer in job.adapter.slab.buffers().values():
                buffer.add_(1)
            job.step += 1
    saver.close()
    for job in jobs:
        assert_saved(tmp_path, job.name, 2, expected[job.name])


@pytest.mark.multigpu
def test_parts_of_two_gpus_are_gathered(tmp_path: Path) -> None:
    log = torchrun(WORKER, 2, tmp_path)
    assert "saved tensor parallel" in log
    assert "saved slices" in log
