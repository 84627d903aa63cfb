"""`tlora submit`, `jobs`, `logs`, `cancel`, `adapters` over a store, without a controller."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from threading import Timer

import pytest

from tests.helpers.commands import Tlora
from tests.helpers.launch import HANG_S, imported
from tests.helpers.stored_jobs import finish, put_job, serve_gang, start, write_steps
from tlora_megatron.cli.service import jobs
from tlora_megatron.config.reader import ConfigError
from tlora_megatron.service.home import Home, make_folder, remember_store, store_place
from tlora_megatron.service.store import JobState, NewJob, Store, open_store

ON_SERVICES = [
    ["submit", "run.yaml"],
    ["jobs"],
    ["logs", "one"],
    ["cancel", "one"],
    ["pause", "one"],
    ["resume", "one"],
    ["adapters", "one", "--out", "here"],
]


def finished_adapter(store: Store, home: Home, job: str) -> Path:
    """Ends a job with an adapter of two files."""
    serve_gang(store, home)
    start(store, job)
    adapter = make_folder(home.job(job) / "adapter")
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    finish(store, job)
    return adapter


class TestWithoutService:
    @pytest.mark.parametrize("argv", ON_SERVICES, ids=lambda argv: argv[0])
    def test_a_folder_that_nobody_served_is_refused(
        self, argv: list[str], tmp_path: Path, tlora: Tlora, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(jobs, "_STARTING_S", 0.0)
        told = f"got '{tmp_path}/none'; start one with: tlora serve --service {tmp_path}/none"
        assert told in tlora(*argv, "--service", tmp_path / "none", code=2)

    def test_jobs_wait_for_a_service_that_is_just_starting(
        self, home: Home, run_file: Path, tlora: Tlora
    ) -> None:
        starting = Timer(0.3, lambda: open_store(home.store).close())
        starting.start()
        assert "one  validating" in tlora("submit", run_file)
        starting.join()

    def test_no_command_imports_torch(self, store: Store, run_file: Path) -> None:
        code = (
            "from tlora_megatron.cli.main import main\n"
            f"assert main(['submit', {str(run_file)!r}]) == 0\n"
            "assert main(['jobs', '--json']) == main(['logs', 'one']) == 0\n"
            "assert main(['cancel', 'one']) == 0 and main(['adapters', 'one', '--out', '_']) == 2\n"
            "import tlora_megatron.cli.service.serve"
        )
        assert not imported(code, "torch", "numpy", "transformers", speaks=True)


class TestSubmit:
    def test_all_jobs_of_a_file_with_absolute_paths(
        self, store: Store, run_file: Path, tlora: Tlora
    ) -> None:
        jobs = tlora.json("submit", run_file, "--set", "jobs.two.lora.rank=7")
        assert [(job["name"], job["state"]) for job in jobs] == [
            ("one", "validating"),
            ("two", "validating"),
        ]
        document = store.jobs.document(jobs[1]["id"])
        assert document["base_model"]["path"] == str(run_file.parent / "base")
        assert document["document"]["data"]["train"] == str(run_file.parent / "data.jsonl")
        assert document["document"]["lora"]["rank"] == 7

    def test_what_it_prints(self, store: Store, run_file: Path, tlora: Tlora) -> None:
        one, two, note = tlora("submit", run_file).splitlines()
        assert one.endswith("  one  validating")
        assert two.endswith("  two  validating")
        assert note == "no controller runs: the jobs wait until one does: tlora serve"

    def test_the_same_key_is_the_same_submission(
        self, store: Store, run_file: Path, tlora: Tlora
    ) -> None:
        first = tlora.json("submit", run_file, "--idempotency-key", "k")
        assert tlora.json("submit", run_file, "--idempotency-key", "k") == first
        said = tlora("submit", run_file, "--idempotency-key", "k")
        assert said.count("submitted before, with the same key") == 2
        assert "key" in tlora(
            "submit", run_file, "--idempotency-key=k", "--set=jobs.one.seed=3", code=2
        )

    @pytest.mark.parametrize(
        ("argv", "told"),
        [
            (["--set", "jobs.one.max_step=3"], "jobs[0].max_step is not a known key"),
            (["--set", "base_model.path=none"], "base_model.path must be an existing directory"),
            (["--set", "jobs[1].name=one"], "jobs must have unique names"),
            (["{file}"], "FILE... must name job 'one' once, got it 2 times"),
            (["--idempotency-key", ""], "--idempotency-key must be text that can be printed"),
        ],
    )
    def test_refusals(
        self, store: Store, run_file: Path, argv: list[str], told: str, tlora: Tlora
    ) -> None:
        more = [str(run_file) if word == "{file}" else word for word in argv]
        assert told in tlora("submit", run_file, *more, code=2)
        assert not any(store.jobs.counts().values())

    @pytest.mark.parametrize(("end", "code"), [("finished", 0), ("cancelled", 1)])
    def test_wait_returns_how_jobs_ended(
        self,
        end: str,
        code: int,
        store: Store,
        home: Home,
        run_file: Path,
        monkeypatch: pytest.MonkeyPatch,
        tlora: Tlora,
    ) -> None:
        serve_gang(store, home)
        looks = iter(range(3))

        def sleep(_: float) -> None:
            one, two = (store.jobs.find(name).id for name in ("one", "two"))
            match next(looks):
                case 0:
                    start(store, one)
                case 1:
                    finish(store, one)
                    start(store, two)
                case _:
                    store.jobs.change(two, JobState(end), release="it has ended")

        monkeypatch.setattr("time.sleep", sleep)
        out = tlora("submit", run_file, "--wait", code=code)
        assert "one: running  3/5 loss 0.5000\n" in out
        assert "one: finished  5/5" in out
        assert f"two: {end}" in out


class TestJobs:
    def test_those_that_wait_or_run(
        self, store: Store, home: Home, run_file: Path, tlora: Tlora
    ) -> None:
        one, two = tlora.json("submit", run_file)
        serve_gang(store, home)
        start(store, one["id"])
        store.jobs.change(two["id"], JobState.FAILED, error="no data")
        out = tlora("jobs")
        assert " one " in out
        assert "running     3/5    0.5" in out
        assert " two " not in out
        assert "1 running, 1 failed\n" in out
        assert "no controller runs, so nothing moves: tlora serve\n" in out

    def test_json_and_states(self, store: Store, run_file: Path, tlora: Tlora) -> None:
        _, two = tlora.json("submit", run_file)
        store.jobs.change(two["id"], JobState.FAILED, error="no data")
        for argv, names in (
            ([], ["one"]),
            (["--all"], ["one", "two"]),
            (["--state=failed"], ["two"]),
        ):
            document = tlora.json("jobs", *argv)
            assert [job["name"] for job in document["jobs"]] == names
        assert document["jobs"][0]["error"] == "no data"
        assert document["served"] is False
        assert document["counts"] == {"validating": 1, "failed": 1}

    def test_an_unknown_state(self, store: Store, tlora: Tlora) -> None:
        assert "got 'queed'; did you mean queued?" in tlora("jobs", "--state", "queed", code=2)

    def test_an_empty_service(self, store: Store, tlora: Tlora) -> None:
        assert tlora("jobs").startswith("no jobs\n")


class TestExitCodes:
    def test_trouble_of_the_store_is_no_mistake_of_the_command(
        self, home: Home, tlora: Tlora
    ) -> None:
        home.store.write_bytes(b"no database" * 1000)
        for argv in (["jobs"], ["cancel", "one"], ["logs", "one"]):
            tlora(*argv, code=1)
            assert "must be a whole SQLite database" in tlora.err

    @pytest.mark.parametrize("style", [["--json"], []])
    def test_a_reader_that_goes_away_is_told_nothing(
        self, style: list[str], store: Store, run_file: Path, tlora: Tlora
    ) -> None:
        tlora.json("submit", run_file)
        command = [sys.executable, "-m", "tlora_megatron.cli", "logs", "one", *style]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
            process.stdout.close()
            told = process.stderr.read()
            assert process.wait(HANG_S) == 1
        assert told == b""

    def test_a_profile_that_is_none_is_refused_before_anything_starts(
        self, home: Home, monkeypatch: pytest.MonkeyPatch, tlora: Tlora
    ) -> None:
        monkeypatch.setattr("tlora_megatron.cli.service.serve._make_engine", None)
        assert "nonsense" in tlora("serve", "--hardware", "nonsense", code=2)
        assert not home.store.exists()


class TestActions:
    def test_nothing_happens_to_a_job_that_is_not_paused(
        self, store: Store, home: Home, run_file: Path, tlora: Tlora
    ) -> None:
        one, _ = tlora.json("submit", run_file)
        serve_gang(store, home)
        start(store, one["id"])
        before = store.events.last()
        out = tlora("resume", "one")
        assert out.startswith(f"one ({one['id']}): nothing to resume: it is running\n")
        assert store.events.last() == before
        store.jobs.request_action(one["id"], "pause")
        assert "resume asked; it is running" in tlora("resume", "one")

    @pytest.mark.parametrize("action", ["cancel", "pause"])
    def test_each_on_its_own(self, action: str, store: Store, run_file: Path, tlora: Tlora) -> None:
        one, two = tlora.json("submit", run_file)
        store.jobs.change(two["id"], JobState.FAILED, error="no data")
        told = tlora(action, "two", "one", code=2)
        assert "1 of 2 jobs refused:\njob 'two'" in told
        assert "must be unfinished" in told
        assert tlora.out.startswith(f"one ({one['id']}): {action} asked; it is validating\n")
        assert [store.jobs.get(job["id"]).wish for job in (one, two)] == [action, None]

    def test_a_long_list_is_cut(
        self, store: Store, run_file: Path, tlora: Tlora, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tlora_megatron.cli.service.jobs._MOST_ROWS", 1)
        one, two = tlora.json("submit", run_file)
        told = tlora("jobs")
        assert one["id"] in told
        assert two["id"] not in told
        assert "2 validating\n1 more jobs are not shown; --json lists all" in told

    def test_the_end_of_a_log(self, store: Store, run_file: Path, tlora: Tlora) -> None:
        one, _ = tlora.json("submit", run_file)
        store.jobs.change(one["id"], JobState.QUEUED)
        lines = tlora("logs", "one").splitlines()
        for tail, found in (("1", lines[-1:]), ("99", lines), ("0", [])):
            assert tlora("logs", "one", "--tail", tail).splitlines() == found
        assert "--tail must be at least 0" in tlora("logs", "one", "--tail", "-1", code=2)

    def test_jobs_are_chosen(self, store: Store, home: Home, tlora: Tlora) -> None:
        tenants = {"sweep-1": "ann", "sweep-2": "bob", "other": "ann", "lives": "ann"}
        ids = {name: put_job(store, name, tenant) for name, tenant in tenants.items()}
        for name in ("sweep-1", "sweep-2", "other"):
            store.jobs.change(ids[name], JobState.FAILED, error="x")
        for words, names in (
            (["--all"], ["sweep-1", "sweep-2", "other"]),
            (["--tenant", "ann"], ["sweep-1", "other"]),
            (["--name", "sweep-*", "--older-than", "0s"], ["sweep-1", "sweep-2"]),
            (["--all", "--older-than", "1h"], []),
            (["--state", "finished"], []),
        ):
            found = tlora.json("rm", *words, "--dry-run")
            assert [job["name"] for job in found] == names
        assert "--yes must be given to rm 3 chosen jobs" in tlora("rm", "--all", code=2)
        assert "be an age such as 30d" in tlora("rm", "--older-than", "soon", code=2)
        assert "NAME... must be given, or be chosen by --state" in tlora("rm", code=2)
        assert ", got 'both'" in tlora("cancel", "lives", "--all", code=2)
        assert len(store.jobs.page()) == 4
        out = tlora("rm", "--name", "sweep-*", "--yes")
        assert f"sweep-1 ({ids['sweep-1']}): removed\n" in out
        assert "its checkpoints are deleted" in tlora("rm", ids["other"], "--checkpoints-only")
        assert "cancel asked" in tlora("cancel", "--state", "validating", "--yes")
        assert [job.name for job in store.jobs.page()] == ["other", "lives"]
        tlora("logs", ids["sweep-1"], code=2)

    def test_what_jobs_have_on_the_disk(self, store: Store, home: Home, tlora: Tlora) -> None:
        for name, size in (("small", 10), ("large", 5000)):
            job = put_job(store, name)
            for part in ("checkpoints/step_1", "adapter"):
                make_folder(home.job(job) / part)
                (home.job(job) / part / "x").write_bytes(b"x" * size)
            (home.job(job) / "link").symlink_to("adapter/x")
        _, _, _, large, small, *_, last = tlora("jobs", "--disk").rstrip().splitlines()
        assert " ".join(large.split()).endswith("validating 5.0 kB 5.0 kB 0 bytes 10.0 kB")
        assert "small" in small
        assert last == "ann: 10.0 kB"
        found = tlora.json("jobs", "--disk")["jobs"]
        assert found[1]["disk"] == {"adapter": 10, "checkpoints": 10, "link": 0}

    @pytest.mark.parametrize("name", ["nobody", "", "\udcff", "../one"])
    def test_an_unknown_name(self, name: str, store: Store, tlora: Tlora) -> None:
        told = f"NAME must be the id or the name of a job, got {name!r}; `tlora jobs --all` lists"
        assert told in tlora("resume", name, code=2)

    def test_another_tenant_s_name_leads_to_the_id(self, store: Store, tlora: Tlora) -> None:
        new = NewJob(name="math", document={}, base="b", key="k", schedule={})
        (job,) = store.jobs.submit([new], tenant="ann")
        assert f"take the id {job.id}, which is ann's" in tlora("logs", "math", code=2)


class TestAdapters:
    def test_a_finished_one_is_copied(
        self, store: Store, home: Home, run_file: Path, tmp_path: Path, tlora: Tlora
    ) -> None:
        finished_adapter(store, home, tlora.json("submit", run_file)[0]["id"])
        out = tmp_path / "out"
        tlora("adapters", "one", "--out", out)
        assert sorted(path.name for path in out.iterdir()) == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        assert (out / "adapter_model.safetensors").read_bytes() == b"weights"
        assert "--out must name a folder that does not exist yet" in tlora(
            "adapters", "one", "--out", out, code=2
        )

    def test_links_are_not_followed(
        self, store: Store, home: Home, run_file: Path, tmp_path: Path, tlora: Tlora
    ) -> None:
        adapter = finished_adapter(store, home, tlora.json("submit", run_file)[0]["id"])
        (adapter / "more").symlink_to(run_file)
        tlora("adapters", "one", "--out", tmp_path / "out", code=1)
        assert not (tmp_path / "out").exists()


class TestLogs:
    STEPS = (
        {"step": 1, "loss": 2.0, "lr": 0.1, "tokens": 1200},
        {"step": 1, "eval_loss": 1.5, "eval_exact_match": None},
        {"step": 2, "loss": 1.25, "lr": 0.1, "tokens": 1200},
    )

    def test_events_stand_behind_the_steps_before_them(
        self, store: Store, home: Home, run_file: Path, tlora: Tlora
    ) -> None:
        job = tlora.json("submit", run_file)[0]["id"]
        write_steps(home, job, *self.STEPS, torn='{"step": 3, "lo')
        store.events.add("saved", job=job, body={"step": 1})
        store.jobs.change(job, JobState.FAILED, why="no disk")
        words = [line[10:] for line in tlora("logs", "one").splitlines()]
        assert words == [
            "submitted",
            "step 1  loss 2  lr 0.1  tokens 1,200",
            "step 1  eval_loss 1.5",
            "saved (step 1)",
            "step 2  loss 1.25  lr 0.1  tokens 1,200",
            "validating -> failed: no disk",
        ]


class TestStorePlace:
    def test_a_database_is_remembered(self, home: Home) -> None:
        assert store_place(home) == home.store
        url = "postgresql+psycopg://a@b/c"
        assert store_place(home, url) == url
        assert store_place(home) == home.store, "nobody could open it yet"
        remember_store(home, url)
        assert store_place(home) == url
        with pytest.raises(ConfigError, match="--database must be the one that the service has"):
            store_place(home, "postgresql+psycopg://a@b/other")

    def test_jobs_in_the_folder_s_own_store_are_not_lost(self, store: Store, home: Home) -> None:
        with pytest.raises(ConfigError, match="--database must be the one that the service has"):
            store_place(home, "postgresql+psycopg://a@b/c")

    def test_what_is_no_address_is_refused(self, home: Home) -> None:
        with pytest.raises(ConfigError, match=r"--database must be postgresql.*got 'nonsense'"):
            store_place(home, "nonsense")
