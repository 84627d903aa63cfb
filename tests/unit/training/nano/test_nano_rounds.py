"""Rounds reported to the controller; the trace; going on with it."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.layout_sites import SPEC
from tests.unit.training.packing.test_packing import queues_of
from tlora_megatron.config.job import LoraSpec
from tlora_megatron.ops.routing import Document
from tlora_megatron.parallel.overlap import NO_LIMIT, LaneRoom
from tlora_megatron.training.nano.rounds import NanoRounds, mix_key, rank_aware_cut
from tlora_megatron.training.nano.trace import TRACE_FILE, NanoTrace, TraceLine, read_trace
from tlora_megatron.training.packing.packing import Placed, Round

COSTS = (1.0, 0.9, 0.95, 1.0)


pytestmark = pytest.mark.usefixtures("world_of_one")


def content_of(*lengths: int) -> Round:
    placed = tuple(Placed(0, item) for item in queues_of([list(lengths)])[0])
    return Round(replicas=((placed,),))


def jobs(*names: str, step: int = 0) -> Any:
    return [SimpleNamespace(name=name, is_active=True, step=step) for name in names]


class Run:
    """Rounds that each take what the number set costs; two jobs step in each."""

    def __init__(
        self,
        folder: Path,
        *,
        resuming: bool = False,
        kind: Any = "best",
        step: int = 99,
        names: tuple[str, ...] = ("a", "b"),
    ) -> None:
        self.count = 0
        self.limit = NO_LIMIT
        self.jobs = jobs(*names, step=step if resuming else 0)
        self.rounds = NanoRounds(
            kind, self, NanoTrace(folder), jobs=self.jobs, device=torch.device("cpu"),
            resuming=resuming,
        )  # fmt: skip

    def set_count(self, count: int) -> None:
        self.count = count

    def room(self) -> LaneRoom:
        return self.limit

    def close(self) -> None:
        raise AssertionError("rounds must leave the engine open")

    def train(self, rounds: int, names: tuple[str, ...] = ("a", "b"), every: int = 1) -> None:
        content = content_of(100, 50, 60, 40)
        for index in range(rounds):
            time_s = COSTS[self.count - 1] / every
            waited = index % every == every - 1
            for job in self.jobs:
                job.step += waited
            self.rounds.after_round(jobs(*names), content, time_s, has_waited=waited)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / TRACE_FILE).read_text().splitlines()]


def test_chooses_sets_and_writes_down(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.count == 1
    run.train(50)
    assert run.count == 2
    trace = records(tmp_path)
    assert [r["step"] for r in trace] == list(range(1, 50)), "the last one's time is under way"
    assert [r["nano_batches"] for r in trace[:7]] == [1, 1, 1, 1, 1, 1, 2]
    assert trace[0] | {"time_s": 1.0} == {
        "step": 1, "nano_batches": 1, "time_s": 1.0, "tokens": 250, "phase": "explore",
        "kept": 1, "jobs": 2, "mix": mix_key(jobs("a", "b")), "chosen": None,
        "job_steps": {"a": 1, "b": 1},
    }  # fmt: skip
    assert (trace[-1]["phase"], trace[-1]["chosen"]) == ("keep", 2)
    assert run.rounds.summary() == {
        "count": 2, "controller": "best", "time_over_one": pytest.approx(0.9),
    }  # fmt: skip


def test_a_step_that_ran_beside_a_decision_is_not_the_new_number_s(tmp_path: Path) -> None:
    """Were it counted, the first step behind a change would be."""
    run, content, last = Run(tmp_path), content_of(100, 50, 60, 40), 0
    for _ in range(50):
        is_first, last = run.count != last, run.count
        time_s = 9.0 if is_first else COSTS[run.count - 1]
        run.rounds.after_round(jobs("a"), content, time_s, has_waited=True)
    assert run.count == 2
    assert run.rounds.summary()["time_over_one"] == pytest.approx(0.9)


def test_rounds_without_a_step_are_measured_with_the_next_that_has_one(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(12, every=3)
    trace = records(tmp_path)
    assert [r["tokens"] for r in trace] == [750] * 3
    assert [r["time_s"] for r in trace] == pytest.approx([1.0] * 3)


def test_a_resumed_run_keeps_the_choice(tmp_path: Path) -> None:
    Run(tmp_path).train(60)
    with (tmp_path / TRACE_FILE).open("a") as file:
        file.write('{"step": 61, "nano_')  # killed while writing
    again = Run(tmp_path, resuming=True)
    assert again.count == 2
    again.train(40)
    assert {r["nano_batches"] for r in records(tmp_path)[59:]} == {2}
    assert [r["step"] for r in records(tmp_path)] == list(range(1, 99))


def test_a_resumed_run_cuts_off_what_it_does_again_and_nothing_else(tmp_path: Path) -> None:
    """Its checkpoints are of step 40 of both jobs; what was chosen later stays chosen."""
    Run(tmp_path).train(60)
    path = tmp_path / TRACE_FILE
    lines = path.read_text().splitlines(keepends=True)
    lines.insert(7, "a note\n")
    path.write_text("".join(lines))
    node = path.stat().st_ino
    again = Run(tmp_path, resuming=True, step=40)
    assert path.read_text() == "".join(lines[:41])
    assert path.stat().st_ino == node, "it is appended to, not written anew"
    assert (again.count, again.rounds.steps) == (2, 40)


@pytest.mark.parametrize("step", [60, 40])
def test_a_job_that_was_taken_out_takes_no_lines_along(tmp_path: Path, step: int) -> None:
    """b goes on from its checkpoint; a is not in the run's file any more."""
    Run(tmp_path).train(60)
    lines = (tmp_path / TRACE_FILE).read_text().splitlines(keepends=True)
    Run(tmp_path, resuming=True, step=step, names=("b",))
    assert (tmp_path / TRACE_FILE).read_text() == "".join(lines[:step])


def test_one_number_of_steps_is_of_all_jobs_together(tmp_path: Path) -> None:
    """The form that earlier versions wrote."""
    Run(tmp_path).train(60)
    old = [r | {"job_steps": sum(r["job_steps"].values())} for r in records(tmp_path)]
    (tmp_path / TRACE_FILE).write_text("".join(json.dumps(record) + "\n" for record in old))
    Run(tmp_path, resuming=True, step=40)
    assert records(tmp_path) == old[:40]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda line: line.pop("mix"), "mix must be of type str, got none"),
        (lambda line: line.update(step="59"), "step must be of type int, got '59'"),
        (lambda line: line.update(chosen=True), "chosen must be of type int | None, got True"),
        (lambda line: line.update(chosen={}), "chosen must be of type int | None, got {}"),
        (lambda line: line.update(job_steps={"a": "1"}),
         "job_steps must be of type dict[str, int] | int, got {'a': '1'}"),
    ],
)  # fmt: skip
def test_broken_lines_are_passed_over_and_stay(
    tmp_path: Path, change: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    Run(tmp_path).train(60)
    path = tmp_path / TRACE_FILE
    *whole, line, last = path.read_text().splitlines(keepends=True)
    broken = json.loads(line)
    change(broken)
    text = "".join([*whole, json.dumps(broken) + "\n", last.replace("{", "[")])
    path.write_text(text)
    again = Run(tmp_path, resuming=True)
    assert [record.message for record in caplog.records] == [
        f"{path}:58 is passed over: {reason} (2 such lines in all)"
    ]
    assert (again.count, again.rounds.steps) == (2, 57)
    again.train(3)
    assert path.read_text().startswith(text)


def test_a_trace_of_an_earlier_version_stays_and_mixes_are_explored_anew(tmp_path: Path) -> None:
    """It says neither what was chosen nor how far its jobs were."""
    Run(tmp_path).train(60)
    old = [
        {k: v for k, v in r.items() if k not in ("chosen", "job_steps")} for r in records(tmp_path)
    ]
    (tmp_path / TRACE_FILE).write_text("".join(json.dumps(record) + "\n" for record in old))
    again = Run(tmp_path, resuming=True, step=0)
    assert (again.count, again.rounds.steps) == (1, 59)
    again.train(3)
    assert records(tmp_path)[:59] == old


@pytest.mark.parametrize(
    ("rounds", "names"), [((20, 0), ("a", "b")), ((60, 5), ("a",))], ids=["exploring", "too soon"]
)
def test_a_resumed_run_explores_what_was_not_done(
    tmp_path: Path, rounds: tuple[int, int], names: tuple[str, ...]
) -> None:
    """A run killed while it explores, or before a new mix's turn, has chosen nothing."""
    run = Run(tmp_path)
    run.train(rounds[0])
    run.train(rounds[1], names=("a",))
    again = Run(tmp_path, resuming=True)
    assert again.count == 1
    again.train(60, names=names)
    assert again.count == 2
    tried = {r["nano_batches"] for r in records(tmp_path)[sum(rounds) :]}
    assert tried > {1, 2}


def test_a_new_run_begins_a_new_trace(tmp_path: Path) -> None:
    Run(tmp_path).train(60)
    assert Run(tmp_path).count == 1
    assert records(tmp_path) == []


def test_a_failed_job_makes_another_mix() -> None:
    mix = jobs("a", "b")
    before = mix_key(mix)
    mix[1].is_active = False
    assert mix_key(mix) != before != mix_key(jobs("a", "bb"))


def test_a_trace_that_cannot_be_written_read_or_begun_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    (tmp_path / TRACE_FILE).unlink()
    (tmp_path / TRACE_FILE).mkdir()
    run.train(3)
    assert caplog.text.count("could not be written") == 1
    assert Run(tmp_path, resuming=True).count == 1
    assert "could not be read" in caplog.text
    NanoTrace(tmp_path).begin()  # the other processes wait for what the writer has to tell
    assert "could not be emptied" in caplog.text


@pytest.mark.parametrize("kind", ["best", "aimd"])
def test_a_number_without_memory_for_it_is_not_tried(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, kind=kind)
    run.limit = LaneRoom(1, 3 << 30)
    run.train(40)
    assert {record["nano_batches"] for record in records(tmp_path)} == {1}
    assert [record.message for record in caplog.records] == [
        "run.nano_batches: more than 1 are not tried: the fullest GPU has 3.0 GiB left beside its "
        "peak"
    ]


def test_what_has_run_stays_when_memory_gets_short(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.limit = LaneRoom(2, 9e9)
    run.train(40)
    run.limit = LaneRoom(1, 1e9)
    run.train(20)
    assert run.count == 2
    assert {record["nano_batches"] for record in records(tmp_path)} == {1, 2}


def test_aimd_has_no_ratio(tmp_path: Path) -> None:
    run = Run(tmp_path, kind="aimd")
    run.train(8)
    assert run.rounds.summary() == {"count": 4, "controller": "aimd", "time_over_one": None}


def test_cuts_follow_the_ranks_of_the_jobs() -> None:
    def job(rank: int) -> Any:
        return SimpleNamespace(spec=SimpleNamespace(lora=LoraSpec(rank=rank)))

    documents = [Document(slot=slot, length=32) for slot in (0, 0, 1, 1, 1, 1)]
    assert rank_aware_cut(SPEC, (job(16), job(16)))(documents, 2) == (0, 3, 6)
    assert rank_aware_cut(SPEC, (job(256), job(16)))(documents, 2) == (0, 2, 6)


def line(step: int) -> TraceLine:
    return TraceLine(
        step=step, nano_batches=1, time_s=0.5, tokens=9, phase="explore", kept=1, jobs=1, mix="m"
    )


def test_a_disk_that_fills_up_in_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = NanoTrace(tmp_path)
    trace.begin()
    trace.append(line(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (trace.path.stat().st_size + 10, hard))
    try:
        trace.append(line(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    trace.append(line(3))
    assert read_trace(tmp_path) == [line(1), line(3)]
    assert [record.message.partition(": ")[0] for record in caplog.records] == [
        f"{trace.path} could not be written"
    ]
