"""One process's own configuration among unlike replicas."""

from __future__ import annotations

import dataclasses
import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.layout_sites import SPEC
from tlora_megatron.config.reader import read_spec
from tlora_megatron.config.schema import ParallelSpec, RunSpec
from tlora_megatron.config.sections import expand_short_form
from tlora_megatron.model.deployment import Deployment
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.runtime.own_replica import (
    OwnReplica,
    check_replicas_fit,
    log_replicas,
    own_replica,
)


def own(form: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> OwnReplica:
    deployment = Deployment.parse(form)
    monkeypatch.setenv("WORLD_SIZE", str(deployment.world_size))
    monkeypatch.setenv("RANK", str(rank))
    return own_replica(_config(form))


def _config(form: str) -> Any:
    raw = {"replicas": expand_short_form(form, "replicas")}
    return SimpleNamespace(
        parallel=read_spec(ParallelSpec, raw, "parallel"),
        run=RunSpec(output_dir="out", recompute="selective"),
    )


def test_a_process_sees_its_own_sizes_and_the_number_of_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    form = "1xTP2+SP@64/full + 2xPP2"
    first, last = (own(form, rank, monkeypatch) for rank in (1, 5))
    assert first.layout == ParallelLayout(tp_size=2, sequence_parallel=True, dp_size=3)
    assert (first.recompute, last.recompute) == ("full", "selective")
    assert last.layout == ParallelLayout(pp_size=2, dp_size=3)
    assert first.deployment == last.deployment == Deployment.parse(form)


def test_alike_replicas_are_no_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own("3xTP1", 1, monkeypatch) == OwnReplica(ParallelLayout(dp_size=3), None, "selective")


@pytest.mark.parametrize(
    ("form", "hidden_size", "quantisation", "message"),
    [
        ("1xTP3 + 1xTP1", 24, None, "num_heads must be a multiple"),
        ("1xTP1 + 1xPP3", 24, None, "num_layers must be a multiple of pp_size=3, got 4"),
        ("1xTP4 + 1xTP1", 26, None, "hidden_size must be a multiple of 4"),
        ("1xTP2 + 1xTP1", 24, object(), "parallel.replicas must have one tp_size over an FP8 base"),
    ],
)
def test_layouts_that_do_not_divide_the_model_are_refused_on_every_process(
    form: str, hidden_size: int, quantisation: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = dataclasses.replace(SPEC, hidden_size=hidden_size)
    for rank in range(Deployment.parse(form).world_size):
        with pytest.raises(ValueError, match=re.escape(message)):
            check_replicas_fit(spec, quantisation, own(form, rank, monkeypatch))


def test_the_log_says_which_replica_is_where(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tlora_megatron")
    groups: Any = SimpleNamespace(deployment=Deployment.parse("1xTP2@64 + 1xTP1"), is_writer=True)
    log_replicas(groups)
    assert "replica 0 is 1xTP2@64 on processes 0 to 1" in caplog.text
    assert "replica 1 is 1xTP1 on process 2" in caplog.text
    assert "2 replicas of 2 layouts sum adapters in cells of 1/2 of the columns" in caplog.text
