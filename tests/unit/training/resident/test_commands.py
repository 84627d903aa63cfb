"""Commands to a loop whose rounds are only counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tlora_megatron.training.job_saves import SavePolicy, StagedJob
from tlora_megatron.training.resident import commands
from tlora_megatron.training.resident.commands import JobCommands
from tlora_megatron.training.resident.staging import Failed

Event = tuple[str, str | None, Mapping[str, Any]]


class CountedLoop:
    """A loop without a model: jobs are names, and a round does what the test says."""

    def __init__(self) -> None:
        self.super_model = SimpleNamespace(groups=SimpleNamespace(is_writer=True), jobs=())
        self.files = SimpleNamespace(may_write=lambda _: True)
        drain = lambda: self.calls.append("drain")  # noqa: E731
        self.saves = SimpleNamespace(due_by_time=list, save_moved=lambda _: None, drain=drain)
        self.saver = SimpleNamespace(wait_for_room=lambda job: self.calls.append(job.name))
        self.events: list[Event] = []
        self.reports = SimpleNamespace(emit=lambda *event: self.events.append(event))
        self.jobs: list[str] = []
        self.calls: list[object] = []
        self.fails: Exception | None = None
        self.rounds = self.tokens = 0

    has_work = has_round = property(lambda self: bool(self.jobs))
    joining = property(lambda self: self.jobs[-1:])
    active = property(lambda self: [SimpleNamespace(name=name, tokens=0) for name in self.jobs])

    def start(self) -> None:
        self.calls.append("start")

    def save_active(self) -> None:
        self.calls.append("save")

    def step(self) -> None:
        self.rounds += 1
        self.calls.append(tuple(self.jobs))
        if self.fails:
            raise self.fails

    def evaluate_part(self) -> None:
        pass

    def join(self, staged: Any) -> None:
        self.jobs.append(staged.state.name)
        if self.fails and len(self.jobs) > 1:
            raise self.fails

    def leave(self, name: str, *, save: bool, lost: bool = False) -> bool:
        self.calls.append(("leave", name, save, lost))
        if name not in self.jobs:
            return False
        self.jobs.remove(name)
        return True


class Stager:
    """Finds at once what the test has laid out."""

    def __init__(self, **found: StagedJob | Failed | None) -> None:
        self.laid_out = found
        self.ordered: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self.ordered

    def order(self, name: str, order: Any) -> None:
        self.ordered.append(name)

    def found(self, name: str) -> StagedJob | Failed | None:
        return self.laid_out[name]

    def state(self, name: str) -> int | None:
        found = self.laid_out[name]
        return None if found is None else -1 if isinstance(found, Failed) else 7

    def take(self, name: str) -> Any:
        self.ordered.remove(name)
        return self.laid_out[name]

    def drop(self, name: str) -> None:
        self.ordered.remove(name)

    def close(self) -> None:
        pass


def staged(name: str) -> StagedJob:
    state: Any = SimpleNamespace(name=name, step=0, tokens=0, plan=SimpleNamespace(num_steps=2))
    return StagedJob(state=state, digest="7", copied=None, metrics=None, saving=SavePolicy())


class Script:
    def __init__(self, *looks: Sequence[Mapping[str, Any]]) -> None:
        self.looks = [list(look) for look in looks]
        self.waits: list[float] = []

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)

    def take(self) -> Sequence[Mapping[str, Any]]:
        return self.looks.pop(0) if self.looks else [{"kind": "stop"}]


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all that other tests have imported it takes long."""
    monkeypatch.setattr(commands, "gc", SimpleNamespace(freeze=lambda: None))
    monkeypatch.setattr(commands, "frozen_gc", nullcontext)


def serve(counted: CountedLoop, stager: Stager, script: Script) -> list[Event]:
    loop, prepares = counted, stager  # type: Any, Any
    JobCommands(loop, prepares, None).serve(script)
    return counted.events


def test_commands_are_carried_out_in_order_behind_the_round_they_came_in() -> None:
    loop, stager = CountedLoop(), Stager(a=staged("a"), b=staged("b"))
    prepare = [{"kind": "prepare", "job": name, "seq": i} for i, name in enumerate("ab")]
    join = {"kind": "join", "job": "a", "seq": 2}
    events = serve(loop, stager, Script(prepare, [join], [], [{"kind": "join", "job": "b"}], []))
    assert [(kind, job) for kind, job, _ in events] == [
        ("applied", "a"), ("applied", "b"), ("prepared", "a"), ("prepared", "b"),
        ("joined", "a"), ("applied", "a"), ("joined", "b"), ("stopped", None),
    ]  # fmt: skip
    rounds = [call for call in loop.calls if isinstance(call, tuple) and call[0] != "leave"]
    assert rounds == [("a",), ("a",), ("a", "b"), ("a", "b")]


def test_an_early_join_waits_until_the_job_is_prepared() -> None:
    loop, stager = CountedLoop(), Stager(a=None)
    script = Script([{"kind": "prepare", "job": "a"}, {"kind": "join", "job": "a"}], [], [])
    take = script.take

    def take_later() -> Sequence[Mapping[str, Any]]:
        if len(script.looks) == 1:
            stager.laid_out["a"] = staged("a")
        return take()

    script.take = take_later  # type: ignore[method-assign]
    events = serve(loop, stager, script)
    assert [kind for kind, *_ in events] == ["prepared", "joined", "stopped"]
    assert script.waits[0] > 100 * script.waits[1], "looks often while a job is prepared"


@pytest.mark.parametrize("comes", [True, False])
def test_joins_at_once_share_the_first_round(comes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, stager = CountedLoop(), Stager(a=staged("a"), b=staged("b"))
    prepare = [{"kind": "prepare", "job": name} for name in "ab"]
    first = {"kind": "join", "job": "a", "body": {"more": True}}
    monkeypatch.setattr(Script, "wait", lambda *_: comes)
    serve(loop, stager, Script(prepare, [first], [{"kind": "join", "job": "b", "body": {}}], []))
    rounds = [call for call in loop.calls if isinstance(call, tuple)]
    assert rounds[0] == (("a", "b") if comes else ("a",))


def test_a_join_that_nothing_was_prepared_for_is_refused() -> None:
    (told, _) = serve(CountedLoop(), Stager(), Script([{"kind": "join", "job": "z"}], []))
    assert told[0] == "refused"
    assert "'z' must be prepared before it joins" in told[2]["error"]


@pytest.mark.parametrize("fails_in", ["round", "join"])
def test_out_of_memory_names_the_joining_jobs(fails_in: str) -> None:
    loop, stager = CountedLoop(), Stager(new=staged("new"))
    loop.jobs, loop.fails = ["a"], torch.OutOfMemoryError("no room")
    order = [{"kind": "prepare", "job": "new"}, {"kind": "join", "job": "new"}]
    if fails_in == "round":
        loop.jobs, order = ["a", "new"], []
    else:
        loop.step = lambda: None  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        serve(loop, stager, Script(order, []))
    assert loop.events[-1] == ("out_of_memory", None, {"joining": ["new"]})


def test_a_job_that_leaves_is_saved_once_there_is_room() -> None:
    loop = CountedLoop()
    loop.jobs = ["a", "b"]
    serve(loop, Stager(), Script([{"kind": "leave", "job": "a"}], []))
    assert loop.calls.index("a") < loop.calls.index(("leave", "a", True, False))
