"""The sbatch script of a plan: what it asks for, what replaces what, and what is refused."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tlora_megatron.config.reader import ConfigError
from tlora_megatron.runtime.planning.slurm_file import (
    SlurmOptions,
    current_environment,
    slurm_script,
)


def script(*sbatch: str, nodes: int = 2, whole_nodes: bool = True, **more: object) -> str:
    options = SlurmOptions(sbatch=sbatch, **more)  # type: ignore[arg-type]
    jobs = Path("/shared/my run.jobs.yaml")
    text = slurm_script(jobs, nodes, 8, whole_nodes=whole_nodes, note="A plan.", options=options)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    return text


def directives(text: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if "#SBATCH" in line]
    return dict(line.partition("=")[::2] for line in lines)


def test_defaults_take_whole_nodes_for_a_day_and_are_requeued() -> None:
    text = script()
    assert directives(text) == {
        "job-name": "tlora",
        "nodes": "2",
        "ntasks-per-node": "1",
        "gpus-per-node": "8",
        "cpus-per-task": "64",
        "exclusive": "",
        "mem": "0",
        "time": "24:00:00",
        "requeue": "",
        "signal": "B:USR1@300",
        "open-mode": "append",
        "output": "slurm-%x-%j.log",
    }
    assert "train '/shared/my run.jobs.yaml' \"$@\" &" in text
    part = script(whole_nodes=False, nodes=1)
    assert not directives(part).keys() & {"exclusive", "mem"}
    assert "--standalone --nproc-per-node 8" in part
    assert "--rdzv" not in part


def test_what_the_user_says_replaces_defaults_and_what_slurm_does_not_take_beside_it() -> None:
    found = directives(
        script("time=2-00", "gpus-per-node=h100:8", "mem-per-cpu=4G", "exclusive=", "comment=a b")
    )
    assert found["time"] == "2-00"
    assert found["gpus-per-node"] == "h100:8"
    assert found["comment"] == "'a b'"
    assert not found.keys() & {"mem", "exclusive"}
    assert not directives(script("gres=gpu:8")).keys() & {"gpus-per-node"}


def test_the_environment_is_activated_behind_the_lines_given() -> None:
    lines = script(setup=("module load cuda",), environment="conda activate lora").splitlines()
    begin = lines.index("set -eo pipefail")
    assert lines[begin + 1 : begin + 4] == ["module load cuda", "conda activate lora", "set -u"]


def test_the_environment_of_this_process_is_found(tmp_path: Path) -> None:
    assert current_environment({}, str(tmp_path)) == []
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    assert current_environment({}, str(tmp_path)) == [f"source {tmp_path}/bin/activate"]
    conda = {"CONDA_EXE": "/opt/conda/bin/conda", "CONDA_PREFIX": "/opt/conda/envs/lora"}
    assert current_environment(conda, "/opt/conda/envs/lora") == [
        "source /opt/conda/etc/profile.d/conda.sh",
        "conda activate /opt/conda/envs/lora",
    ]


@pytest.mark.parametrize(
    ("option", "match"),
    [
        ("--time=1", "--sbatch must be an option of sbatch like account=NAME or exclusive, got"),
        ("nodes=3", "--sbatch must leave nodes to the plan, got 'nodes=3'; --gpus gives"),
        ("gpus-per-node=4", "--sbatch must be gpus-per-node=8 or gpus-per-node=TYPE:8, got"),
        (
            "comment=a\nb",
            "--sbatch must be an option of sbatch like account=NAME or exclusive, got",
        ),
        ("time=8h", "--sbatch time must be like 90 .minutes., 12:00:00 or 1-12:00 .*, got '8h'"),
        ("time=12:75:00", "--sbatch time must be like 90 "),
        ("time", "--sbatch time must be like 90 .*, got null"),
        ("account=my group", "--sbatch account must be a name, or several .*, got 'my group'"),
        ("partition=a,,b", "--sbatch partition must be a name, or several .*, got 'a,,b'"),
        ("qos=$(id)", "--sbatch qos must be a name"),
        ("mem=64 GB", "--sbatch mem must be like 64G, got '64 GB'"),
        ("cpus-per-task=0", "--sbatch cpus-per-task must be a number, got '0'"),
    ],
)
def test_options_that_are_none_or_the_plans_are_refused(option: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        script(option)


@pytest.mark.parametrize(
    "option",
    [
        *(f"time={t}" for t in ("90", "90:30", "240:00:00", "1-12", "1-12:30", "1-12:30:05")),
        *("time=unlimited", "account=lora-team_2", "partition=a100,h100", "mem=0", "mem=1500M"),
    ],
)
def test_values_that_sbatch_takes_are_taken(option: str) -> None:
    name, _, value = option.partition("=")
    assert directives(script(option))[name] == value
