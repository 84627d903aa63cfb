"""Writers of a store that are SIGKILLed at random, and what holds in every store.

    python -m tests.helpers.store_chaos PLACE KILLS SEED

The writers are forked from one process that has the imports done. The last line says in JSON what
was counted.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tlora_megatron.service.store import NewJob, Store, open_store


def new_job(key: str) -> NewJob:
    return NewJob(name=key, document={"key": key}, base="tiny", key=key)


@dataclass
class Child:
    """A forked process and the pipe on which it acknowledges what is committed."""

    process: int
    pipe: int
    heard: bytes = b""

    @classmethod
    def fork(cls, work: Callable[[Callable[[str], None]], None]) -> Child:
        """Runs `work(acknowledge)` in a child."""
        reader, writer = os.pipe()
        process = os.fork()
        if process:
            os.close(writer)
            return cls(process, reader)
        status = 1
        try:
            os.close(reader)
            work(lambda line: os.write(writer, f"{line}\n".encode()) and None)
            status = 0
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            sys.stderr.flush()
        finally:
            os._exit(status)

    def listen(self, for_s: float) -> None:
        """Reads what is said within a time."""
        until = time.monotonic() + for_s
        while (left := until - time.monotonic()) > 0:
            if select.select([self.pipe], [], [], left)[0]:
                said = os.read(self.pipe, 65536)
                if not said:
                    return
                self.heard += said

    def is_over(self) -> bool:
        """True if the process ended by itself."""
        ended, status = os.waitpid(self.process, os.WNOHANG)
        assert status == 0, "a child failed by itself"
        return bool(ended)

    def end(self) -> list[str]:
        if not self.is_over():
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
        while said := os.read(self.pipe, 65536):
            self.heard += said
        os.close(self.pipe)
        return self.heard.decode().split("\n")[:-1]


def writers(place: str, kills: int, rng: random.Random) -> dict[str, int]:
    """Four writers at a time submit until they are killed; nothing acknowledged is lost."""
    open_store(place).close()
    acknowledged: list[str] = []
    for begin in range(0, kills, 4):
        children = [
            Child.fork(lambda tell, number=number: _submit(place, f"w{number}", tell))
            for number in range(begin, min(begin + 4, kills))
        ]
        for child in children:
            while b"\n" not in child.heard:
                child.listen(0.01)
        for child in rng.sample(children, len(children)):
            child.listen(rng.uniform(0.0, 0.1))
            acknowledged += child.end()
    with open_store(place) as store:
        documents = store.jobs.documents([job.id for job in store.jobs.page(limit=10**6)])
        keys = sorted(document["key"] for document in documents.values())
        assert len(set(keys)) == len(keys), "a key made two jobs"
        assert not set(acknowledged) - set(keys), "an acknowledged submit is lost"
        told = Counter(event.job for event in _all_events(store) if event.kind == "submitted")
        assert told == dict.fromkeys(documents, 1), "jobs and events fell apart"
        again = store.jobs.submit([new_job(key) for key in acknowledged])
        assert not any(job.is_new for job in again)
    return {"acknowledged": len(acknowledged), "jobs": len(keys), "kills": kills}


def _submit(place: str, name: str, tell: Callable[[str], None]) -> None:
    with open_store(place) as store:
        for number in range(10**9):
            store.jobs.submit([new_job(f"{name}-{number}")])
            tell(f"{name}-{number}")


def _all_events(store: Store) -> list:
    return store.events.after(0, limit=10**6)


def check(store: Store) -> dict[str, str]:
    """Checks what holds at every moment; returns the states of all jobs."""
    states: dict[str, str] = {}
    holder: dict[str, str | None] = {}
    epochs: Counter[str] = Counter()
    for event in _all_events(store):
        if event.kind == "submitted":
            states[event.job], holder[event.job] = "validating", None
        elif event.kind == "state":
            assert states[event.job] == event.body["from"], "a change without its event"
            states[event.job] = event.body["to"]
        elif event.kind == "granted":
            epochs[event.job] += 1
            assert holder[event.job] is None, f"{event.job} has two leases"
            assert event.body["lease"] == epochs[event.job]
            holder[event.job] = event.gang
        elif event.kind == "released":
            assert holder[event.job] == event.gang
            holder[event.job] = None
    for job in store.jobs.page(limit=10**6):
        assert states[job.id] == job.state, "a state without its event"
        assert holder[job.id] == job.gang
        assert job.state.is_live == (job.lease is not None)
    return states


if __name__ == "__main__":
    place, kills, seed = sys.argv[1:]
    print(json.dumps(writers(place, int(kills), random.Random(int(seed)))))
