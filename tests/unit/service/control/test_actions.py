"""The next action, by what is decided and what runs now."""

from __future__ import annotations

import pytest

from tlora_megatron.service.control.actions import Action, GangNow, Phase, Target, plan_actions


def _gang(name: str, gpus: tuple[int, ...] = (0,), **fields: object) -> GangNow:
    return GangNow(gang=name, gpus=gpus, **{"state": "running", **fields})  # type: ignore[arg-type]


def _target(name: str, *members: str, gpus: tuple[int, ...] = (0,), **fields: bool) -> Target:
    return Target(gang=name, gpus=gpus, members=members, **fields)


def _members(**phases: Phase) -> dict[str, Phase]:
    return dict(phases)


CASES: dict[str, tuple[list[Target], list[GangNow], list[str]]] = {
    "nothing to do": ([], [], []),
    "a gang is started where its GPUs are free": ([_target("g1", "a")], [], ["start g1"]),
    "two targets never start on one GPU": (
        [_target("g1", "a"), _target("g2", "b", gpus=(0, 1))],
        [],
        ["start g1"],
    ),
    "a gang that died waits before it starts again": (
        [_target("g1", "a", may_start=False)],
        [],
        [],
    ),
    "jobs wait while their gang starts": (
        [_target("g1", "a")],
        [_gang("g1", state="starting")],
        [],
    ),
    "jobs are prepared all at once": (
        [_target("g1", "a", "b")],
        [_gang("g1")],
        ["prepare g1 a", "prepare g1 b"],
    ),
    "a prepared job joins though another is still being prepared": (
        [_target("g1", "a", "b")],
        [_gang("g1", members=_members(a="prepared", b="preparing"))],
        ["join g1 a"],
    ),
    "a fresh gang's first jobs join together": (
        [_target("g1", "a", "b", "c")],
        [_gang("g1", members=_members(a="prepared", b="preparing", c="prepared"), gathers=True)],
        [],
    ),
    "they join as soon as all are prepared": (
        [_target("g1", "a", "b")],
        [_gang("g1", members=_members(a="prepared", b="prepared"), gathers=True)],
        ["join g1 a", "join g1 b"],
    ),
    "a job that joins alone waits for no other": (
        [_target("g1", "a", "b", one_by_one=True)],
        [_gang("g1", members=_members(a="prepared", b="preparing"), gathers=True)],
        ["join g1 a"],
    ),
    "no second change while a join is on its way": (
        [_target("g1", "a", "b")],
        [_gang("g1", members=_members(a="joining", b="prepared"))],
        [],
    ),
    "a joining job is prepared while another leaves, and joins later": (
        [_target("g1", "a", "b")],
        [_gang("g1", members=_members(a="training", c="leaving"))],
        ["prepare g1 b"],
    ),
    "who goes leaves before who is ready joins": (
        [_target("g1", "a", "b")],
        [_gang("g1", members=_members(a="training", b="prepared", c="training"))],
        ["leave g1 c"],
    ),
    "a move waits until the old gang has let go": (
        [_target("g1", "a", "b"), _target("g2", "c", gpus=(1,))],
        [
            _gang("g1", members=_members(a="training")),
            _gang("g2", gpus=(1,), members=_members(b="training", c="training")),
        ],
        ["leave g2 b"],
    ),
    "a job that left and is wanted again is prepared anew": (
        [_target("g1", "a")],
        [_gang("g1", members=_members(a="leaving"))],
        [],
    ),
    "other GPUs: the old gang is stopped first": (
        [_target("g2", "a", gpus=(0, 1))],
        [_gang("g1", members=_members(a="training"))],
        ["stop g1"],
    ),
    "the new gang starts when the old one is gone": (
        [_target("g2", "a", gpus=(0, 1))],
        [_gang("g1", state="stopping", members=_members(a="leaving"))],
        [],
    ),
    "with memory for both, the new gang starts while jobs leave one by one": (
        [_target("g2", "a", gpus=(0, 1), beside=True)],
        [_gang("g1", members=_members(a="training", b="leaving"))],
        ["leave g1 a", "start g2"],
    ),
    "who has left goes on beside those who still leave": (
        [_target("g2", "a", "b", gpus=(0, 1))],
        [_gang("g1", members=_members(b="leaving")), _gang("g2", gpus=(0, 1))],
        ["prepare g2 a"],
    ),
    "the old gang ends behind the last one": (
        [_target("g2", "a", gpus=(0, 1))],
        [_gang("g1"), _gang("g2", gpus=(0, 1), members=_members(a="preparing"))],
        ["stop g1"],
    ),
    "no gang starts beside one that a job still joins": (
        [_target("g2", "a", gpus=(0, 1), beside=True)],
        [_gang("g1", members=_members(a="joining", b="leaving"))],
        [],
    ),
    "nor beside one that another target without room wants": (
        [_target("g2", "a", beside=True), _target("g3", "b", gpus=(1,))],
        [_gang("g1", gpus=(0, 1), members=_members(a="training"))],
        ["stop g1"],
    ),
    "jobs leave a gang whose GPUs no other wants": (
        [],
        [_gang("g1", members=_members(a="training", b="preparing"))],
        ["leave g1 a", "leave g1 b"],
    ),
    "an idle gang is kept warm": ([], [_gang("g1", idle_s=59.0)], []),
    "not for ever": ([], [_gang("g1", idle_s=60.0)], ["stop g1"]),
    "an idle gang makes room": (
        [_target("g2", "a", gpus=(0, 1))],
        [_gang("g1", idle_s=1.0)],
        ["stop g1"],
    ),
    "a starting gang that no target names any more is stopped for its GPUs": (
        [_target("g2", "a")],
        [_gang("g1", state="starting")],
        ["stop g1"],
    ),
    "suspects join one by one": (
        [_target("g1", "a", "b", "c", one_by_one=True)],
        [_gang("g1", members=_members(a="training", b="prepared", c="prepared"))],
        ["join g1 b"],
    ),
    "the next one when the first round is over": (
        [_target("g1", "a", "b", one_by_one=True)],
        [_gang("g1", members=_members(a="training", b="prepared"), in_first_round={"a"})],
        [],
    ),
}


def _words(action: Action) -> str:
    return " ".join(filter(None, [action.kind, action.gang, action.job]))


@pytest.mark.parametrize("case", CASES)
def test_next_actions(case: str) -> None:
    targets, gangs, expected = CASES[case]
    assert [_words(a) for a in plan_actions(targets, gangs, idle_keep_s=60.0)] == expected
