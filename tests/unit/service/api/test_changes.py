"""Changes that share a transaction: each is refused by itself, and a full disk refuses all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launch import HANG_S
from tests.helpers.stored_jobs import put_job
from tlora_megatron.service.api.service import Changes
from tlora_megatron.service.store import Store, StoreFull, open_store


def _submit(store: Store, name: str) -> Callable[[], object]:
    return lambda: put_job(store, name)


class _Slow:
    """A change that takes until it is let go."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self) -> bool:
        self.begun.set()
        return self.go.wait(HANG_S)


async def _together(changes: Changes, calls: list[Callable[[], object]]) -> list[Any]:
    """Makes changes that all wait while the first one takes its time."""
    slow = _Slow()
    first = asyncio.ensure_future(changes.make(slow))
    await asyncio.to_thread(slow.begun.wait, HANG_S)
    rest = [asyncio.ensure_future(changes.make(call)) for call in calls]
    await asyncio.sleep(0)
    slow.go.set()
    assert await first
    return await asyncio.gather(*rest, return_exceptions=True)


def test_a_refusal_takes_back_its_own_part_alone(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        changes = Changes(store)

        def half() -> None:
            _submit(store, "half")()
            raise ValueError("after all")

        calls = [_submit(store, "a"), half, _submit(store, "b")]
        found = asyncio.run(_together(changes, calls))
        assert [type(value) for value in found] == [str, ValueError, str]
        assert sorted(job.name for job in store.jobs.page()) == ["a", "b"]
        assert [event.kind for event in store.events.after(0)] == ["submitted"] * 2
        changes.close()
        assert asyncio.run(changes.make(lambda: 1)) == 1, "it begins anew"
        changes.close()


def test_a_full_disk_is_told_to_all_whose_changes_it_took(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        changes = Changes(store)

        def full() -> None:
            raise StoreFull("the disk must have room")

        found = asyncio.run(_together(changes, [_submit(store, "a"), full, _submit(store, "b")]))
        assert [type(value) for value in found] == [StoreFull] * 3
        assert store.jobs.page() == []
        changes.close()


def test_who_has_gone_before_its_turn_changes_nothing(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        changes = Changes(store)

        async def give_up() -> None:
            slow = _Slow()
            first = asyncio.ensure_future(changes.make(slow))
            await asyncio.to_thread(slow.begun.wait, HANG_S)
            second = asyncio.ensure_future(changes.make(_submit(store, "a")))
            await asyncio.sleep(0)
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
            slow.go.set()
            await first

        asyncio.run(give_up())
        changes.close()
        assert store.jobs.page() == []


@pytest.mark.parametrize("count", [200])
def test_all_that_wait_are_made_in_few_transactions(tmp_path: Path, count: int) -> None:
    with open_store(tmp_path / "s") as store:
        changes, begun = Changes(store), []
        transaction = store.transaction

        def counted() -> Any:
            begun.append(1)
            return transaction()

        store.transaction = counted  # type: ignore[method-assign]
        calls = [_submit(store, f"n{index}") for index in range(count)]
        asyncio.run(_together(changes, calls))
        changes.close()
        assert len(store.jobs.page(limit=1000)) == count
        assert len(begun) < 10
