"""A pre-forked worker that notes every few milliseconds where each of its threads is.

    python -m scripts.bench.harness.stacks FOLDER [--forks]

It is what `tlora_megatron.service.worker.preforked` is. Each process writes `FOLDER/PID.txt`: a
line for each time that a thread stayed in one place, with its begin in Unix time, how long, the
thread, and its innermost calls. So one run on borrowed GPUs shows what a start or an end waits for.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType

from tlora_megatron.service.worker import preforked

_EVERY_S = 0.01
_SHORTEST_S = 0.03
_CALLS = 7


def main(argv: list[str]) -> int:
    """Serves as a worker; returns its exit code."""
    folder = Path(argv[0])
    if "--forks" in argv:
        os.register_at_fork(after_in_child=lambda: _start(folder))
    else:
        _start(folder)
    return preforked.main(argv[1:])


def _start(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    threading.Thread(target=_watch, args=(folder,), name="stacks", daemon=True).start()


def _watch(folder: Path) -> None:
    places: dict[int, tuple[float, str]] = {}
    with (folder / f"{os.getpid()}.txt").open("a", buffering=1) as file:
        while True:
            now_s = time.time()
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            for ident, frame in sys._current_frames().items():
                begin_s, before = places.setdefault(ident, (now_s, ""))
                place = _place(frame)
                if place == before:
                    continue
                if before and now_s - begin_s >= _SHORTEST_S:
                    took_ms = 1e3 * (now_s - begin_s)
                    file.write(f"{begin_s:.2f} {took_ms:6.0f} ms {names.get(ident)}: {before}\n")
                places[ident] = (now_s, place)
            time.sleep(_EVERY_S)


def _place(frame: FrameType) -> str:
    calls = traceback.StackSummary.extract(
        traceback.walk_stack(frame), limit=_CALLS, lookup_lines=False
    )
    return " < ".join(f"{Path(call.filename).stem}.{call.name}:{call.lineno}" for call in calls)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
