"""What several ranks do together, without a whole run: collectives, saves, choices, reading, a
rank that stops.
"""

from __future__ import annotations

import json
import re
import socket
import textwrap
from pathlib import Path

import pytest

from tests.helpers.standing_world import world
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, save_tiny_tokenizer

COLLECTIVES = Path(__file__).parents[1] / "helpers" / "collectives_case.py"


@pytest.mark.parametrize("processes", [2, 3])
def test_gloo(processes: int) -> None:
    assert "gloo: all equal" in world(COLLECTIVES, processes, "cpu", "auto")


def test_two_groups_beside_each_other() -> None:
    assert "gloo: all equal" in world(COLLECTIVES, 4, "cpu", "auto", "halves")


SAVER = Path(__file__).parents[1] / "helpers" / "saver_case.py"


def test_parts_of_two_processes_are_gathered(tmp_path: Path) -> None:
    log = world(SAVER, 2, tmp_path)
    assert "saved tensor parallel" in log
    assert "saved slices" in log


NANO_ROUNDS = Path(__file__).with_name("nano_rounds_worker.py")


def test_no_process_tries_what_another_has_no_room_for(tmp_path: Path) -> None:
    output = world(NANO_ROUNDS, 2, tmp_path)
    ran = re.findall(r"process \d ran (\[.*\])", output)
    assert len(ran) == 2
    assert ran[0] == ran[1], "their longest times decide"
    assert set(map(int, re.findall(r"\d+", ran[0]))) == {1, 2}
    assert "more than 2 are not tried: the fullest GPU has 1.9 GiB left beside its peak" in output


READER = Path(__file__).with_name("reading_worker.py")
GOOD = [{"prompt": f"{n} plus {n} is ", "completion": str(2 * n)} for n in range(5)]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    make_tiny_model(tmp_path / "base", "llama", vocab_size=VOCAB_SIZE)
    save_tiny_tokenizer(tmp_path / "base")
    for name, rows in {"good": GOOD, "other": GOOD[1:4], "bad": [*GOOD, {"prompt": 3}]}.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    jobs = [
        {"name": "one", "data": {"train": "good.jsonl", "eval": "other.jsonl"}},
        {"name": "two", "data": {"train": "bad.jsonl"}},
        {"name": "three", "data": {"train": "other.jsonl"}},
    ]
    common = {"max_steps": 2, "batch_size": 2, "lora": {"rank": 2}, "max_seq_len": 64}
    document = {
        "base_model": {"path": "base", "dtype": "float32"},
        "run": {"output_dir": "out"},
        "jobs": [common | job for job in jobs],
    }
    path = tmp_path / "run.json"
    path.write_text(json.dumps(document))
    return path


def said(config: Path, *overrides: str) -> str:
    lines = re.findall(r"^<(.*)>$", world(READER, 2, config, *overrides), re.MULTILINE)
    assert len(lines) == 2
    assert lines[0] == lines[1]
    return str(lines[0])


def test_the_others_get_the_same_jobs(config: Path) -> None:
    result = said(config, "run.on_job_error=skip")
    assert result.startswith("['one', 'three'] [JobError(name='two', message=")
    assert "bad.jsonl line 6" in result


def test_the_others_stop_with_the_same_words(config: Path) -> None:
    assert "bad.jsonl line 6" in said(config)


def test_a_tokenizer_that_cannot_be_read_stops_all(config: Path) -> None:
    (config.parent / "base" / "tokenizer.json").write_text("{")
    assert said(config).startswith("refused: base_model must hold a readable tokenizer")


STOPPED_RANK = """
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
    script.write_text(textwrap.dedent(STOPPED_RANK))
    with pytest.raises(AssertionError) as caught:
        world(script, 2)
    said = str(caught.value)
    assert "the run has stood still for 3 s (run.hang_timeout_s), in round 1" in said
    assert f"rank 1 on host {socket.gethostname()} does not answer" in said
