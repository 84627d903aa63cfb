"""Signals that ask a run to stop: SIGTERM, SIGINT and SIGUSR1. Imports no torch."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""What schedulers, terminals and SLURM's `--signal` send."""
_SHOW_CURSOR = b"\x1b[?25h"


def exit_code(number: int) -> int:
    """The exit code of a process that a signal has stopped, as shells count it."""
    return 128 + number


def is_stop_code(code: int) -> bool:
    """True for the exit code of a process that one of `STOP_SIGNALS` has stopped."""
    return code - 128 in STOP_SIGNALS


class SignalCounter:
    """Tells the first signal from a second one; the same one at once again is no second one.

    SLURM and launchers may both deliver a signal to a process.
    """

    SAME_S = 1.0

    def __init__(self) -> None:
        self.first = 0
        """Number of the first signal; 0 = none yet."""
        self._last = (0, 0.0)

    def count(self, number: int) -> bool:
        """Takes a signal; returns True if it is a second one."""
        (last, at_s), now_s = self._last, time.monotonic()
        self._last = number, now_s
        if not self.first:
            self.first = number
            return False
        return number != last or now_s - at_s > self.SAME_S


class StopSignals:
    """What a process of a run does with `STOP_SIGNALS`.

    From `install` on, a signal ends the process at once with exit code 128 + n. From `hold` on, the
    first one is kept in `received` for the loop, which ends behind the round under way, and a
    second one ends the process at once.

    A thread takes the signals, so that a process ends that waits in C for others. Signals that the
    process ignores (`nohup`, a shell's background) stay ignored.

    Args:
        speaks: says on stderr what a signal does; on one process of the run.
    """

    def __init__(self, *, speaks: bool) -> None:
        self._speaks = speaks
        self._counter = SignalCounter()
        self._holds = False

    @property
    def received(self) -> int:
        """Number of the signal that asked to stop; 0 = none."""
        return self._counter.first

    @contextmanager
    def install(self) -> Iterator[None]:
        """Takes the signals until the end of the block; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with signal_pipe(STOP_SIGNALS) as reading:
            listener = threading.Thread(target=self._listen, args=(reading,), daemon=True)
            listener.start()
            yield
        # The pipe's writing end is closed: the listener reads the end of the file.
        listener.join()

    def hold(self) -> None:
        """Has the first signal wait for the end of a round from now on."""
        self._holds = True

    def _listen(self, reading: int) -> None:
        while numbers := os.read(reading, 16):
            for number in numbers:
                self._take(number)
        os.close(reading)

    def _take(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._counter.count(number):
            self._say(f"ended by a second signal, {name}: steps behind the last save are lost")
            os._exit(exit_code(number))
        if not self._holds:
            self._say(f"stopped by {name} before the first round: there is nothing to save")
            os._exit(exit_code(number))
        self._say(
            f"{name}: the round under way ends and all jobs are saved; a second signal ends at once"
        )

    def _say(self, sentence: str) -> None:
        if self._speaks:
            # Live bars hide the cursor, and a process that ends here does not show it again.
            cursor = _SHOW_CURSOR if os.isatty(2) else b""
            os.write(2, cursor + f"{sentence}\n".encode())


@contextmanager
def signal_pipe(numbers: Sequence[signal.Signals]) -> Iterator[int]:
    """Yields a pipe's reading end that gets the number of each signal, as a byte.

    The C handler writes it, whatever the main thread does. Handlers are put back at the end, and
    the writing end is closed; the reading end is the caller's to close.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = {n: signal.getsignal(n) for n in numbers}
    taken = {n: handler for n, handler in before.items() if handler is not signal.SIG_IGN}
    earlier = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in taken:
        signal.signal(number, _nothing)
    try:
        yield reading
    finally:
        for number, handler in taken.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(earlier)
        os.close(writing)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Python calls a handler beside writing to the pipe."""
