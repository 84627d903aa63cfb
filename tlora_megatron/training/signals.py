"""Signals that ask a run to stop: SIGTERM, SIGINT and SIGUSR1. Imports no torch."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that schedulers, terminals and SLURM's `--signal` send."""
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
    """Takes `STOP_SIGNALS` for a process of a run: the first is noted, the second ends it.

    From `install` on, a signal ends the process at once with exit code 128 + n; from `hold` on, the
    first one waits in `received` for the end of the round under way. A thread takes the signals, so
    that a process ends that waits in C for others. Signals that are ignored (`nohup`, a shell's
    background) stay so, and handlers that a script has set stay.

    Args:
        speaks: says on stderr what a signal does; on one process of the run.
    """

    def __init__(self, *, speaks: bool) -> None:
        self.stopped_by = 0
        """Number of the signal by which the run has stopped, whichever process got it; 0 = none."""
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
        with signal_pipe(STOP_SIGNALS) as pipe:
            listener = threading.Thread(target=self._listen, args=(pipe,), daemon=True)
            listener.start()
            yield
        # The pipe's writing end is closed: the listener reads the end of the file.
        listener.join()

    def hold(self) -> None:
        """Has the first signal wait for the end of a round from now on."""
        self._holds = True

    def _listen(self, pipe: SignalPipe) -> None:
        while (numbers := pipe.read()) is not None:
            for number in numbers:
                self._take(number)
        os.close(pipe.reading)

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


def stop_sentence(number: int, rounds: int, jobs: Sequence[str], unsaved: Sequence[str]) -> str:
    """Says how a run has stopped.

    Args:
        rounds: those that this start of the run has done.
        unsaved: jobs that could not be written, ones that have ended included.
    """
    unsaved = [name for name in unsaved if name in jobs]
    saved = f"all {len(jobs)} jobs are saved" if len(jobs) > 1 else f"job {jobs[0]} is saved"
    if unsaved:
        names = ", ".join(unsaved)
        saved = f"{len(jobs) - len(unsaved)} of {len(jobs)} jobs are saved, but not {names}"
    name = signal.Signals(number).name
    return f"stopped by {name} after round {rounds}; {saved}; the same command continues"


class SignalPipe(NamedTuple):
    """The reading end of a pipe that gets the number of each signal, as a byte."""

    reading: int
    taken: frozenset[int]

    def read(self) -> list[int] | None:
        """Waits for signals and returns those that were taken; None at the end."""
        numbers = os.read(self.reading, 64)
        # Signals that somebody else handles in Python are written, too.
        return [number for number in numbers if number in self.taken] if numbers else None


@contextmanager
def signal_pipe(numbers: Sequence[signal.Signals]) -> Iterator[SignalPipe]:
    """Yields a pipe that gets signals at once, whatever the main thread does.

    Only signals with their default handler are taken. At the end they get it back, and the writing
    end is closed; the reading end is the caller's to close.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    taken = {n: handler for n in numbers if (handler := signal.getsignal(n)) in defaults}
    earlier = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in taken:
        signal.signal(number, lambda *_: None)  # called beside writing to the pipe
    try:
        yield SignalPipe(reading, frozenset(map(int, taken)))
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(earlier)
        os.close(writing)
