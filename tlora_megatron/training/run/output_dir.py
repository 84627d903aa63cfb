"""Claims the output folder of a run: new, or holding the same run, and used by no other."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tlora_megatron.config.load import config_to_dict
from tlora_megatron.config.reader import show
from tlora_megatron.config.schema import BaseModelSpec, RunConfig

CONFIG_NAME = "config.json"
"""The resolved configuration: a directory with one holds a run."""
_LOCK_NAME = ".lock"
_CHANGEABLE = {"path", "quantization", "unquantised"}
"""Keys of `base_model` that a run may change where it says so; each job's checkpoint is checked."""


@contextmanager
def hold_output_dir(output_dir: Path) -> Iterator[None]:
    """Keeps other runs out of the directory while this one writes; only the writer calls it.

    The kernel releases the lock when the process ends, however it ends. On a file system without
    locks nothing is kept out.
    """
    with (output_dir / _LOCK_NAME).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"run.output_dir must not be in use, got {output_dir}, where another run writes"
            ) from error
        except OSError:  # no locks there
            pass
        yield


def is_held(output_dir: Path) -> bool:
    """True if a run writes there; also where the file system has no locks, so nobody can tell."""
    try:
        with (output_dir / _LOCK_NAME).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, PermissionError):
        return False
    except OSError:  # held, or no locks there
        return True
    return False


def claim_output_dir(output_dir: Path, config: RunConfig) -> bool:
    """Looks whether a run may write there; returns True if it holds this run, to be resumed.

    The directory is made by `make_output_dir`, once nothing is wrong with the input: a run that is
    refused leaves nothing behind.

    Raises:
        ValueError: if it holds another run, is not writable, or `run.resume` asks otherwise.
    """
    held = output_dir / CONFIG_NAME
    resume = config.run.resume
    if held.is_file():
        if resume == "never":
            raise ValueError(
                f"run.output_dir must not hold a run with run.resume: never, got {output_dir}"
            )
        if other := _other_base(held, config_to_dict(config)["base_model"]):
            raise ValueError(
                f"run.output_dir must be new or hold this run, got {output_dir} with {other}"
            )
    elif resume == "always":
        raise ValueError(
            f"run.output_dir must hold a run with run.resume: always, got {output_dir}"
        )
    elif left := sorted(output_dir.glob("jobs/*/checkpoints/step_*")):
        raise ValueError(
            f"run.output_dir must be new or hold this run, got {output_dir} with {left[0]} but "
            f"without its {CONFIG_NAME}; put that back, or move the checkpoints away"
        )
    there = next(path for path in (output_dir, *output_dir.parents) if os.path.lexists(path))
    try:
        # Not a name made from the process id: processes of other nodes may have the same.
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise _unwritable(output_dir, error) from error
    return held.is_file()


def make_output_dir(output_dir: Path) -> None:
    """Makes the directory of a run that begins, where it is missing."""
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(output_dir, error) from error


def _unwritable(output_dir: Path, error: OSError) -> ValueError:
    return ValueError(f"run.output_dir must be writable, got {output_dir}: {error}")


def _other_base(held: Path, ours: dict[str, Any]) -> str:
    """Says what a config.json that is there holds instead of our `base_model`; empty for ours."""
    try:
        # A key that came with a later version had its default's effect before.
        defaults = json.loads(json.dumps(asdict(BaseModelSpec())))
        theirs = defaults | dict(json.loads(held.read_text())["base_model"])
    except (ValueError, TypeError, KeyError):  # such as a model's
        return f"a {CONFIG_NAME} that is no run's"
    keys = [key for key in ours | theirs if ours.get(key) != theirs.get(key)]
    keys = [key for key in keys if key != "allow_change"]
    may_change = _CHANGEABLE.issuperset(keys)
    if not keys or (ours["allow_change"] and may_change):
        return ""
    differences = (
        f"{key} {show(theirs.get(key))} instead of {show(ours.get(key))}" for key in keys
    )
    remedy = "; base_model.allow_change: true lets its jobs go on over it"
    return f"a run over another base_model: {', '.join(differences)}" + (
        remedy if may_change and keys != ["path"] else ""
    )
