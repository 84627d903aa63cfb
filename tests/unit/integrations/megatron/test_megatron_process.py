"""What Megatron is made to do in a process: compile late, say little, group unlike replicas."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state

from tests.helpers.launch import HANG_S, imported
from tlora_megatron.integrations.megatron import imports
from tlora_megatron.integrations.megatron.imports import lazy_compile
from tlora_megatron.integrations.megatron.process_groups import _grids_of, lay_out_replicas
from tlora_megatron.model.layout import Deployment

START = """
import sys
from pathlib import Path
from tlora_megatron.cli.main import main
assert "torch" not in sys.modules, "the command line imports torch"
from tlora_megatron.integrations.megatron import imports
imports.quieten()
from tlora_megatron.runtime import backbone, controller  # noqa: F401 - what a run imports
backbone.import_backbone()
from tlora_megatron.training.data.tokenize import load_tokenizer
load_tokenizer(Path("configs/quickstart/base"))
"""


def test_what_is_decorated_is_compiled_at_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[str, dict[str, object]]] = []

    def compile_(function, **options):  # type: ignore[no-untyped-def]
        compiled.append((function.__name__, options))
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    with lazy_compile():

        @torch.compile
        def one(x: int) -> int:
            return x + 1

        @torch.compile(dynamic=True)
        def two(x: int) -> int:
            return x + 2

    assert torch.compile is compile_
    assert not compiled
    assert [one(1), one(2), two(1), two(2)] == [2, 3, 3, 4]
    assert compiled == [("one", {}), ("two", {"dynamic": True})]


@pytest.mark.slow
def test_a_run_starts_without_the_compiler() -> None:
    assert not imported(START, "torch._dynamo", "torch._inductor", speaks=True)


GPT_MODEL = "megatron.core.models.gpt.gpt_model"


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """The filters of this process, as they were before."""
    logger = logging.getLogger(GPT_MODEL)
    filters = list(logger.filters)
    with warnings.catch_warnings():
        yield
    logger.filters[:] = filters


@pytest.mark.parametrize(
    ("message", "category", "module", "heard"),
    [
        ("Transformer Engine and Apex are not installed. Falling back to Torch optimizers.",
         UserWarning, "megatron.core.optimizer", False),
        ("Apex is not installed. Falling back to Torch Norm", UserWarning,
         "megatron.core.models.backends", False),
        ("full scope is deprecated. Use empty cuda_graph_modules to capture the whole layer.",
         UserWarning, "megatron.core.transformer.transformer_config", False),
        ("`torch.distributed.reduce_scatter_tensor` is deprecated. Please use "
         "`torch.distributed.reduce_scatter_single` instead.", FutureWarning,
         "torch.distributed.c10d_logger", False),
        ("Apex is not installed. Falling back", UserWarning, "another.package", True),
        ("Apex is too old", UserWarning, "megatron.core.models.backends", True),
        ("Apex is not installed.", DeprecationWarning, "megatron.core.models.backends", True),
        ("`torch.distributed.all_to_all` is deprecated", FutureWarning,
         "torch.distributed.c10d_logger", True),
    ],
)  # fmt: skip
def test_known_warnings(message: str, category: type[Warning], module: str, heard: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        imports.quieten()
        warnings.warn_explicit(message, category, "somewhere.py", 1, module=module)
    assert bool(caught) is heard


def test_only_the_known_log_record_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    imports.quieten()
    imports.quieten()
    logger = logging.getLogger(GPT_MODEL)
    logger.warning("GPTModel IS DEPRECATED. GPTModel is only accepting %s.", "fixes")
    logger.warning("GPTModel has no layers")
    assert [record.getMessage() for record in caplog.records] == ["GPTModel has no layers"]
    assert len(logger.filters) == 1


DEPLOYMENT = Deployment.parse("1xTP2+CP2+PP2 + 1xTP2+PP3 + 2xTP1 + 1xCP2")
ORDER = "tp-cp-ep-dp-pp"


def generator(deployment: Deployment) -> parallel_state.RankGenerator:
    """The generator that Megatron makes in a call without sizes."""
    with _grids_of(deployment):
        return parallel_state.RankGenerator(
            tp=1, ep=1, dp=deployment.world_size, pp=1, cp=1, order=ORDER, rank_offset=0
        )


@pytest.mark.parametrize("token", ["tp", "pp", "cp", "dp", "dp-cp", "tp-pp", "tp-dp-cp", "tp-cp"])
def test_groups_divide_the_world_and_stay_within_a_replica(token: str) -> None:
    groups = generator(DEPLOYMENT).get_ranks(token)
    assert sorted(rank for ranks in groups for rank in ranks) == list(range(DEPLOYMENT.world_size))
    for ranks in groups:
        replica = DEPLOYMENT.placed(ranks[0])
        assert {DEPLOYMENT.placed(rank).index for rank in ranks} == {replica.index}
        sizes = {"tp": replica.layout.tp_size, "pp": replica.layout.pp_size}
        sizes |= {"cp": replica.layout.cp_size, "dp": 1}
        expected = 1
        for axis in token.split("-"):
            expected *= sizes[axis]
        assert len(ranks) == expected


def test_a_core_without_rank_generators_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(parallel_state, "RankGenerator")
    with pytest.raises(NotImplementedError, match=r"parallel.replicas must have a Megatron-core"):
        lay_out_replicas(DEPLOYMENT)


@pytest.mark.slow
def test_building_a_backbone_prints_nothing(repo: Path) -> None:
    code = """
from tlora_megatron.integrations.megatron import imports
imports.quieten()
import torch
from tests.helpers.linear_case import SPEC
from tlora_megatron.integrations.megatron import engine, model, process_groups
from tlora_megatron.model.layout import ParallelLayout
layout = ParallelLayout(tp_size=1, pp_size=1, cp_size=1, dp_size=1, sequence_parallel=False)
process_groups.initialize_parallel(layout)
model.build_backbone(SPEC, layout, dtype=torch.float32)
"""
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "PYTHONWARNINGS")}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=repo, env=inherited | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
