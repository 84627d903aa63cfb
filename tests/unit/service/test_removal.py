"""Jobs that have ended are removed whole or not at all, and nothing that something needs goes."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.helpers.stored_jobs import put_job
from tlora_megatron.config.job_rows import Action
from tlora_megatron.service import removal
from tlora_megatron.service.home import ARCHIVES, Home, held, make_folder
from tlora_megatron.service.logs import LOG_NAME
from tlora_megatron.service.prepare.submission import ORDER
from tlora_megatron.service.removal import act_on, tidy
from tlora_megatron.service.store import JobState, Model, Sampler, Session, Store, open_store

_DAY_S = 86_400.0
_FILES = ("checkpoints/step_1/state.json", "adapter/adapter_model.safetensors", "job.json")


@pytest.fixture
def store(home: Home) -> Iterator[Store]:
    with open_store(home.store) as opened:
        yield opened


def ended(home: Home, store: Store, name: str = "a", **fields: object) -> str:
    """A job that has ended, with files; returns its id."""
    job = put_job(store, name, **fields)
    store.jobs.change(job, JobState.CANCELLED)
    for file in _FILES:
        make_folder((home.job(job) / file).parent)
        (home.job(job) / file).write_text(name)
    return job


def files_of(home: Home, job: str) -> list[str]:
    folder = home.job(job)
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_a_job_goes_with_its_folder_or_loses_its_checkpoints(home: Home, store: Store) -> None:
    gone, thin = ended(home, store, "gone"), ended(home, store, "thin")
    runs = put_job(store, "runs")
    archive = make_folder(home.root / ARCHIVES) / f"{gone}-adapter-1.zip"
    archive.touch()
    (home.job(gone) / "adapter" / "adapter_config.json").touch()
    with held(home.job(gone) / "adapter"):  # somebody samples from it
        acted = act_on(home, store, "remove", [gone, runs, "j9abcd", gone], "me")
        tidy(home, store, keep_s=_DAY_S, now_s=0.0)
        assert len(files_of(home, gone)) == len(_FILES) + 1
    tidy(home, store, keep_s=_DAY_S, now_s=0.0)
    assert [job.id for job in acted.jobs] == [gone]
    assert "must have ended to be removed, got one that is validating" in acted.refused[runs]
    assert "must be one of the store's, got 'j9abcd'" in acted.refused["j9abcd"]
    act_on(home, store, "remove_checkpoints", [thin], "me")
    assert [job.id for job in store.jobs.page()] == [thin, runs]
    assert store.jobs.counts() == {JobState.CANCELLED: 1, JobState.VALIDATING: 1}
    assert os.listdir(home.jobs) == [thin]
    assert not archive.exists()
    assert files_of(home, thin) == sorted(_FILES[1:])
    assert put_job(store, "gone", key="gone") == gone, "its key makes no second job"


def _names_it(home: Home, store: Store, job: str) -> None:
    link = home.root / "latest"
    link.symlink_to(home.job(job) / "adapter")
    put_job(store, "b", document={"document": {"init_from": str(link), "resume_from": None}})


def _has_its_base(home: Home, store: Store, job: str) -> None:
    put_job(store, "b", document={"base_model": {"path": str(home.job(job) / "merged")}})


def _its_client_is_there(home: Home, store: Store, job: str) -> None:
    session = Session(id="s1", tenant="ann", created_at=0.0, sdk_version="1", heard_at=0.0)
    model = {"tenant": "ann", "session": "s1", "base": "b", "created_at": 0.0, "rank": 1}
    store.sessions.add(session)
    store.sessions.add_model(Model(id="s1:train:0", number=0, job=job, **model))


def _a_client_samples_from_it(home: Home, store: Store, job: str) -> None:
    _its_client_is_there(home, store, job)
    store.sessions.end("s1", "done")
    later = Session(id="s2", tenant="ann", created_at=0.0, sdk_version="1", heard_at=0.0)
    path = "tinker://s1:train:0/sampler_weights/x"
    sampler = Sampler(
        id="s2:sample:0", tenant="ann", session="s2", number=0, base="b", heard_at=0.0,
        model_path=path,
    )  # fmt: skip
    store.sessions.add(later)
    store.sessions.put_sampler(sampler)


@pytest.mark.parametrize(
    "need", [_names_it, _has_its_base, _its_client_is_there, _a_client_samples_from_it]
)
@pytest.mark.parametrize("action", ["remove", "remove_checkpoints"])
def test_what_something_needs_stays(
    home: Home, store: Store, action: Action, need: Callable[[Home, Store, str], None]
) -> None:
    job = ended(home, store)
    need(home, store, job)
    other = ended(home, store, "other")
    acted = act_on(home, store, action, [job, other], "me")
    assert "must be needed by nothing to be removed, got one that" in acted.refused.pop(job)
    assert not acted.refused
    assert files_of(home, job) == sorted(_FILES)


@pytest.mark.parametrize("action", ["remove", "remove_checkpoints"])
def test_a_kill_at_any_moment_leaves_all_or_a_remainder(home: Home, action: Action) -> None:
    with open_store(home.store) as store:
        stays = ended(home, store, "stays")
    kills = 0
    while True:
        with open_store(home.store) as store:
            job = ended(home, store, f"job{kills}")
        if not _killed_at_operation(kills, home, job, action):
            break
        kills += 1
        with open_store(home.store) as store:
            is_listed = job in [row.id for row in store.jobs.page()]
            left, thin = files_of(home, job), sorted(_FILES[1:])
            assert left == sorted(_FILES) or left == (thin if is_listed else [])
            assert left != thin or action == "remove_checkpoints"
            tidy(home, store, keep_s=_DAY_S, now_s=0.0)
            assert sorted(os.listdir(home.jobs)) == sorted({stays, job} if is_listed else {stays})
            act_on(home, store, "remove", [job], "me")
        assert files_of(home, stays) == sorted(_FILES)
    assert kills > 6


def _killed_at_operation(number: int, home: Home, job: str, action: Action) -> bool:
    """Removes a job in a child, SIGKILLed before its operation of a number on files or tables."""
    child = os.fork()
    if child == 0:
        store, left = open_store(home.store), number

        def hook(event: str, _: object) -> None:
            nonlocal left
            if event in ("os.rename", "os.remove", "os.rmdir", "os.scandir", "fcntl.flock"):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        act_on(home, store, action, [job], "me")
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_checkpoints_go_first_adapters_last_and_nothing_that_is_not_ours(
    home: Home, store: Store
) -> None:
    jobs = {
        "kept": ended(home, store, "kept"),
        "short": ended(home, store, "short", schedule={"keep_days": 1.0}),
        "long": ended(home, store, "long", schedule={"keep_days": 99.0}),
    }
    others = [home.jobs / name for name in ("notes", ".j1abcd.backup", ".trash", "j77zzzz")]
    for folder in others:
        make_folder(folder)
    outside = make_folder(home.root / "elsewhere")
    os.rename(home.job(jobs["short"]), outside / "short")
    home.job(jobs["short"]).symlink_to(outside / "short")
    ended_at = store.jobs.get(jobs["kept"]).ended_at or 0.0
    for days, left in ((0.9, {"kept", "long", "short"}), (3.0, {"kept", "long"}), (11.0, set())):
        tidy(home, store, keep_s=10 * _DAY_S, now_s=ended_at + days * _DAY_S)
        assert {job.name for job in store.jobs.page()} == left
        assert set(os.listdir(home.jobs)) == {jobs[n] for n in left} | {p.name for p in others}
        has = {"adapter/adapter_model.safetensors", "job.json"} if left else set()
        assert has <= set(files_of(home, jobs["kept"]))
        assert ("checkpoints/step_1/state.json" in files_of(home, jobs["kept"])) == (days < 2)
    assert (outside / "short" / "job.json").exists(), "a link goes, not what it leads to"


def test_long_logs_of_processes_begin_anew(
    home: Home, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal, "_LOG_BYTES", 10_000)
    folder = make_folder(home.gangs / "g1-1")
    (home.root / LOG_NAME).write_text("x" * 20_000)
    with (folder / "rank_0.log").open("a") as long, (folder / "rank_1.log").open("a") as short:
        long.write("x" * 20_000)
        short.write("y")
        for file in (long, short):
            file.flush()
        tidy(home, store, keep_s=_DAY_S, now_s=0.0)
        long.write("more")
    assert (home.root / LOG_NAME).read_text() == ""
    found = {path.name: path.read_text() for path in folder.iterdir()}
    assert found == {"rank_0.before": "x" * 20_000, "rank_0.log": "more", "rank_1.log": "y"}


def test_tokens_of_unfinished_jobs_count_as_used(home: Home, store: Store) -> None:
    for key, state in (("used", JobState.QUEUED), ("idle", JobState.CANCELLED)):
        document = {ORDER: {"document": {}, "tokens": {"train": key}}}
        store.jobs.change(put_job(store, key), state, document=document)
        entry = make_folder(home.tokens / key) / "tokens"
        entry.touch()
        os.utime(entry, (0, 0))
    tidy(home, store, keep_s=math.inf, now_s=0.0)
    ages = {path.parent.name: path.stat().st_mtime for path in home.tokens.glob("*/*")}
    assert ages["idle"] == 0 < ages["used"]
