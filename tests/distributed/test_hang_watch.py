"""A rank that is stopped ends the whole run, which names it; on real processes."""

from __future__ import annotations

import socket
import textwrap
from pathlib import Path

import pytest

from tests.helpers.standing_world import world

WORKER = """
    import os, signal, time
    import torch
    import torch.distributed as dist
    from tlora_megatron.training import run_watch

    run_watch._FIRST_ROUNDS = 0
    dist.init_process_group("gloo")
    watch = run_watch.HangWatch.of_world(3.0)
    with watch.watching():
        dist.barrier()
        if dist.get_rank() == 1:
            if os.fork() == 0:  # the test need not wait until its world loses patience
                time.sleep(8)
                os.kill(os.getppid(), signal.SIGKILL)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSTOP)
        watch.tick("round 1")
        dist.all_reduce(torch.ones(1))
"""


def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER))
    with pytest.raises(AssertionError) as caught:
        world(script, 2)
    said = str(caught.value)
    assert "the run has stood still for 3 s (run.hang_timeout_s), in round 1" in said
    assert f"rank 1 on host {socket.gethostname()} does not answer" in said
