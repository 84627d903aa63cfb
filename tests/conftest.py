"""Order and marks: long folders go first; what this machine cannot run is skipped with a reason."""

from __future__ import annotations

import logging
import os
import random
import secrets
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import hypothesis
import pytest

from tests.helpers.commands import Tlora
from tests.helpers.session import ORACLE_CACHE, SEED
from tests.helpers.standing_world import session_address

# As `run.deterministic` sets it: MKL reads it once, and a world trains many runs in one process.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

REPO = Path(__file__).resolve().parent.parent
_SLOW = (
    *("bench/", "cli/service/", "cli/test_simulate.py", "runtime/planning/", "runtime/sampling/"),
    *("house/test_launch_scripts.py", "house/test_package.py"),
    *("house/test_test_script.py", "integrations/megatron/layer/", "layers/slab/test_cells.py"),
    *("integrations/megatron/test_config_fields.py", "model/test_dispatch.py", "ops/dropout/"),
    *("ops/lora/cuda/test_cuda_ops.py", "ops/test_extension.py", "planner/cost/experts/"),
    *("planner/test_advice.py", "planner/test_fewer_gpus.py", "planner/test_full_rounds.py"),
    *("planner/test_measured.py", "planner/test_nano_parts.py", "planner/test_search.py"),
    *("runtime/test_ranks.py", "training/formats/test_peft_experts.py"),
    *("training/formats/test_quantised.py", "training/packing/test_isolation.py"),
    *("scheduler/test_speed.py", "service/api/", "service/control/test_controller.py"),
    *("service/control/test_decide.py", "service/control/test_machines.py"),
    *("service/control/test_recover.py", "service/sampling/"),
    *("service/store/test_opening.py", "service/store/test_sessions.py", "service/test_front.py"),
    *("service/test_history.py", "service/test_local_engine.py", "service/test_rank.py"),
    "service/test_session_files.py",
)
"""Of tests/unit: files whose tests take a quarter of a second each and more, so that the others fit
into a minute on two cores."""
_LONG_FIRST = (
    "distributed/test_driven.py",
    "unit/ops/lora/triton/",
    "integration/test_slurm_scripts.py",
    "integration/test_slurm_engine.py",
    "integration/test_multinode.py",
    "distributed/test_lossless.py",
    "distributed/test_isolation.py",
    "integration/test_killed_service.py",
    "distributed/test_deepspeed_isolation.py",
    "unit/ops/test_extension.py",
    "distributed/test_lora_sharding.py",
    "distributed/test_overlap.py",
    "distributed/test_deterministic.py",
    "integration/test_ray_engine.py",
    "integration/test_tinker.py",
    "unit/ops/test_interpreted_kernels.py",
    "distributed/",
    "integration/",
)
"""Files that workers begin with, longest first: a long one that begins last has a core alone."""


@cache
def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _shared_data() -> Path:
    return Path(os.environ.get("TLORA_SHARED_DATA") or REPO.parent / "shared" / "data")


def _megatron_lm() -> Path:
    return Path(os.environ.get("MEGATRON_LM_PATH") or "nowhere") / "pretrain_gpt.py"


def _reason_to_skip(mark: str) -> str | None:
    """Why this machine cannot run tests with the mark, or None."""
    if mark == "gpu" and _num_gpus() < 1:
        return "needs a CUDA device"
    if mark == "multigpu" and _num_gpus() < 2:
        return f"needs two CUDA devices, got {_num_gpus()}"
    cores = os.cpu_count() or 1
    if mark == "four_processes" and cores < 4 and not os.environ.get("TLORA_ALL_TESTS"):
        return f"needs four CPU cores, got {cores} (TLORA_ALL_TESTS=1 runs it all the same)"
    if mark == "megatron_lm" and not _megatron_lm().is_file():
        return "needs MEGATRON_LM_PATH to name a Megatron-LM checkout"
    for name, variable, what in (
        ("old_tinker", "TINKER_OLD_PYTHON", "an interpreter of scripts/tinker_clients.sh"),
        ("cookbook", "COOKBOOK_PYTHON", "an interpreter of scripts/tinker_clients.sh"),
        ("trl", "TRL_PYTHON", "an interpreter of scripts/trl_oracle.sh"),
        ("vllm", "VLLM_COMMAND", "the vllm of scripts/vllm_server.sh"),
    ):
        if mark == name and not Path(os.environ.get(variable) or "nowhere").is_file():
            return f"needs {variable} to name {what}"
    if mark == "shared" and not _shared_data().is_dir():
        return "needs TLORA_SHARED_DATA to name the shared data folder"
    return None


def pytest_configure(config: pytest.Config) -> None:
    """Prepares what the workers of one session share."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts background commands so, and what the tests start would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.setdefault(SEED, "0") == "fresh":
        os.environ[SEED] = str(secrets.randbelow(1 << 31))
    # An example takes as long as the machine needs.
    hypothesis.settings.register_profile(
        "patient", deadline=None, derandomize=os.environ[SEED] == "0"
    )
    hypothesis.settings.load_profile("patient")
    session_address()
    if cache := getattr(config, "cache", None):
        os.environ.setdefault(ORACLE_CACHE, str(cache.mkdir("oracle")))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says by which seed a run that drew its inputs anew is repeated."""
    if os.environ[SEED] != "0":
        terminalreporter.write_line(f"{SEED}={os.environ[SEED]} draws the same inputs again")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seeds what the test and its fixtures draw: a failure comes again when it is run again."""
    seed = zlib.crc32(f"{os.environ[SEED]} {item.nodeid}".encode())
    random.seed(seed)
    if "torch" in sys.modules:
        import torch

        torch.manual_seed(seed)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Does not even import what the quick loop leaves out."""
    return True if config.option.markexpr == "not slow" and _is_slow(collection_path) else None


def _is_slow(path: Path) -> bool:
    name = f"{path.relative_to(REPO / 'tests').as_posix()}/"
    return name.startswith("unit/") and name.removeprefix("unit/").startswith(_SLOW)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts long folders first and skips what cannot run here, before any fixture is set up."""
    items.sort(key=_place)  # workers that are done then share the short files
    for item in items:
        if _is_slow(item.path):
            item.add_marker("slow")
        for mark in {mark.name for mark in item.iter_markers()}:
            if reason := _reason_to_skip(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


def _place(item: pytest.Item) -> int:
    path = item.path.relative_to(REPO / "tests").as_posix()
    places = (i for i, folder in enumerate(_LONG_FIRST) if path.startswith(folder))
    return next(places, len(_LONG_FIRST))


@pytest.fixture(scope="session", autouse=True)
def _package_logger() -> Callable[[], None]:
    """Puts the package's logger back to what it is before anything runs."""
    logger = logging.getLogger("tlora_megatron")
    level, handlers, propagate = logger.level, list(logger.handlers), logger.propagate

    def restore() -> None:
        logger.setLevel(level)
        logger.handlers[:] = handlers
        logger.propagate = propagate

    return restore


@pytest.fixture(autouse=True)
def _package_logger_as_it_was(_package_logger: Callable[[], None]) -> Iterator[None]:
    """The command line sets the logger up for its rank, also where a module's fixture runs it; the
    next test must not see it."""
    _package_logger()
    yield
    _package_logger()


@pytest.fixture(scope="module", autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """Ends a process group that a file leaves behind: the next file makes its own."""
    yield
    if "torch" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.fixture(scope="session")
def repo() -> Path:
    """The repository's root."""
    return REPO


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real data outside the project; only for tests marked `shared`."""
    return _shared_data()


@pytest.fixture
def tlora(capsys: pytest.CaptureFixture[str]) -> Tlora:
    """The command line in this process."""
    return Tlora(capsys)
