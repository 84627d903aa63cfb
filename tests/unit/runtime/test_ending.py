"""A process that leaves early has done all that one that exits does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.helpers.launch import HANG_S

SCRIPT = """
import atexit, sys, threading, time
from tlora_megatron.runtime.ranks import leave

class Torn:
    def __del__(self):
        print("torn down")

torn = Torn()
atexit.register(print, "handler")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
print("end")
leave(3)
"""


@pytest.mark.parametrize(("variable", "last"), [("", []), ("LD_PRELOAD", ["torn down"])])
def test_threads_handlers_and_output_are_waited_for(variable: str, last: list[str]) -> None:
    inherited = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=inherited | ({variable: ""} if variable else {}),
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.split("\n")[:-1] == ["end", "thread", "handler", *last]
