"""The order of what is written: of one job as it comes, of several at once."""

from __future__ import annotations

import threading

from tests.helpers.launch import HANG_S
from tlora_megatron.training.saving.writer import Writer


def test_two_jobs_are_written_at_once_and_each_in_order() -> None:
    writer, both, done = Writer(), threading.Barrier(2), list[str]()

    def first(job: str) -> None:
        both.wait(HANG_S)  # breaks, and ends the writer, if the other one does not run meanwhile
        done.append(f"{job}1")

    for job in "ab":
        writer.submit(lambda job=job: first(job), job)  # type: ignore[misc]
        writer.submit(lambda job=job: done.append(f"{job}2"), job)  # type: ignore[misc]
    writer.close()
    assert [name for name in done if name[0] == "a"] == ["a1", "a2"]
    assert [name for name in done if name[0] == "b"] == ["b1", "b2"]


def test_task_of_no_job_has_all_before_it_and_none_beside_it() -> None:
    writer, gate, done = Writer(), threading.Event(), list[str]()

    def held() -> None:
        assert gate.wait(HANG_S)
        done.append("a")

    writer.submit(held, "a")
    writer.submit(lambda: done.append("all"))
    writer.submit(lambda: done.append("b"), "b")
    gate.set()
    writer.close()
    assert done == ["a", "all", "b"]
