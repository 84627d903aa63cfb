"""Wires between processes: folders of requests, pipes of lines."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from tests.helpers.launch import HANG_S
from tlora_megatron.channel import LinePipe, RequestFolder


@pytest.fixture
def ends() -> tuple[LinePipe, LinePipe]:
    """Both ends of a pipe."""
    (there, back), (here, forth) = os.pipe(), os.pipe()
    return LinePipe(there, forth), LinePipe(here, back)


def test_lines_come_whole_and_in_order(ends: tuple[LinePipe, LinePipe]) -> None:
    parent, child = ends
    assert parent.receive() == []
    for number in range(3):
        assert child.send({"number": number})
    parent.wait(HANG_S)
    assert parent.receive() == [{"number": 0}, {"number": 1}, {"number": 2}]
    assert not parent.is_over


def test_message_that_the_pipe_cannot_hold_is_handed_on_by_wait(
    ends: tuple[LinePipe, LinePipe],
) -> None:
    parent, child = ends
    large = {"text": "x" * (1 << 20)}
    assert parent.send(large), "it does not wait for a reader"
    found: list[object] = []

    def read() -> None:
        while not found:
            child.wait(HANG_S)
            found.extend(child.receive())
        child.send({"thanks": True})

    reader = threading.Thread(target=read)
    reader.start()
    parent.wait(HANG_S)
    reader.join(HANG_S)
    assert found == [large]
    assert parent.receive() == [{"thanks": True}]


def test_what_was_sent_before_the_end_is_read(ends: tuple[LinePipe, LinePipe]) -> None:
    parent, child = ends
    parent.send({"last": "order"})
    parent.close()
    assert not child.send({"ready": True})
    assert not child.is_over
    assert child.receive() == [{"last": "order"}]
    assert child.is_over


def test_end_is_seen_behind_a_torn_line(ends: tuple[LinePipe, LinePipe]) -> None:
    parent, child = ends
    os.write(child._writing or 0, b'{"torn')
    child.hang_up()
    parent.wait(HANG_S)
    assert parent.receive() == []
    assert parent.is_over
    assert not child.send({"too": "late"})


@pytest.mark.parametrize("durable", [True, False])
def test_request_is_asked_once_and_answered(tmp_path: Path, *, durable: bool) -> None:
    folder = RequestFolder(tmp_path / "in", tmp_path / "out", suffix=".bin", durable=durable)
    assert folder.asked() == []
    assert folder.ask("2", b"two")
    assert folder.ask("1", b"one")
    assert not folder.ask("1", b"other")
    (tmp_path / "in" / "notes.json").write_text("{}")
    assert folder.asked() == ["1", "2"]
    assert folder.request("1").read_bytes() == b"one"
    assert stat.S_IMODE(folder.request("1").stat().st_mode) == 0o600
    folder.answer("1", b"yes")
    assert folder.answered() == ["1"]
    assert folder.result("1").read_bytes() == b"yes"
    assert folder.held_bytes() == len(b"twooneyes{}")
    folder.drop_request("1")
    folder.drop_answer("1")
    assert (folder.asked(), folder.answered()) == (["2"], [])


def test_requests_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    folder = RequestFolder(tmp_path / "in", tmp_path / "out")
    assert folder.ask("1", b"one")
    assert not folder.ask("1", b"other")
    assert [path.read_bytes() for path in (tmp_path / "in").iterdir()] == [b"one"]
