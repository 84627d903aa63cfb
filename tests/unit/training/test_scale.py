"""Limits with many jobs, large slabs, large seeds and several nodes."""

from __future__ import annotations

import gc
import resource
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.linear_case import SPEC, Case
from tests.unit.training.run.test_output_dir import config_for
from tlora_megatron.config.job import DataSpec, JobSpec, LoraSpec
from tlora_megatron.layers.arenas import ArenaRoom
from tlora_megatron.layers.linear import multi_lora_linear
from tlora_megatron.layers.slab import initial_factor
from tlora_megatron.ops.dropout import mix32, mix_ints
from tlora_megatron.ops.routing import Document, pack_micro_batch
from tlora_megatron.training.data.job_data import BatchPlan, JobData
from tlora_megatron.training.data.tokenize import TokenSequence
from tlora_megatron.training.optimizer import square_sum
from tlora_megatron.training.run import training_run
from tlora_megatron.training.run.preparation import PreparedJob


class _Calls(TorchDispatchMode):
    """Counts the operations that run under it, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _operations(num_jobs: int, num_present: int, linear: str) -> Counter[str]:
    """Operations of one forward and backward with `num_jobs` adapters, the first few with rows.

    Tables are made by a run before: they are made once a micro-batch, not once a linear.
    """
    lora = LoraSpec(rank=8, alpha=8, dropout=0.1, target_modules=("v_proj", "down_proj"))
    case = Case(linear, torch.float32, loras=[lora] * num_jobs)
    view = pack_micro_batch(
        [Document(slot=slot, length=8) for slot in range(num_present)],
        num_slots=num_jobs,
        num_tokens=256,
        dropout_keys=list(range(num_jobs)),
    )
    x, dy = case.draw(256, 1, case.site.in_size), case.draw(256, 1, case.site.out_size)
    for counted in (_Calls(), _Calls()):
        with counted:
            y = multi_lora_linear(x.requires_grad_(), case.weight, None, case.strategy, view)
            y.backward(dy)
    return counted.counts


@pytest.mark.parametrize("linear", ["linear_qkv", "linear_fc2"])
def test_absent_jobs_add_no_operation_to_a_linear(linear: str) -> None:
    assert _operations(4, 3, linear) == _operations(32, 3, linear)


@pytest.mark.parametrize("linear", ["linear_qkv", "linear_fc2"])
def test_torch_ops_take_a_few_operations_a_present_job(linear: str) -> None:
    two, four, twelve = (sum(_operations(32, n, linear).values()) for n in (2, 4, 12))
    assert twelve - four == 4 * (four - two)
    assert four - two <= 2 * 12


@pytest.mark.slow
def test_a_leaving_job_s_arenas_are_freed_before_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("linear_fc1", torch.float32)
    (factors,) = case.bank.fused_factors.values()
    arenas = (factors.lora_a, *factors.lora_b)
    storages = [weakref.ref(t.untyped_storage()) for t in arenas]
    assert all(storage() is not None for storage in storages)
    del factors, arenas
    alive: list[bool] = []
    begin = ArenaRoom.begin

    def watched(room: ArenaRoom) -> None:
        gc.collect()
        alive.append(any(storage() is not None for storage in storages))
        begin(room)

    monkeypatch.setattr(ArenaRoom, "begin", watched)
    case.bank.install(case.bank.adapters[1:])
    assert alive == [False]


@pytest.mark.parametrize("seed", [10**10, 2**63 - 1])
def test_any_seed_draws_an_adapter(seed: int) -> None:
    name, lora = "layers.0.q_proj.lora_a", LoraSpec(rank=4)
    factor = initial_factor(SPEC, name, lora, seed)
    assert not torch.equal(factor, initial_factor(SPEC, name, lora, seed - 1))


def test_host_and_device_mix_alike() -> None:
    values = [0, 1, 41, 2**31 - 1, 2**31, 2**32 - 1]
    for value in values:
        signed = value - (value >> 31 << 32)
        h = int(mix32(torch.tensor(signed, dtype=torch.int32))) + 0x9E3779B9
        h = (h + 2**31) % 2**32 - 2**31
        h = int(mix32(torch.tensor(h, dtype=torch.int32))) + 0x9E3779B9
        assert mix_ints(value) == h & 0x7FFFFFFF


@pytest.mark.parametrize("numel", [0, 1, 4096, 5_000_001])
def test_a_large_slab_s_norm_is_right(numel: int) -> None:
    flat = torch.full((numel,), 1e-3)
    expected = float(flat.double().square().sum())
    assert square_sum(flat).item() == pytest.approx(expected, rel=3e-6)


def test_many_jobs_may_keep_their_metrics_open() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        training_run.allow_open_files(1024)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(2 * 1024, limits[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def _prepared(path: str, last_token: int) -> PreparedJob:
    job = JobSpec(name="first", data=DataSpec(train=path), max_steps=3)
    tokens = np.array([1, 2, last_token], dtype=np.int32)
    sequence = TokenSequence(tokens, np.array([False, True, True]))
    data = JobData(train=(sequence,), eval=(), num_truncated=0, num_dropped=0)
    plan = BatchPlan.for_job(job, 1)
    return PreparedJob(spec=job, data=data, plan=plan, checkpoint=None, imported=None)


def test_processes_must_read_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes with copies of their own, at paths of their own; the second one is made up."""
    mine = training_run.content_digest(config_for(tmp_path), [_prepared("a.jsonl", 3)])
    copied = training_run.content_digest(config_for(tmp_path / "b"), [_prepared("b.jsonl", 3)])
    other_data = training_run.content_digest(config_for(tmp_path), [_prepared("a.jsonl", 4)])
    other_run = config_for(tmp_path, micro_batch_tokens=64)
    other_config = training_run.content_digest(other_run, [_prepared("a.jsonl", 3)])
    assert mine == copied
    assert len({mine, other_data, other_config}) == 3

    def gather(value: Any) -> list[Any]:
        return [value, other_data if isinstance(value, str) else value]

    monkeypatch.setattr(training_run, "_gather", gather)
    rule = r"must read the same configuration and data, got others on rank 1 than"
    with pytest.raises(ValueError, match=rule):
        training_run.check_agreement(config_for(tmp_path), [_prepared("a.jsonl", 3)])
