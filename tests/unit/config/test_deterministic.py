"""`run.deterministic`: what it fills in, and every setting that it refuses by name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tlora_megatron.config.job import DataSpec, JobSpec
from tlora_megatron.config.parallel_rules import settle_deterministic
from tlora_megatron.config.reader import ConfigError
from tlora_megatron.config.schema import BaseModelSpec, ParallelSpec, RunConfig, RunSpec


def settled(*jobs: dict[str, Any], parallel: dict[str, Any] | None = None, **run: Any) -> RunConfig:
    specs = [
        JobSpec(name=f"job{i}", data=DataSpec(train="a"), max_steps=1, **job)
        for i, job in enumerate(jobs or ({},))
    ]
    section = {"output_dir": "out", "micro_batch_tokens": 8192, "deterministic": True} | run
    return settle_deterministic(
        RunConfig(
            base_model=BaseModelSpec(path="base"),
            parallel=ParallelSpec(**(parallel or {})),
            run=RunSpec(**section),
            jobs=tuple(specs),
        )
    )


@pytest.mark.parametrize(
    ("batch_size", "max_seq_len", "micro_batch", "expected"),
    [(1, 100, 8192, 1024), (4, 256, 8192, 1024), (4, 257, 8192, 2048), (8, 1024, 8192, 4096),
     (8, 1024, 16384, 8192), (8, 1024, 256, 128), (1, 2, 1, 1)],
)  # fmt: skip
def test_a_portion_covers_a_batch_within_half_a_micro_batch(
    batch_size: int, max_seq_len: int, micro_batch: int, expected: int
) -> None:
    job = {"batch_size": batch_size, "max_seq_len": max_seq_len}
    found = settled(job, {**job, "portion_tokens": 77}, micro_batch_tokens=micro_batch)
    assert [job.portion_tokens for job in found.jobs] == [expected, 77]


def test_without_the_key_nothing_changes() -> None:
    found = settled({}, deterministic=False, nano_batches="auto", parallel={"cp_size": 2})
    assert found.jobs[0].portion_tokens is None


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [({}, "auto"), ({"tp_size": 2}, "fold"), ({"tp_size": 2, "lora_sharding": "s_lora"}, "s_lora"),
     ({"tp_size": 2, "sequence_parallel": True}, "s_lora")],
)  # fmt: skip
def test_the_sharding_does_not_follow_from_predicted_times(
    parallel: dict[str, Any], expected: str
) -> None:
    assert settled(parallel=parallel).parallel.lora_sharding == expected


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"nano_batches": "auto"}, "run.nano_batches must be a number: .*, got 'auto'; give 1 or"),
        ({"parallel": {"cp_size": 2}},
         "parallel.cp_size must be 1 with run.deterministic: .*, got 2; take pp_size"),
        ({"parallel": {"tp_size": 4}},
         "parallel.tp_size must be at most 2 with run.deterministic: .*, got 4; take pp_size"),
        ({"parallel": {"tp_size": 2, "lora_sharding": "rank_exchange"}},
         "parallel.lora_sharding must be fold, s_lora or auto with run.deterministic"),
        ({"parallel": {"tp_size": 2, "sequence_parallel": True, "lora_sharding": "fold"}},
         "must be s_lora or auto with run.deterministic and sequence_parallel"),
    ],
)  # fmt: skip
def test_what_lets_neighbours_decide_is_refused(sections: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        settled(**sections)
    assert re.search(sentence, str(raised.value)), raised.value
