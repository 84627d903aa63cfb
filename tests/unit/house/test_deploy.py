"""What `deploy/` gives to systemd, Docker and Kubernetes agrees with the commands and is valid."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.launch import HANG_S, REPO
from tlora_megatron.cli import doctor
from tlora_megatron.cli.main import build_parser
from tlora_megatron.service.settings import Settings

DEPLOY = REPO / "deploy"
UNIT, DOCKERFILE = DEPLOY / "tlora.service", DEPLOY / "Dockerfile"
KUBERNETES = DEPLOY / "kubernetes"


def _pods() -> dict[str, dict[str, Any]]:
    """The containers named tlora and what is around them, by the file that has them."""
    stateful = yaml.safe_load((KUBERNETES / "statefulset.yaml").read_text())
    ray = yaml.safe_load((KUBERNETES / "raycluster.yaml").read_text())
    found = {"statefulset": stateful["spec"], "ray": ray["spec"]["headGroupSpec"]}
    return {name: spec["template"]["spec"] for name, spec in found.items()}


def _container(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = (one for one in pod["containers"] if one["name"] == "tlora")
    return dict(found)


def _commands() -> dict[str, list[str]]:
    unit = UNIT.read_text()
    options = re.findall(r'TLORA_OPTIONS="(.*)"', unit)[0]
    served = re.findall(r"^ExecStart=\S+/tlora (.*)$", unit, re.MULTILINE)[0]
    container = re.findall(r"^CMD (.*)$", DOCKERFILE.read_text(), re.MULTILINE)[0]
    return {
        "systemd": served.replace("$TLORA_OPTIONS", options).split(),
        "docker": json.loads(container),
        **{name: _container(pod)["args"] for name, pod in _pods().items()},
    }


@pytest.mark.parametrize("place", ["systemd", "docker", "statefulset", "ray"])
def test_commands_have_options_that_tlora_takes(place: str) -> None:
    args = build_parser().parse_args(_commands()[place])
    assert args.log_format == "json"
    assert args.http.rpartition(":")[2] == str(doctor.PORT)


def test_ports_users_folders_and_times_agree() -> None:
    docker = DOCKERFILE.read_text()
    assert re.findall(r"^EXPOSE (\d+)$", docker, re.MULTILINE) == [str(doctor.PORT)]
    (user,) = re.findall(r"^USER (\d+)$", docker, re.MULTILINE)
    (service,) = yaml.safe_load((KUBERNETES / "service.yaml").read_text())["spec"]["ports"]
    assert service["port"] == doctor.PORT
    for pod in _pods().values():
        container = _container(pod)
        (port,) = container["ports"]
        assert (port["name"], port["containerPort"]) == (service["targetPort"], doctor.PORT)
        assert pod["securityContext"]["runAsUser"] == int(user)
        assert pod["terminationGracePeriodSeconds"] > Settings().end_gangs_s
        assert "/dev/shm" in [one["mountPath"] for one in container["volumeMounts"]]
        assert {"name": "TLORA_SERVICE", "value": "/data/tlora"} in container["env"]
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT.read_text(), re.MULTILINE)
    assert int(stop_s) > Settings().end_gangs_s


def _run(*words: object) -> subprocess.CompletedProcess[str]:
    """Runs a tool; skips the test where it is not installed."""
    if shutil.which(str(words[0])) is None:
        pytest.skip(f"needs {words[0]}")
    return subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=HANG_S)


def test_systemd_knows_all_that_the_unit_says(tmp_path: Path) -> None:
    unit = UNIT.read_text().replace("/opt/tlora/bin/tlora", sys.executable)
    (tmp_path / UNIT.name).write_text(unit)
    done = _run("systemd-analyze", "verify", tmp_path / UNIT.name)
    assert (done.stderr, done.returncode) == ("", 0), "it warns of unknown keys, and returns 0"


def test_hadolint_finds_nothing() -> None:
    done = _run("hadolint", DOCKERFILE)
    assert (done.stdout, done.returncode) == ("", 0)


def test_kubernetes_takes_what_kustomize_makes(tmp_path: Path) -> None:
    made = _run("kubectl", "kustomize", KUBERNETES)
    assert made.returncode == 0, made.stderr
    found = list(yaml.safe_load_all(made.stdout))
    own = [one for one in found if one["kind"] != "ServiceMonitor"]  # its schema is the operator's
    assert len(own) == len(found) - 1
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(own))
    done = _run("kubernetes-validate", "--strict", tmp_path / "all.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
