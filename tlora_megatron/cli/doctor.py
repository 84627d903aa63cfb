"""`tlora doctor`: looks whether this host and a service's folder are fit, and says what to do."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tlora_megatron.cli.service.in_folder import service_folder
from tlora_megatron.cli.tables import make_table, open_console
from tlora_megatron.service.home import DATABASE, VARIABLE, Home, store_place

_EPILOG = """\
examples:
  tlora doctor
  tlora doctor /data/tlora --json

It changes no job and no table, and asks nobody outside of this host but the service's database.
exit code: 0 all is well or worth a look, 1 something is wrong
"""
PORT = 8017
_GB = 1 << 30
_LEAST_GB, _FEW_GB, _LEAST_SHM_GB = 1, 10, 1
_MOST_APART_S = 2.0
_WAIT_S = 20.0
_NEEDED = ("torch", "megatron-core", "transformers")
_PEERS = (*_NEEDED, *("peft", "triton", "deepspeed", "ray", "vllm", "tinker", "transformer-engine"))

_ONE_CLOCK = "let both follow one NTP server"

Level = Literal["ok", "look", "wrong"]
_STYLES: dict[Level, str] = {"ok": "", "look": "yellow", "wrong": "red"}


class Finding(NamedTuple):
    """One thing that was looked at."""

    check: str
    level: Level
    found: str
    remedy: str = ""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check this host and a service's folder, and say what to do",
        description="Checks driver, kernels, disks, clock, store, ports and versions, and says "
        "what to do.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "folder", nargs="?", help=f"folder of the service (default: ${VARIABLE}, or ~/.tlora)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Prints what was found; 1 if something is wrong."""
    findings = list(examine(service_folder(args.folder)))
    is_well = all(finding.level != "wrong" for finding in findings)
    if args.json:
        checks = [finding._asdict() for finding in findings]
        print(json.dumps({"ok": is_well, "checks": checks}, indent=2))
        return int(not is_well)
    table = make_table("", "check", "found", "what to do", words=("found", "what to do"))
    for check, level, found, remedy in findings:
        table.add_row(level, check, found, remedy, style=_STYLES[level])
    open_console().print(table, soft_wrap=False)
    return int(not is_well)


def examine(root: Path) -> Iterator[Finding]:
    """Looks at everything, the service in a folder too if there is one."""
    yield from _driver()
    yield from _versions()
    yield from _disks(root)
    if (root / DATABASE).exists() or Home(root).store.exists():
        yield from _folder(root)
        yield _store(root)
    else:
        yield Finding("service", "ok", f"none in {root} yet")
    yield _synchronised()
    yield _port()
    yield _own_name()


def _said(*words: str) -> str:
    """What a command prints; raises `OSError` or `SubprocessError`."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=_WAIT_S, check=True)
    return done.stdout.strip()


def _driver() -> Iterator[Finding]:
    """GPUs by their driver and by torch, and what compiles kernels for them."""
    try:
        gpus = _said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    except FileNotFoundError:
        vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
        if any(path.read_text().strip() == "0x10de" for path in vendors):
            remedy = "install NVIDIA's driver; in a container: --gpus all, or the device plug-in"
            yield Finding("driver", "wrong", "an NVIDIA device, and no nvidia-smi", remedy)
        else:
            yield Finding("driver", "ok", "no NVIDIA GPU: the CPU trains")
    except (OSError, subprocess.SubprocessError) as error:
        found = f"nvidia-smi fails: {getattr(error, 'stdout', None) or error}"
        remedy = "restart the host or load the driver again; dmesg tells more"
        yield Finding("driver", "wrong", found.strip(), remedy)
    else:
        yield Finding("driver", "ok", gpus.replace("\n", "; "))
        yield _kernels()


def _kernels() -> Finding:
    from tlora_megatron.ops.kernel_build import ExtensionUnavailable, built_library, find_compiler

    try:
        import torch

        library, compiler = built_library(), find_compiler()
    except (ImportError, ExtensionUnavailable) as error:
        return Finding("kernels", "wrong", str(error), "pip install 'tlora-megatron[train]'")
    if not torch.cuda.is_available():
        remedy = "install a torch for the driver's CUDA: https://pytorch.org/get-started"
        return Finding("kernels", "wrong", f"torch {torch.__version__} sees no GPU", remedy)
    if library.exists() or compiler is not None:
        found = str(library) if library.exists() else f"{compiler} compiles them on first use"
        return Finding("kernels", "ok", found)
    remedy = "install nvcc or copy the cache of a host that has it; tlora inspect kernels says more"
    return Finding("kernels", "look", "no nvcc: Triton's kernels train", remedy)


def _versions() -> Iterator[Finding]:
    """Packages that must go together, by the ranges that this one declares."""
    try:
        from packaging.requirements import Requirement

        lines = metadata.requires("tlora-megatron") or []
    except (ImportError, metadata.PackageNotFoundError) as error:
        yield Finding("versions", "wrong", f"{error}", "pip install 'tlora-megatron[train]'")
        return
    ranges = {found.name.lower(): found.specifier for found in map(Requirement, lines)}
    for name in _PEERS:
        allowed = str(ranges.get(name, ""))
        remedy = f"pip install '{name}{allowed}'"
        level: Level = "wrong" if name in _NEEDED else "look"
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            is_needed = name in _NEEDED
            yield Finding(name, level if is_needed else "ok", "not installed", is_needed * remedy)
            continue
        if name not in ranges or ranges[name].contains(version, prereleases=True):
            yield Finding(name, "ok", version)
        else:
            yield Finding(name, level, f"must be {allowed}, got {version}", remedy)


def _disks(root: Path) -> Iterator[Finding]:
    there = next(path for path in (root, *root.parents) if path.exists())
    free_gb = shutil.disk_usage(there).free / _GB
    level: Level = "wrong" if free_gb < _LEAST_GB else "look" if free_gb < _FEW_GB else "ok"
    remedy = "" if level == "ok" else "free some: a full disk pauses jobs as they are saved"
    yield Finding("disk", level, f"{free_gb:,.0f} GiB free at {there}", remedy)
    shared = Path("/dev/shm")
    size_gb = shutil.disk_usage(shared).total / _GB if shared.is_dir() else 0.0
    remedy = "" if size_gb >= _LEAST_SHM_GB else "NCCL needs it: --shm-size=8g, or an emptyDir"
    yield Finding("/dev/shm", "look" if remedy else "ok", f"{size_gb:,.1f} GiB", remedy)


def _folder(root: Path) -> Iterator[Finding]:
    """Writes a file into the service's folder, and compares its time with this host's."""
    try:
        Home.open(root)
        with tempfile.TemporaryFile(dir=root) as file:
            apart_s = abs(os.fstat(file.fileno()).st_mtime - time.time())
    except (ValueError, OSError) as error:
        yield Finding("service", "wrong", str(error), "serve it as the user whose folder it is")
        return
    yield Finding("service", "ok", f"{root} can be written")
    if apart_s > _MOST_APART_S:
        found = f"its disk's clock and this host's are {apart_s:.0f} s apart"
        yield Finding("clock", "look", found, _ONE_CLOCK)


def _store(root: Path) -> Finding:
    """Reads the store without bringing it up to date."""
    try:
        from tlora_megatron.service.store import Store, StoreError
        from tlora_megatron.service.store.store import newest, open_database, version_of
    except ImportError as error:
        return Finding("store", "wrong", str(error), "pip install 'tlora-megatron[serve]'")
    try:
        with Store(open_database(store_place(Home(root)))) as store:
            with store.database.read() as connection:
                version = version_of(connection) or 0
                if connection.dialect.name == "sqlite":
                    said = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
                    if said != "ok":
                        raise StoreError(str(said))
            if version != newest():
                found = f"its tables have version {version}, this package's {newest()}"
                if version > newest():
                    return Finding("store", "wrong", found, "install the newer tlora-megatron")
                return Finding("store", "look", found, "tlora serve brings it up: copy it before")
            now_s = store.database.clock()
            if abs(now_s - time.time()) > _MOST_APART_S:
                found = f"its server's clock and this host's differ by {now_s - time.time():.0f} s"
                return Finding("store", "look", found, _ONE_CLOCK)
            held = store.lock.holder()
            if held is None or not held.owner:
                return Finding("store", "ok", "whole; no controller runs")
            found = f"whole; {held.who} gave a sign of life {now_s - held.beat_at:.0f} s ago"
            if store.lock.is_held():
                return Finding("store", "ok", found)
            return Finding("store", "look", found, "tlora serve takes its jobs up")
    except (StoreError, ValueError, ImportError) as error:  # psycopg may be missing
        return Finding("store", "wrong", str(error), "docs/operations.md: how it is restored")


def _synchronised() -> Finding:
    try:
        said = _said("timedatectl", "show", "--property", "NTPSynchronized", "--value")
    except (OSError, subprocess.SubprocessError):
        return Finding("clock", "ok", "no timedatectl to ask")
    if said == "no":
        remedy = "start chronyd or systemd-timesyncd: hosts of a service compare times"
        return Finding("clock", "look", "follows no NTP server", remedy)
    return Finding("clock", "ok", "follows an NTP server")


def _port() -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", PORT))
            return Finding("port", "ok", f"{PORT} is free")
        except OSError:
            asked = http.client.HTTPConnection("127.0.0.1", PORT, timeout=_WAIT_S)
    try:
        asked.request("GET", "/readyz")
        word = asked.getresponse().read(20).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        word = ""
    if word == "ready":
        return Finding("port", "ok", f"a service answers at {PORT}: {word}")
    if word in ("store", "controller", "bases"):
        found = f"a service answers at {PORT}, and not ready: {word}"
        return Finding("port", "look", found, "docs/operations.md says what to do")
    remedy = "tlora serve --http PORT takes another one"
    return Finding("port", "look", f"another program has {PORT}", remedy)


def _own_name() -> Finding:
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        remedy = f"add {name} to /etc/hosts: processes of a gang meet by it"
        return Finding("name", "wrong", f"{name}: {error}", remedy)
    return Finding("name", "ok", f"{name} has an address")
