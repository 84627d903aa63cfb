"""How ranks agree on what they carry out while a round computes.

Only JSON travels: as bytes over gloo, which costs neither the GPU nor the round.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.slab import AdapterSlab, Copier
from tlora_megatron.model.backbone import Backbone
from tlora_megatron.training.formats.hf_checkpoint import all_finite
from tlora_megatron.training.job_saves import SavePolicy, StagedJob
from tlora_megatron.training.job_state import JobState
from tlora_megatron.training.metrics import JobMetrics
from tlora_megatron.training.resident.saved_states import LockedRing
from tlora_megatron.training.run.preparation import PreparedJob, start_job

_HEAD = 8
_ROOM = 4096
"""Bytes that every round sends, the length of the message first; longer ones are sent behind."""
_TEXT = 2048


class Readiness:
    """Brings together over gloo how far each rank is with the jobs that all of them prepare.

    Args:
        group: of gloo; None = a world of one.
        states: for each name None while it is prepared, else a digest of what came out; a negative
            one = it cannot.
    """

    def __init__(self, group: dist.ProcessGroup | None, states: Mapping[str, int | None]) -> None:
        self._names = tuple(states)
        rows = [(_code(state), state or 0, -(state or 0)) for state in states.values()]
        self._table = torch.tensor(rows, dtype=torch.int64, device="cpu").view(len(rows), 3)
        self._work = None
        if group is not None and rows:
            self._work = dist.all_reduce(self._table, dist.ReduceOp.MIN, group, async_op=True)

    def read(self) -> dict[str, bool]:
        """Returns the names of which all ranks are ready (True) or some rank cannot (False).

        False, too, where ranks have read different things.
        """
        if self._work is not None:
            self._work.wait()
        found = {}
        for name, (code, least, most) in zip(self._names, self._table.tolist(), strict=True):
            if code != 0:
                found[name] = code > 0 and least == -most
        return found


def _code(state: int | None) -> int:
    return 0 if state is None else 1 if state >= 0 else -1


class Agreement:
    """Brings the first rank's word to all ranks: begun with a round, read behind it.

    Args:
        group: of gloo, used by nothing else; None = a world of one.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._is_first = group is None or dist.get_rank() == 0
        self._text = b""
        self._head = torch.zeros(_ROOM, dtype=torch.uint8, device="cpu")
        self._works: list[dist.Work] = []

    def begin(self, word: Any) -> None:
        """Sends the first rank's word; the others' is not looked at. Does not wait."""
        if self._is_first:
            self._text = json.dumps(word, separators=(",", ":")).encode()
        if self._group is None:
            return
        if self._is_first:
            text = len(self._text).to_bytes(_HEAD, "big") + self._text
            fitting = torch.frombuffer(bytearray(text[:_ROOM]), dtype=torch.uint8)
            self._head[: len(fitting)] = fitting
        self._works = [dist.broadcast(self._head, 0, self._group, async_op=True)]
        if self._is_first and (rest := self._text[_ROOM - _HEAD :]):
            self._rest = torch.frombuffer(bytearray(rest), dtype=torch.uint8)
            self._works.append(dist.broadcast(self._rest, 0, self._group, async_op=True))

    def read(self) -> Any:
        """Returns the word with which the first rank began; waits where that has not come yet."""
        for work in self._works:
            work.wait()
        if self._group is not None and not self._is_first:
            head = self._head.numpy().tobytes()
            length = int.from_bytes(head[:_HEAD], "big")
            self._text = head[_HEAD : _HEAD + length]
            if (missing := length - len(self._text)) > 0:
                rest = torch.zeros(missing, dtype=torch.uint8, device="cpu")
                dist.broadcast(rest, 0, self._group)
                self._text += rest.numpy().tobytes()
        self._works = []
        return json.loads(self._text)


def gather_texts(group: dist.ProcessGroup | None, text: str) -> list[str]:
    """Returns the text of every rank, of long ones the begin; collective, and waits."""
    if group is None:
        return [text]
    own = torch.zeros(_TEXT, dtype=torch.uint8, device="cpu")
    data = text.encode()[:_TEXT].decode(errors="ignore").encode()
    own[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
    found = [torch.zeros_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group)
    return [part.numpy().tobytes().rstrip(b"\0").decode() for part in found]


Order = Mapping[str, Any]
"""A request to prepare a job: `job` (its name here), `document`, and when to save it:
`checkpoint_every_steps`, `checkpoint_every_s` (0 or absent = not by them)."""
ReadOrder = Callable[[Order], PreparedJob]
"""Reads all that a job starts from and checks it; runs on a thread, on every rank."""
_THREADS, _THREADS_BESIDE = 8, 4
"""That read a job's state; fewer while others train, whose thread has to get its turn in Python."""


class Failed(NamedTuple):
    """The reason for which a job cannot join."""

    error: str


@dataclass(slots=True)
class _Ordered:
    """A job on its way; the thread that prepares it fills in what it found."""

    order: Order
    found: StagedJob | Failed | None = None
    is_dropped: bool = False


class Stager:
    """Prepares one job after another on a thread.

    Args:
        check: refuses what this super-model has no place for; raises a `ValueError`.
    """

    def __init__(
        self,
        bank: AdapterBank,
        spec: Backbone,
        read_order: ReadOrder,
        check: Callable[[PreparedJob], None],
        open_metrics: Callable[[JobState], JobMetrics | None],
    ) -> None:
        self._open_metrics = open_metrics
        self._bank = bank
        self._spec = spec
        self._read_order = read_order
        self._check = check
        self._ordered: dict[str, _Ordered] = {}
        self._orders: queue.SimpleQueue[_Ordered | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._turn = threading.Lock()
        """Between a job that is found and its being dropped: one of the two sides gives it up."""
        self._ring: LockedRing | None = None

    def order(self, name: str, order: Order) -> None:
        """Begins to prepare a job, behind those that were ordered before."""
        self._ordered[name] = _Ordered(order)
        self._orders.put(self._ordered[name])
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="tlora-stage", daemon=True)
            self._thread.start()

    def found(self, name: str) -> StagedJob | Failed | None:
        """A job that was ordered, ready or refused; None while it is prepared."""
        return self._ordered[name].found

    def state(self, name: str) -> int | None:
        """How far an ordered job is prepared, in the form that `Readiness` takes."""
        found = self.found(name)
        if found is None:
            return None
        return -1 if isinstance(found, Failed) else int(found.digest[:15], 16)

    def __contains__(self, name: str) -> bool:
        return name in self._ordered

    def take(self, name: str) -> StagedJob:
        """Hands a job over that is ready."""
        found = self._ordered.pop(name).found
        assert isinstance(found, StagedJob), f"job {name} is not ready"
        self._wait_for_copy(found)
        return found

    def drop(self, name: str) -> None:
        """Forgets a job that was ordered."""
        ordered = self._ordered.pop(name)
        with self._turn:
            ordered.is_dropped, found = True, ordered.found
        if isinstance(found, StagedJob):
            self._give_up(found)

    def _give_up(self, staged: StagedJob) -> None:
        self._wait_for_copy(staged)
        if staged.metrics is not None:
            staged.metrics.close()

    def _wait_for_copy(self, staged: StagedJob) -> None:
        """Lets the device, not the host, wait; memory given back must not be written any more."""
        if staged.copied is not None:
            torch.cuda.current_stream(self._bank.device).wait_event(staged.copied)

    def close(self) -> None:
        """Ends the thread behind the job under way, without waiting for it."""
        self._orders.put(None)

    def _work(self) -> None:
        if self._bank.device.type == "cuda":
            torch.cuda.set_device(self._bank.device)
        while self._prepare_next():
            pass

    def _prepare_next(self) -> bool:
        """Prepares one job; a function, so that the thread keeps no job while it waits."""
        ordered = self._orders.get()
        if ordered is None:
            return False
        if not ordered.is_dropped:
            found = self._prepare(ordered.order)
            with self._turn:
                ordered.found, is_dropped = found, ordered.is_dropped
            if is_dropped and isinstance(found, StagedJob):
                self._give_up(found)
        return True

    def _prepare(self, order: Order) -> StagedJob | Failed:
        try:
            prepared = self._read_order(order)
            self._check(prepared)
            return self._stage(prepared, order)
        except torch.OutOfMemoryError:
            return Failed(f"job {order['job']!r} does not fit into the memory that its ranks have")
        except Exception as error:  # whatever is wrong with one job, the others train on
            is_told = isinstance(error, ValueError | OSError)
            return Failed(str(error) if is_told else f"{type(error).__name__}: {error}")

    def _stage(self, prepared: PreparedJob, order: Order) -> StagedJob:
        slab = self._bank.new_slab(prepared.spec.lora)
        try:
            state, copied = self._fill(slab, prepared, order)
            state.hold_at = tuple(order.get("hold_at", ()))
            return StagedJob(
                state=state,
                digest=prepared.digest,
                copied=copied,
                metrics=self._open_metrics(state),
                saving=SavePolicy(
                    every_steps=int(order.get("checkpoint_every_steps", 0)),
                    every_s=float(order.get("checkpoint_every_s", 0.0)),
                    soon=bool(order.get("saves_soon", False)),
                ),
            )
        except BaseException:
            if self._ring is not None:  # others get the slab's memory: nothing may write there now
                self._ring.stream.synchronize()
            raise

    def _fill(
        self, slab: AdapterSlab, prepared: PreparedJob, order: Order
    ) -> tuple[JobState, torch.cuda.Event | None]:
        """Gives a slab its job's values; on a GPU it has them behind the event."""
        bank = self._bank
        if bank.device.type != "cuda" or bank.placement.on_cpu:
            state = start_job(prepared, self._spec, slab)
            self._check_finite(prepared, slab, order)
            return state, None
        self._ring = self._ring or LockedRing.on(bank.device)
        stream = self._ring.stream
        stream.wait_stream(torch.cuda.current_stream(bank.device))  # the slab's zeros
        threads = _THREADS_BESIDE if bank.adapters else _THREADS
        copier = Copier(self._ring.copy, threads, self._ring.numel)
        with torch.cuda.stream(stream):
            state = start_job(prepared, self._spec, slab, copier)
            self._check_finite(prepared, slab, order)
        copied = torch.cuda.Event()
        copied.record(stream)
        return state, copied

    def _check_finite(self, prepared: PreparedJob, slab: AdapterSlab, order: Order) -> None:
        """Looks at a checkpoint's values where they are now, which on a GPU costs nothing."""
        checkpoint = prepared.checkpoint
        if checkpoint is None or all(all_finite(v) for v in slab.buffers().values() if len(v)):
            return
        job = replace(prepared.spec, name=order.get("name", prepared.spec.name))
        checkpoint.check_fits(job, prepared.data, self._spec)  # says which tensor
        raise ValueError(f"checkpoint {checkpoint.path} of job {job.name!r} must be finite")
