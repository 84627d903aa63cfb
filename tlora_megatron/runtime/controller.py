"""`tlora train`: one run from its configuration to results, while jobs join and leave it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tlora_megatron import timeline
from tlora_megatron.config.load import check_jobs_may_change, config_to_dict, fit_job
from tlora_megatron.config.parallel_rules import check_job_over_experts
from tlora_megatron.config.schema import RunConfig
from tlora_megatron.config.sections import read_job
from tlora_megatron.files import BY_UMASK, write_atomic
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.runtime.backbone import know_base, open_backbone
from tlora_megatron.runtime.choices import (
    choose_recompute,
    resolve_lora_sharding,
    resolve_round_timing,
)
from tlora_megatron.training.data.job_data import TokenCache, TokenizerFolder
from tlora_megatron.training.formats.quantised import quantisation_card
from tlora_megatron.training.loop import Loop
from tlora_megatron.training.metrics import EventSink
from tlora_megatron.training.resident.commands import Command, JobCommands
from tlora_megatron.training.resident.staging import ReadOrder, Stager
from tlora_megatron.training.run.determinism import frozen_gc, keep_fingerprints
from tlora_megatron.training.run.output_dir import (
    CONFIG_NAME,
    TOKENS,
    LiveChanges,
    LiveFolder,
    Request,
)
from tlora_megatron.training.run.preparation import PreparedJob
from tlora_megatron.training.run.reading import check_fits_linears, prepare_for
from tlora_megatron.training.run.training_run import Linears, TrainingRun
from tlora_megatron.training.signals import StopSignals

logger = logging.getLogger(__name__)


@contextmanager
def open_for_requests(
    run: TrainingRun, linears: Linears, loop: Loop
) -> Iterator[Callable[[], None]]:
    """Yields what the loop calls behind its rounds; every rank of the run calls it."""
    watch = loop.watch
    if watch.signals is None:
        yield lambda: None
        return
    requests, prepared = None, None
    if loop.super_model.groups.is_writer:
        folder, prepared = open_folder(run.output_dir), dict[str, PreparedJob]()
        if folder is not None:
            requests = LiveRequests(folder, loop, _Record(run, prepared))
            watch.commands_wait = lambda: folder.has_requests
    stager = Stager(
        loop.super_model.bank,
        run.spec,
        _order_reader(run, prepared),
        lambda job: _check(run, linears, loop, job),
        loop.files.open_metrics,
    )
    commands = JobCommands(loop, stager, watch.group, events=requests)
    try:
        yield lambda: commands.behind_round(requests, has_commands=watch.has_commands)
    finally:
        commands.close()
        if requests is not None:
            requests.close()


def open_folder(output_dir: Path) -> LiveFolder | None:
    """Opens where requests to a run come in; None if its folder allows none."""
    try:
        return LiveFolder(output_dir)
    except OSError as error:
        logger.warning("no job can be added to this run or cancelled in it: %s", error)
        return None


class LiveRequests:
    """Requests to a run as commands to its loop; what becomes of them is answered and kept."""

    def __init__(self, folder: LiveFolder, loop: Loop, record: _Record) -> None:
        self._folder, self._loop, self._record = folder, loop, record
        self._adding: dict[str, Request] = {}
        """By job, until it has joined or cannot."""
        self._cancelling: dict[str, Request] = {}
        """By job, until it has left the rounds."""

    def take(self) -> list[Command]:
        """The commands that follow from the requests that have come; never waits."""
        return [c for request in self._folder.take() for c in self._commands_of(request)]

    def wait(self, seconds: float) -> object:
        """Not called: the run goes on with its rounds."""
        raise AssertionError("a run does not wait for requests")

    def emit(self, kind: str, job: str | None, body: Mapping[str, Any]) -> None:
        """Answers the request that an event of a job is about, and hands the event on."""
        self._loop.reports.emit(kind, job, body)
        if job is None:
            return
        if kind == "refused" and job in self._adding:
            self._answer(self._adding.pop(job), body)
        elif kind == "joined" and job in self._adding:
            request = self._adding.pop(job)
            self._record.joined(request.body["document"])
            num_steps = self._job(job).plan.num_steps
            facts = {"round": body["round"], "from_step": body["from_step"]}
            self._answer(request, {**facts, "num_steps": num_steps})
        elif kind == "applied" and job in self._cancelling:
            self._record.cancelled(job)
            self._answer(self._cancelling.pop(job), {"step": self._job(job).step})

    def close(self) -> None:
        """Takes no more requests; a second call does nothing."""
        self._folder.close()

    def _commands_of(self, request: Request) -> Sequence[Command]:
        kind, name = request.body.get("kind"), str(request.body.get("job"))
        if kind == "add":
            return self._add(request, name)
        if kind == "cancel":
            return self._cancel(request, name)
        self._answer(request, {"error": f"a request must be add or cancel, got {kind!r}"})
        return ()

    def _add(self, request: Request, name: str) -> Sequence[Command]:
        known = {job.name for job in self._loop.jobs if job.status != "cancelled"}
        if name in known or name in self._adding:
            error = f"job {name!r} must have a name of its own, got that of a job of the run"
            self._answer(request, {"error": error})
            return ()
        self._adding[name] = request
        every_steps = self._loop.settings.checkpoint_every_steps
        order = {**request.body, "checkpoint_every_steps": every_steps}
        return {"kind": "prepare", "job": name, "body": order}, {"kind": "join", "job": name}

    def _cancel(self, request: Request, name: str) -> Sequence[Command]:
        leave = {"kind": "leave", "job": name}
        if name in self._adding:
            error = f"job {name!r} was cancelled before it joined"
            self._answer(self._adding.pop(name), {"error": error})
            self._answer(request, {"step": 0})
            return (leave,)
        active = [job.name for job in self._loop.active if job.name not in self._cancelling]
        if name not in active:
            self._answer(request, {"error": self._not_training(name, active)})
            return ()
        self._cancelling[name] = request
        return ({**leave, "seq": request.number},)

    def _not_training(self, name: str, active: Sequence[str]) -> str:
        """Says why a job cannot be cancelled: it may have ended while the request was under way."""
        for job in self._loop.jobs:
            if job.name == name:
                status = "cancelled" if name in self._cancelling else job.status
                state = f"{status} at step {job.step}"
                return f"job {name!r} must still train to be cancelled, got one that is {state}"
        return f"the job to cancel must be one that trains: {', '.join(active)}; got {name!r}"

    def _job(self, name: str) -> Any:
        return next(job for job in self._loop.jobs if job.name == name)

    def _answer(self, request: Request, body: Mapping[str, Any]) -> None:
        self._folder.answer(request.number, body)


def _order_reader(run: TrainingRun, prepared: dict[str, PreparedJob] | None) -> ReadOrder:
    """Returns what reads all that a job starts from, its tokens as those who asked have kept them.

    Args:
        prepared: gets the jobs that were read, by name, without their weights; None = nobody does.
    """
    config, cache = run.config, TokenCache(run.output_dir / TOKENS)

    def read(order: Mapping[str, Any]) -> PreparedJob:
        check_jobs_may_change(config.parallel, config.run)
        job = fit_job(read_job(order["document"], None), config)
        if isinstance(run.spec, ModelSpec) and run.spec.experts is not None:
            check_job_over_experts(job, config)
        source = TokenizerFolder(config.base_model.folder)
        data = cache.load(job, source, run.spec.vocab_size, order.get("tokens")).data
        found = prepare_for(
            config, run.spec, job, None, quantisation=run.quantisation, resuming=True, data=data
        )
        if prepared is not None:
            prepared[job.name] = replace(found, imported=None)
        return found

    return read


def _check(run: TrainingRun, linears: Linears, loop: Loop, prepared: PreparedJob) -> None:
    """Refuses a job that the run has no place for."""
    job, super_model = prepared.spec, loop.super_model
    super_model.bank.shape.check_holds(job.name, job.lora)
    check_fits_linears(job, run.spec, super_model.groups.layout, linears)


class _Record:
    """Keeps changes where the next start of the run finds them; the disk may refuse.

    Args:
        prepared: the jobs that were read, by name; those that join are taken out.
    """

    def __init__(self, run: TrainingRun, prepared: dict[str, PreparedJob]) -> None:
        self._run, self._prepared = run, prepared
        self._config: RunConfig = run.config
        self._changes = LiveChanges.read(run.output_dir)

    def joined(self, document: Mapping[str, Any]) -> None:
        job = read_job(dict(document), None)
        others = tuple(other for other in self._config.jobs if other.name != job.name)
        self._config = replace(self._config, jobs=(*others, job))
        self._changes.add(job)
        self._write(job.name, [self._prepared.pop(job.name)])

    def cancelled(self, name: str) -> None:
        self._changes.cancel(name)
        self._write(name, ())

    def _write(self, name: str, begun: Sequence[PreparedJob]) -> None:
        output_dir = self._run.output_dir
        try:
            self._changes.write(output_dir)
            text = json.dumps(config_to_dict(self._config), indent=2)
            write_atomic(output_dir / CONFIG_NAME, text, mode=BY_UMASK)
            if begun:
                keep_fingerprints(self._run.facts.get("deterministic"), output_dir, begun)
        except OSError as error:
            logger.warning("job %s: a later start of the run will not know: %s", name, error)


def train_run(
    config: RunConfig, events: EventSink | None = None, signals: StopSignals | None = None
) -> dict[str, Any]:
    """Trains all jobs of a run; called by every process of it.

    Args:
        events: takes what happens, on every rank that has one.
        signals: stop it behind a round; given on every process or on none.

    Returns:
        The content of `OUT/summary.json`; empty on every process but the writer.
    """
    timeline.begin_run()
    known = know_base(config)
    spec, quantisation, _ = known
    with TrainingRun(
        config,
        spec,
        quantisation=quantisation_card(config.base_model, spec, quantisation),
        events=events,
        resolve_sharding=resolve_lora_sharding,
        choose_recompute=choose_recompute,
        resolve_timing=resolve_round_timing,
        signals=signals,
    ) as run:
        if quantisation is not None:
            run.facts["quantization"] = quantisation.describe(spec)
        base = open_backbone(config, known, on_loaded=run.check_agreement)
        loop = run.start(base.groups, base.linears, base.engine)
        with open_for_requests(run, base.linears, loop) as on_boundary, frozen_gc():
            loop.run(on_boundary)
        return run.finish()
