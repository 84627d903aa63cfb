"""Agrees between the ranks of a run on the round behind which all of them stop."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tlora_megatron.training.stopping.signals import StopSignals


class StopAgreement:
    """Asks every rank in every round whether it was signalled.

    Signals reach ranks at different times, but all must stop behind the same round. Each round
    begins one asynchronous all-reduce of one int over gloo and reads it at its end, when it is long
    done: no GPU and no rank waits for it. A world of one asks nobody.

    Args:
        signals: of this process; given on all ranks or on none.
    """

    def __init__(self, signals: StopSignals) -> None:
        self._signals = signals
        self._group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        self._number = torch.zeros(1, dtype=torch.int32, device="cpu")
        self._work: dist.Work | None = None

    def begin_round(self) -> None:
        """Gives the other ranks this one's signal; collective, but does not wait."""
        self._signals.hold()
        if self._group is not None:
            self._number.fill_(self._signals.received)
            self._work = dist.all_reduce(
                self._number, dist.ReduceOp.MAX, self._group, async_op=True
            )

    def end_round(self) -> int:
        """Number of the signal that some rank had got when the round began; 0 = none has.

        The same on all ranks. A world of one counts signals until now.
        """
        if self._group is None:
            return self._signals.received
        assert self._work is not None, "begin_round comes before end_round"
        self._work.wait()
        self._work = None
        return int(self._number)

    def wait_for_all(self) -> None:
        """Waits until every rank is here: an agent ends all ranks when the first one leaves."""
        if self._group is not None:
            dist.barrier(self._group)

    def close(self) -> None:
        """Gives the group up; a second call does nothing.

        Behind a failed round it stays: others may never answer, and its end waits for them.
        """
        if self._group is not None and self._work is None:
            dist.destroy_process_group(self._group)
            self._group = None
