"""The ranks of one machine: signals are passed on, and the rank that failed is named."""

from __future__ import annotations

import signal
import socket

import pytest

from tests.helpers.launch import HANG_S
from tlora_megatron import timeline
from tlora_megatron.runtime import ranks

FOREVER = "while :; do sleep 0.05; done"


@pytest.fixture(autouse=True)
def _flag(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAG", f"{tmp_path}/flag")


def run(script: str, nproc: int = 2, *, stop_timeout_s: float = HANG_S) -> int:
    """The exit code of ranks that are shell scripts; their agent is this process."""
    return ranks.run_ranks(["bash", "-c", script], nproc, stop_timeout_s=stop_timeout_s)


def signal_agent(number: signal.Signals) -> str:
    """A script in which rank 0 of two sends a signal to the agent once rank 1 is as far."""
    wait = "until [ -e $FLAG.1 ]; do sleep 0.02; done"
    return f"touch $FLAG.$RANK; [ $RANK = 0 ] && {{ {wait}; kill -{number.value} $PPID; }}"


def test_the_first_failure_s_exit_code_comes_back_and_the_others_are_ended() -> None:
    assert run("exit 0") == 0
    assert run(f"[ $RANK = 1 ] && exit 7; {FOREVER}", 3) == 7


def test_ranks_that_do_not_listen_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_GRACE_S", 0.1)
    assert run(f"trap '' TERM; [ $RANK = 1 ] && exit 7; {FOREVER}") == 7


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_ended_by_a_signal_is_named(victim: int, caplog: pytest.LogCaptureFixture) -> None:
    assert run(f"[ $RANK = {victim} ] && kill -9 $$; {FOREVER}") == 137
    (line,) = caplog.messages
    host = socket.gethostname()
    assert f"rank {victim} on host {host} was ended by signal 9 (SIGKILL; " in line


def test_of_two_that_ended_at_once_the_silent_one_is_to_blame(
    caplog: pytest.LogCaptureFixture,
) -> None:
    group = ranks._Ranks(2, HANG_S)
    dead = [_Ended(1), _Ended(-signal.SIGSEGV)]
    group._living = dict(enumerate(dead))  # type: ignore[arg-type]
    group._collect()
    assert group._failure == 128 + signal.SIGSEGV
    assert "rank 1 on host" in caplog.text


class _Ended:
    """A process that has ended."""

    def __init__(self, code: int) -> None:
        self._code = code

    def poll(self) -> int:
        return self._code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_reaches_every_rank(number: signal.Signals) -> None:
    script = f"trap 'exit {128 + number}' {number.value}; {signal_agent(number)}; {FOREVER}"
    before = signal.getsignal(number)
    assert run(script) == 128 + number
    assert signal.getsignal(number) is before


def test_a_rank_that_does_not_end_behind_a_signal_is_killed_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stops = "[ $RANK = 0 ] && exit 143"
    script = f"trap '' TERM; {signal_agent(signal.SIGTERM)}; {stops}; {FOREVER}"
    assert run(script, stop_timeout_s=0.2) == 143
    assert "rank 1 on host" in caplog.text
    assert "did not end within 0.2 s of SIGTERM (run.stop_timeout_s)" in caplog.text


def test_a_signal_to_one_rank_stops_all(caplog: pytest.LogCaptureFixture) -> None:
    assert run(f"[ $RANK = 1 ] && exit 138; trap 'exit 138' USR1; {FOREVER}") == 138
    assert not caplog.messages


def test_a_run_that_completes_in_spite_of_a_signal_has_succeeded() -> None:
    assert run(f"trap '' TERM; {signal_agent(signal.SIGTERM)}; sleep 0.1") == 0


def test_ranks_find_each_other_as_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    found = ranks.rank_environment(1, 4, 20001)
    expected = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "20001"}
    assert found.items() >= {**expected, "OMP_NUM_THREADS": "5"}.items()
    assert float(found[timeline.BEGIN_VARIABLE]) == timeline.process_timeline().begin_s
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert ranks.rank_environment(0, 10**6, 20001)["OMP_NUM_THREADS"] == "1"


def test_a_port_is_free_and_no_outgoing_connection_takes_it() -> None:
    port = ranks.free_port()
    assert port < 32768
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
