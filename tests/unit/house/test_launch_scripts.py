"""The launch scripts that a cluster's users copy: what they would run, and what they refuse."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.launch import HANG_S, REPO, environment
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, save_tiny_tokenizer
from tlora_megatron.cli.main import main
from tlora_megatron.config.load import load_config

ONE_NODE = REPO / "scripts" / "megatron" / "finetune_llama3_8b.sh"
MANY_NODES = REPO / "scripts" / "megatron" / "finetune_llama3_70b_multinode.sh"
SCRIPTS = [REPO / ".ci/run", *sorted(REPO.glob("scripts/**/*.sh"))]
SCRIPTS += sorted(REPO.glob("scripts/slurm/*.sbatch"))
CPU = REPO / "tests" / "helpers" / "megatron_lm_cpu.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder whose name has a space."""
    root = tmp_path_factory.mktemp("models")
    directory = make_tiny_model(root / "tiny model", "llama", vocab_size=VOCAB_SIZE)
    save_tiny_tokenizer(directory)
    assert main(["convert", str(directory), str(root / "checkpoint")]) == 0
    return directory


@pytest.fixture
def settings(model: Path, tmp_path: Path) -> dict[str, str]:
    """The scripts' variables; without a Megatron-LM, one that is only a name."""
    checkout = os.environ.get("MEGATRON_LM_PATH")
    if checkout is None:
        checkout = str(tmp_path)
        (tmp_path / "pretrain_gpt.py").touch()
    return {
        "HF_MODEL": str(model),
        "MEGATRON_LM": checkout,
        "CHECKPOINT": str(model.with_name("checkpoint")),
        "GPUS_PER_NODE": "4",
        "DRY_RUN": "1",
    }


def run_script(script: Path, settings: dict[str, str], *words: str) -> tuple[int, str, str]:
    clean = {k: v for k, v in environment().items() if not k.startswith("SLURM")}
    done = subprocess.run(
        [str(script), *words],
        env=clean | {"PYTHON": sys.executable} | settings,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def printed_words(script: Path, settings: dict[str, str], *words: str) -> list[str]:
    code, stdout, stderr = run_script(script, settings, *words)
    assert code == 0, stderr
    return stdout.rstrip("\n").rpartition("\n\n")[2].split("\n")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_can_be_run_and_stops_at_an_error(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK)
    text = script.read_text()
    stages = script.name == "test.sh"  # of which all run even if one has failed
    assert ("\nset -uo pipefail\n" if stages else "\nset -euo pipefail\n") in text
    assert text.startswith("#!/usr/bin/env bash\n# ")
    if shutil.which("shellcheck") and script.parent.name in ("megatron", "slurm"):
        subprocess.run(["shellcheck", str(script)], check=True)


def test_the_example_jobs_can_be_read(tmp_path: Path, model: Path) -> None:
    path = REPO / "configs" / "megatron" / "jobs.yaml"
    base = f"base_model.path={model}"
    config = load_config(path, [base], str(tmp_path / "out"))
    assert [job.name for job in config.jobs] == ["mirror-r8", "sums-r16", "records-r64"]
    assert config.job_errors == ()


def test_a_dry_run_converts_nothing_and_prints_both_commands(
    settings: dict[str, str], model: Path, tmp_path: Path
) -> None:
    fresh = tmp_path / "checkpoint"
    code, stdout, stderr = run_script(ONE_NODE, settings | {"CHECKPOINT": str(fresh)})
    assert code == 0, stderr
    convert, _, train = stdout.partition("\n\n")
    assert convert.split("\n")[1:] == [
        *("-m", "tlora_megatron.cli", "convert"),
        *(str(model), str(fresh)),
    ]
    assert not fresh.exists()
    code, stdout, stderr = run_script(ONE_NODE, settings)
    assert code == 0, stderr
    assert stdout == train.replace(f"\n{fresh}\n", f"\n{settings['CHECKPOINT']}\n")


def test_layout(settings: dict[str, str]) -> None:
    words = printed_words(ONE_NODE, settings | {"TP": "2", "MICRO_BATCHES": "3"}, "--seed", "7")
    line = " ".join(words)
    assert "--nnodes 1 --nproc-per-node 4 --max-restarts 0 --standalone -m" in line
    assert "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1" in line
    assert "--micro-batch-size 1 --global-batch-size 6 " in line
    assert "--sequence-parallel" in words
    assert words[-2:] == ["--seed", "7"]
    assert "--sequence-parallel" not in printed_words(ONE_NODE, settings)


def test_several_nodes(settings: dict[str, str]) -> None:
    meeting = {"RDZV_ENDPOINT": "first:29500", "RDZV_ID": "17", "GPUS_PER_NODE": "8"}
    line = " ".join(printed_words(MANY_NODES, settings | meeting | {"MAX_RESTARTS": "2"}))
    assert "--nnodes 2 --nproc-per-node 8 --max-restarts 2 --rdzv-backend c10d" in line
    assert "--rdzv-endpoint first:29500 --rdzv-id 17 -m tlora_megatron.launch" in line
    assert "--tensor-model-parallel-size 8" in line
    assert "--global-batch-size 8 " in line


@pytest.mark.parametrize(
    ("script", "change", "message"),
    [
        (ONE_NODE, {"HF_MODEL": ""}, "HF_MODEL: must name a Hugging Face model directory"),
        (ONE_NODE, {"MEGATRON_LM": "/nowhere"}, "/nowhere/pretrain_gpt.py must be an existing"),
        (ONE_NODE, {"TP": "3"}, "must be a multiple of TP * PP * CP = 3, got 4"),
        (ONE_NODE, {"NNODES": "2"}, "RDZV_ENDPOINT: must be HOST:PORT of one of the nodes"),
        (MANY_NODES, {}, "RDZV_ENDPOINT: must be HOST:PORT of one of the nodes"),
    ],
)
def test_refusals(
    settings: dict[str, str], script: Path, change: dict[str, str], message: str
) -> None:
    code, stdout, stderr = run_script(script, settings | change)
    assert code != 0
    assert message in stderr
    assert "tlora_megatron.launch" not in stdout


@pytest.mark.megatron_lm
@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
def test_megatron_lm_parses_what_they_print(
    settings: dict[str, str], implementation: str, tmp_path: Path
) -> None:
    change = {"TP": "2", "PP": "2", "SEQ_LENGTH": "256", "OUT": str(tmp_path / "out")}
    change |= {"TRANSFORMER_IMPL": implementation}
    words = printed_words(ONE_NODE, settings | change)
    script = words.index(f"{settings['MEGATRON_LM']}/pretrain_gpt.py")
    done = subprocess.run(
        [sys.executable, str(CPU), str(CPU.with_name("megatron_parse.py")), *words[script + 1 :]],
        env=environment() | {"RANK": "0", "WORLD_SIZE": "4", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "num_layers": 4,
        "tensor_model_parallel_size": 2,
        "data_parallel_size": 1,
        "load": settings["CHECKPOINT"],
        "save": str(tmp_path / "out"),
        "tlora_config": "configs/megatron/jobs.yaml",
    }
