"""How ranks agree on what they carry out while a round computes.

Only JSON travels: as bytes over gloo, which costs neither the GPU nor the round.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

_HEAD = 8
_ROOM = 4096
"""Bytes that every round sends, the length of the message first; longer ones are sent behind."""
_TEXT = 2048


class Readiness:
    """Brings together over gloo how far each rank is with the jobs that all of them prepare.

    Collective: every rank makes it with the same names in the same order.

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
