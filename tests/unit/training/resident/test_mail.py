"""Commands of a resident loop in a world of one."""

from __future__ import annotations

import threading

from tests.helpers.launch import HANG_S
from tlora_megatron.training.resident.mail import (
    Agreement,
    QueueMailbox,
    Readiness,
    gather_texts,
)


def test_mail_is_taken_once_and_in_order() -> None:
    mailbox = QueueMailbox()
    for number in range(3):
        mailbox.post({"kind": "renew", "seq": number})
    assert [mail["seq"] for mail in mailbox.take()] == [0, 1, 2]
    assert list(mailbox.take()) == []


def test_waiting_ends_when_something_comes() -> None:
    mailbox = QueueMailbox()
    threading.Timer(0.01, mailbox.post, [{"kind": "renew"}]).start()
    mailbox.wait(HANG_S)
    assert len(mailbox.take()) == 1


def test_one_process_agrees_with_itself() -> None:
    agreement = Agreement(None)
    for word in ({"mail": []}, {"mail": [{"kind": "note", "text": "é" * 9000}]}):
        agreement.begin(word)
        assert agreement.read() == word
    assert gather_texts(None, "why") == ["why"]


def test_jobs_that_are_prepared_or_refused_are_known_others_are_not() -> None:
    assert Readiness(None, {"a": 5, "b": None, "c": -1}).read() == {"a": True, "c": False}
    assert Readiness(None, {}).read() == {}
