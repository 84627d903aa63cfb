"""Changes to a run while it trained, kept for when it is started again.

`OUT/live_changes.json` holds the jobs that were added and the names of those that were cancelled.
The run's own file does not know of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tlora_megatron.config.job import JobSpec
from tlora_megatron.config.jobs import job_to_dict, read_job
from tlora_megatron.config.load import fit_job
from tlora_megatron.config.reader import ConfigError
from tlora_megatron.config.schema import RunConfig
from tlora_megatron.files import BY_UMASK, write_atomic
from tlora_megatron.training.run.output_dir import CONFIG_NAME

FILE_NAME = "live_changes.json"


@dataclass(slots=True)
class LiveChanges:
    """Jobs that were added to a run and cancelled in it."""

    added: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Documents by name, in the order in which they joined."""
    cancelled: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, output_dir: Path) -> LiveChanges:
        """The changes of the run in a folder; none if nothing was changed.

        Raises:
            ConfigError: if the file holds something else.
        """
        path = output_dir / FILE_NAME
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            added: dict[str, Mapping[str, Any]] = {str(j["name"]): dict(j) for j in value["added"]}
            return cls(added, [str(name) for name in value["cancelled"]])
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{path} must hold what was changed while the run trained, got {error!r}; move it "
                f"away to train the jobs of the run's own file alone"
            ) from error

    def write(self, output_dir: Path) -> None:
        """Keeps the changes.

        Raises:
            OSError: if the disk refuses.
        """
        document = {"added": list(self.added.values()), "cancelled": self.cancelled}
        write_atomic(output_dir / FILE_NAME, json.dumps(document, indent=2), mode=BY_UMASK)

    def add(self, job: JobSpec) -> None:
        """Notes that a job has joined."""
        self.added[job.name] = job_to_dict(job)
        if job.name in self.cancelled:
            self.cancelled.remove(job.name)

    def cancel(self, name: str) -> None:
        """Notes that a job was cancelled."""
        if name not in self.cancelled:
            self.cancelled.append(name)


def with_live_changes(config: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """Applies what was changed while an earlier part of the run trained.

    Returns:
        The configuration with the jobs that were added and without those that were cancelled, and a
        sentence for each.

    Raises:
        ConfigError: if nothing is left to train, or a job that was added does not fit any more.
    """
    output_dir = Path(config.run.output_dir)
    if config.run.resume == "never" or not (output_dir / CONFIG_NAME).is_file():
        return config, ()
    changes = LiveChanges.read(output_dir)
    notes = []
    own = {job.name for job in config.jobs} | {error.name for error in config.job_errors}
    jobs = list(config.jobs)
    for name, document in changes.added.items():
        if name not in own and name not in changes.cancelled:
            job = read_job(dict(document), Path.cwd(), path=f"job {name} of {FILE_NAME}")
            jobs.append(fit_job(job, config))
            notes.append(f"job {name} was added while the run trained and goes on")
    for job in [job for job in jobs if job.name in changes.cancelled]:
        jobs.remove(job)
        notes.append(
            f"job {job.name} was cancelled while the run trained and stays out; delete its name "
            f"from {output_dir / FILE_NAME} to train it on"
        )
    if not jobs:
        raise ConfigError(f"jobs must hold at least one that can start, got {'; '.join(notes)}")
    return replace(config, jobs=tuple(jobs)), tuple(notes)
