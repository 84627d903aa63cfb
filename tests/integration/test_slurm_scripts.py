"""The batch scripts of scripts/slurm on a real SLURM, whose two nodes are this machine.

Its GPUs are links to /dev/null: what a script gives to its tasks is looked at by a stand-in for
Python; training is on the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.gang_driver import quickstart_base, quickstart_jobs
from tests.helpers.launch import HANG_S, REPO, environment, wait_until
from tests.helpers.slurm import Slurm, slurm, why_no_slurm
from tlora_megatron.cli.main import main
from tlora_megatron.training.metrics import read_metrics

pytestmark = pytest.mark.skipif(why_no_slurm() is not None, reason=str(why_no_slurm()))

ONE_NODE = REPO / "scripts" / "slurm" / "finetune_8b.sbatch"
MANY_NODES = REPO / "scripts" / "slurm" / "finetune_70b_multinode.sbatch"
SERVE = REPO / "scripts" / "slurm" / "serve.sbatch"
BASE = REPO / "configs" / "quickstart" / "base"

STAND_IN = """\
#!/usr/bin/env bash
if [[ $1 == -c ]]; then # the script asks how many GPUs there are
  tr ',' '\\n' <<<"$CUDA_VISIBLE_DEVICES" | wc -l
  exit
fi
{ env; printf 'WORD=%s\\n' "$@"; } >"$SEEN/node$SLURM_NODEID"
[[ ${FAILS:-} != "$SLURM_NODEID" ]] || exit 3
[[ -z ${FAILS:-} ]] || exec sleep 1000
"""
"""In place of Python: writes what it was given."""

ON_CPU = f"""\
#!/usr/bin/env bash
words=()
for word in "$@"; do
  words+=("$word")
  [[ $word != tlora_megatron.launch ]] || words+=(--cpu)
done
exec {sys.executable} "${{words[@]}}"
"""
"""In place of Python: lets Megatron-LM train without a GPU."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    with slurm() as cluster:
        yield cluster


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    """Variables of the scripts for a stand-in that trains nothing."""
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "latest_checkpointed_iteration.txt").write_text("release")
    (checkpoint / "model_flags.txt").write_text("--flag\n")
    (tmp_path / "pretrain_gpt.py").touch()
    program(tmp_path, STAND_IN)
    return {
        "PYTHON": str(tmp_path / "python"),
        "SEEN": str(tmp_path),
        "HF_MODEL": str(BASE),
        "MEGATRON_LM": str(tmp_path),
        "CHECKPOINT": str(checkpoint),
        "OUT": str(tmp_path / "out"),
    }


def program(folder: Path, text: str) -> None:
    (folder / "python").write_text(text)
    (folder / "python").chmod(0o755)


def submit(cluster: Slurm, script: Path, settings: dict[str, str], log: Path) -> str:
    words = ("sbatch", "--parsable", f"--chdir={REPO}", f"--output={log}", script, "--seed", "3")
    return cluster.call(*words, env=settings).strip()


def seen(folder: Path, node: int) -> tuple[dict[str, str], str]:
    """Environment and command line of the stand-in on a node."""
    pairs = [line.partition("=") for line in (folder / f"node{node}").read_text().splitlines()]
    words = " ".join(value for key, _, value in pairs if key == "WORD")
    return {key: value for key, _, value in pairs}, words


@pytest.mark.parametrize("script", [ONE_NODE, MANY_NODES], ids=lambda script: script.name)
def test_each_node_gets_its_gpus_and_its_part(
    cluster: Slurm, settings: dict[str, str], tmp_path: Path, script: Path
) -> None:
    job = submit(cluster, script, settings, tmp_path / "log")
    cluster.wait(job)
    num_nodes = 1 if script == ONE_NODE else 2
    lines = []
    for node in range(num_nodes):
        environment, line = seen(tmp_path, node)
        assert environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
        assert environment["SLURM_CPUS_PER_TASK"] == "64"
        assert f"--nnodes {num_nodes} --nproc-per-node 8 " in line
        assert line.endswith("--seed 3")
        lines.append(line)
    assert len(set(lines)) == 1, "all nodes meet at one place"
    if num_nodes == 2:
        place = f"--rdzv-endpoint 127.0.0.1:{20000 + int(job) % 10000} --rdzv-id {job} "
        assert place in lines[0]
        assert "--tensor-model-parallel-size 8" in lines[0]


def test_the_script_of_a_plan_is_taken_with_the_users_options(
    cluster: Slurm, settings: dict[str, str], tmp_path: Path
) -> None:
    script, log = tmp_path / "plan.sbatch", tmp_path / "slurm-mine-%j.log"
    words = ["plan", str(REPO / "configs" / "quickstart.yaml"), "--gpus=16", "--lengths=64"]
    words += ["--hardware=h100-infiniband", "--tp=2", "--cp=8", "--write", "slurm", str(script)]
    words += ["--sbatch=time=8:00:00", "--sbatch=job-name=mine", f"--sbatch=output={log}"]
    words += ["--sbatch=comment=a b", "--setup=export NCCL_SOCKET_IFNAME=ib0"]
    assert main([*words, "--environment="]) == 0
    given = settings | {"OMP_NUM_THREADS": ""}
    job = cluster.call("sbatch", "--parsable", f"--chdir={tmp_path}", script, env=given).strip()
    cluster.wait(job)
    fields = cluster.fields(job)
    assert (fields["TimeLimit"], fields["NumNodes"]) == ("08:00:00", "2")
    assert fields["Comment"] == "a", "fields are cut at spaces"
    assert (fields["StdOut"], fields["Requeue"]) == (f"{tmp_path}/slurm-mine-{job}.log", "1")
    for node in range(2):
        environment, line = seen(tmp_path, node)
        assert environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
        assert environment["SLURM_CPUS_PER_TASK"] == "64"
        assert (environment["OMP_NUM_THREADS"], environment["NCCL_SOCKET_IFNAME"]) == ("8", "ib0")
        place = f"--rdzv-id {job} --rdzv-endpoint 127.0.0.1:{20000 + int(job) % 10000} "
        assert f"--nnodes 2 --rdzv-backend c10d {place}--nproc-per-node 8 " in line
        assert line.endswith(f"-m tlora_megatron.cli train {tmp_path}/plan.jobs.yaml")


def test_a_node_that_fails_ends_the_run_everywhere(
    cluster: Slurm, settings: dict[str, str], tmp_path: Path
) -> None:
    job = submit(cluster, MANY_NODES, settings | {"FAILS": "1"}, tmp_path / "log")
    cluster.wait(job, ["FAILED"])
    assert "task 1: Exited with exit code 3" in (tmp_path / "log").read_text()


def training_settings(tmp_path: Path, max_steps: int) -> dict[str, str]:
    data = {"train": str(REPO / "configs" / "quickstart" / "data" / "mirror_train.jsonl")}
    lora = {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    job = {"name": "mirror", "data": data, "lora": lora, "batch_size": 8, "max_steps": max_steps}
    jobs = tmp_path / "jobs.json"
    document = {"run": {"tensorboard": False}, "jobs": [job | {"max_seq_len": 64}]}
    jobs.write_text(json.dumps(document))
    program(tmp_path, ON_CPU)
    return {
        "PYTHON": str(tmp_path / "python"),
        "HF_MODEL": str(BASE),
        "MEGATRON_LM": os.environ["MEGATRON_LM_PATH"],
        "CHECKPOINT": str(tmp_path / "checkpoint"),
        "JOBS": str(jobs),
        "OUT": str(tmp_path / "out"),
        "SEQ_LENGTH": "256",
        "TP": "1",
        "GPUS_PER_NODE": "1",
        "OMP_NUM_THREADS": "1",
    }


def steps(out: Path) -> list[int]:
    path = out / "jobs" / "mirror" / "metrics.jsonl"
    return [line["step"] for line in read_metrics(path) if "loss" in line] if path.exists() else []


@pytest.mark.megatron_lm
@pytest.mark.slow
def test_before_its_time_is_over_a_run_saves_and_is_requeued(
    cluster: Slurm, tmp_path: Path
) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    job = submit(cluster, MANY_NODES, training_settings(tmp_path, 60), log)
    wait_until(lambda: len(steps(out)) >= 2, "two steps")
    cluster.call("scancel", "--batch", "--signal=USR1", job)  # as --signal=B:USR1@300 does
    wait_until(lambda: cluster.fields(job)["Restarts"] == "1", "the job requeued")
    assert "stopped by SIGUSR1 after round" in log.read_text()
    done = len(steps(out))
    assert done < 60
    cluster.wait(job)
    assert steps(out) == list(range(1, 61)), "no step is missing and none is done twice"
    assert (out / "jobs" / "mirror" / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_service_saves_is_requeued_and_goes_on(cluster: Slurm, tmp_path: Path) -> None:
    service, log = tmp_path / "service", tmp_path / "log"
    job = quickstart_jobs(["mirror"], max_steps=400)["mirror"]
    document = {"base_model": quickstart_base(), "jobs": [job]}
    (tmp_path / "jobs.yaml").write_text(json.dumps(document))
    command = f"{sys.executable} -m tlora_megatron.cli"
    settings = environment() | {"SERVICE": str(service), "TLORA": command}
    words = ("sbatch", "--parsable", f"--chdir={REPO}", f"--output={log}", "--gpus-per-node=0")
    number = cluster.call(*words, SERVE, env=settings).strip()
    wait_until((service / "store.sqlite").exists, "the service's store")
    submit = subprocess.Popen(
        [*command.split(), "submit", tmp_path / "jobs.yaml", "--service", service, "--wait"],
        env=settings,
        cwd=REPO,
        stdout=(tmp_path / "submit").open("wb"),
        stderr=subprocess.STDOUT,
    )
    metrics = service / "jobs"

    def has_begun() -> bool:
        assert submit.poll() is None, (tmp_path / "submit").read_text()
        return any("loss" in path.read_text() for path in metrics.glob("*/metrics.jsonl"))

    wait_until(has_begun, "the first step")
    cluster.call("scancel", "--batch", "--signal=USR1", number)
    wait_until(lambda: cluster.fields(number)["Restarts"] == "1", "the service requeued")
    assert submit.poll() is None, "the job was not at its end"
    assert submit.wait(HANG_S) == 0
    cluster.call("scancel", number)
    (path,) = metrics.glob("*/metrics.jsonl")
    lines = [line["step"] for line in read_metrics(path) if "loss" in line]
    assert lines == sorted(set(lines))
    assert lines[-1] == 400
