"""A sweep's rungs, where trials wait while others train, and `sweep.json`, which keeps choices."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tlora_megatron.config.reader import ConfigError, show
from tlora_megatron.config.rungs import Decision, Halving, rung_steps
from tlora_megatron.config.sections import plain
from tlora_megatron.config.sweep import Sweep
from tlora_megatron.files import BY_UMASK, read_object, write_atomic
from tlora_megatron.training.job_state import EvalResult, JobState
from tlora_megatron.training.metrics import without_nonfinite

logger = logging.getLogger(__name__)

SWEEP_FILE = "sweep.json"
"""In the output folder: the trials, what was decided at the rungs, and at the end the results."""


def scores_of(result: EvalResult | None) -> dict[str, float | None]:
    """The metrics of an evaluation, by the names of `sweep.metric`; None = not finite."""
    if result is None:
        return {}
    named = {"loss": result.loss, "exact_match": result.exact_match, **result.scores}
    found: dict[str, float | None] = without_nonfinite({f"eval_{k}": v for k, v in named.items()})
    return found


class Rungs:
    """Holds trials at rungs and lets the best go on; the same on every rank of a run.

    Args:
        known: of `known_rungs`, the same on every rank: the choices made so far stand.

    Raises:
        ConfigError: if a rung falls on no step of its own.
    """

    def __init__(
        self,
        sweep: Sweep,
        output_dir: Path,
        jobs: Sequence[JobState],
        known: Sequence[Mapping[str, Any]],
    ) -> None:
        self.sweep, self._path = sweep, output_dir / SWEEP_FILE
        self._halving: Halving | None = None
        self._has_news = True
        if (stop := sweep.spec.stop) is not None:
            trials = [job for job in jobs if job.name in sweep.settings]
            counts = {job.name: job.plan.num_steps for job in trials}
            # Those that were cancelled and left out count as the worst.
            steps = dict.fromkeys(sweep.settings, (0,) * len(stop.at))
            steps |= {name: rung_steps(stop.at, count, name) for name, count in counts.items()}
            self._halving = Halving(sweep.spec, steps, known)
            warming = [
                job.name
                for job in trials
                if steps[job.name][0] <= job.spec.schedule.num_warmup_steps(counts[job.name])
            ]
            if warming:
                logger.warning(
                    "sweep.stop.at: the first rung of %d trials, as of %s, lies in their warm-up, "
                    "where high rates look best", len(warming), warming[0],
                )  # fmt: skip

    def begin(self, jobs: Iterable[JobState]) -> Mapping[str, str]:
        """Tells trials where they wait; returns why some were stopped before a restart, by name."""
        if self._halving is None:
            return {}
        for job in jobs:
            if job.name in self._halving.steps:
                job.hold_at = self._halving.left(job.name)
        return self._halving.stopped_before()

    def settle(self, active: Sequence[JobState]) -> list[Decision]:
        """Holds the trials that have come to a rung and been evaluated there.

        Returns:
            What is decided at rungs where none is missing any more. Those that go on are held no
            more; the others are to leave.
        """
        if self._halving is None:
            return []
        jobs = {job.name: job for job in active if job.name in self._halving.steps}
        for job in jobs.values():
            if job.is_at_rung and not job.is_held:
                job.is_held = self._has_news = True
                score = scores_of(job.eval_after).get(self.sweep.spec.metric)
                self._halving.take(job.name, math.nan if score is None else score)
        decisions = self._halving.settle(jobs)
        for decision in decisions:
            self._has_news = True
            for name in decision.kept:
                jobs[name].is_held = False
                jobs[name].hold_at = jobs[name].hold_at[1:]
        return decisions

    def take_news(self) -> dict[str, Any] | None:
        """The rungs as plain values, if they are others than at the last call."""
        has_news, self._has_news = self._has_news, False
        return self.document() if has_news else None

    def document(self) -> dict[str, Any]:
        """What `sweep.json` keeps of the rungs, for `write`."""
        return {"rungs": [] if self._halving is None else self._halving.document()}

    def write(self, content: Mapping[str, Any]) -> None:
        """Writes `sweep.json`; a disk that refuses costs it, not the run.

        The writer of the run calls it, behind the checkpoints of the trials that it tells of.
        """
        document = {"sweep": self.sweep.spec, "trials": self.sweep.settings, **content}
        text = json.dumps(without_nonfinite(plain(document)), indent=2, allow_nan=False)
        try:
            write_atomic(self._path, text + "\n", mode=BY_UMASK)
        except OSError as error:
            logger.warning("a later start of the sweep will not know its rungs: %s", error)


def known_rungs(sweep: Sweep, output_dir: Path) -> Sequence[Mapping[str, Any]]:
    """Reads the rungs of a sweep that goes on; every rank calls it before any of them may write.

    Raises:
        ConfigError: if the folder holds another sweep.
    """
    path = output_dir / SWEEP_FILE
    if (known := read_object(path)) is None:
        return ()
    for section, value in (("sweep", sweep.spec), ("trials", sweep.settings)):
        mine, theirs = json.loads(json.dumps(plain(value))), known.get(section) or {}
        for key in {**mine, **theirs}:
            if mine.get(key) != theirs.get(key):
                raise ConfigError(
                    f"run.output_dir must be new or hold this sweep, got {path} with {section}."
                    f"{key} {show(theirs.get(key))} instead of {show(mine.get(key))}"
                )
    return list(known.get("rungs", ()))
