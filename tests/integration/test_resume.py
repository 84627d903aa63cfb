"""A run goes on after any interruption, and a job in any other run, as if nothing had happened.

The reference is the same run without the interruption. Most runs are trained in this process; what
needs SIGKILL or a second process shares a few workers.
"""

from __future__ import annotations

import errno
import json
import resource
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.commands import Tlora
from tests.helpers.scenario import JOBS, losses, make_scenario, records, summary_of, write_rows
from tests.helpers.scenario_worlds import entry, run_cases
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, save_tiny_tokenizer
from tests.helpers.train_worker import Recorder, starts, train_until, wait_for_saves
from tlora_megatron.config.load import load_config
from tlora_megatron.runtime.controller import train_run
from tlora_megatron.training import job_files, metrics
from tlora_megatron.training.formats.checkpoint import find_checkpoint
from tlora_megatron.training.metrics import read_metrics
from tlora_megatron.training.run import training_run
from tlora_megatron.training.run_watch import RunWatch
from tlora_megatron.training.saving.saver import Saver
from tlora_megatron.training.signals import StopSignals

NAMES = tuple(job["name"] for job in JOBS)
NUM_STEPS = 12

SPLIT = "run.micro_batch_tokens=512"
"""Large batches take several rounds: a resumed one is cut elsewhere, so sums round differently."""

LAYOUTS: dict[str, tuple[str, ...]] = {
    "TP2": ("parallel.tp_size=2",),
    "TP2+SP": ("parallel.tp_size=2", "parallel.sequence_parallel=true"),
    "PP2": ("parallel.pp_size=2",),
    "DP2": (),
    "CP2": ("parallel.cp_size=2",),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scenario's four jobs, two of them with dropout, and checkpoints every three steps."""
    dropout = {"mlp": 0.2, "everything": 0.2}
    jobs = [{**job, "eval_every_steps": 4} if job["name"] in dropout else job for job in JOBS]
    every = {"checkpoint_every_steps": 3}
    root = tmp_path_factory.mktemp("resume")
    return make_scenario(root, jobs, num_steps=NUM_STEPS, dropout=dropout, run=every)


@pytest.fixture(scope="module")
def whole(config: Path) -> Path:
    output_dir = config.parent / "whole"
    train_until(config, output_dir, SPLIT)
    return output_dir


@pytest.fixture(scope="module")
def half(config: Path) -> Path:
    """Output of a run of one process that was stopped with every job on its way; not to be touched.

    Its newest checkpoints are not all of one step.
    """
    output_dir = config.parent / "half"
    train_until(config, output_dir, SPLIT, stop=("everything", 7))
    steps = saved_steps(output_dir)
    assert 3 <= min(steps.values()) < max(steps.values()) <= 9
    assert steps["everything"] == 6
    return output_dir


@pytest.fixture
def copy_of_half(half: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(half, tmp_path / "out"))


def checkpoints(output_dir: Path, name: str) -> Path:
    return output_dir / "jobs" / name / "checkpoints"


def saved_steps(output_dir: Path) -> dict[str, int]:
    found = {name: find_checkpoint(checkpoints(output_dir, name)) for name in NAMES}
    return {name: checkpoint.step for name, checkpoint in found.items() if checkpoint}


def with_jobs(config: Path, name: str, *jobs: dict[str, Any] | str) -> Path:
    document = json.loads(config.read_text())
    known = {job["name"]: job for job in document["jobs"]}
    document["jobs"] = [known[job] if isinstance(job, str) else job for job in jobs]
    path = config.with_name(name)
    path.write_text(json.dumps(document))
    return path


def assert_same_job(
    output_dir: Path, whole: Path, name: str, *, rel: float, begin: int = 0
) -> None:
    """Every step once, its loss, norm and evaluation as in the uninterrupted run."""
    ours, theirs = records(output_dir, name), records(whole, name)
    theirs = [line for line in theirs if line["step"] > begin or not begin]
    key = [(line["step"], "loss" in line) for line in theirs]
    assert [(line["step"], "loss" in line) for line in ours] == key, name
    assert [line["step"] for line in ours if "loss" in line] == list(
        range(begin + 1, NUM_STEPS + 1)
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=rel), f"{name} step {other['step']}"


class TestSignalled:
    """SIGTERM, SIGINT or SIGUSR1: the round ends, everything is saved, the same command goes on."""

    @pytest.mark.parametrize(
        ("nproc", "rank"), [pytest.param(1, 0, id="one"), pytest.param(2, 1, id="two")]
    )
    def test_nothing_is_lost_and_nothing_is_done_twice(
        self, config: Path, whole: Path, nproc: int, rank: int
    ) -> None:
        out = config.parent / f"signalled {nproc}"
        out.mkdir()
        case = entry(config, out / "run", [SPLIT])
        # Only one of the processes gets it.
        lives = [{**case, "signal": (number, rank, 7)} for number in (15, 10)]
        run_cases(nproc, lives, out / "cases.json")
        summary = summary_of(out / "run")
        assert summary["run"]["stopped"] == "SIGUSR1"
        said = f"stopped by SIGUSR1 after round {summary['run']['rounds']}; all 4 jobs are saved"
        assert summary["run"]["stop_sentence"] == f"{said}; the same command continues"
        assert {job["status"] for job in summary["jobs"].values()} == {"running"}
        steps = {name: job["steps"] for name, job in summary["jobs"].items()}
        assert saved_steps(out / "run") == steps == {
            name: max(line["step"] for line in records(out / "run", name)) for name in NAMES
        }  # fmt: skip
        run_cases(nproc, [case], out / "cases.json")
        for name in NAMES:
            assert_same_job(out / "run", whole, name, rel=1e-5)
        summary = summary_of(out / "run")
        assert summary["run"]["stopped"] is None


class TestKilled:
    """SIGKILL of the process that writes; that bits stay is in tests/distributed/test_gangs.py."""

    LIVES = (
        ("step", 5),  # before any checkpoint
        ("write", 4),  # the second job's first checkpoint has half of its tensors
        ("flush", 13),  # the third checkpoint is written and not yet flushed
        ("flush", 10),  # the second one has its name, its parent is not yet flushed
        ("step", 20),
        ("remove", 1),  # an old checkpoint is half gone
        ("write", 3),
        ("step", 5),
        ("export", 2),  # an adapter is written and not yet flushed
    )

    @pytest.fixture(scope="class")
    @classmethod
    def killed(cls, config: Path) -> Path:
        """Output of a run that was killed and restarted to its end."""
        out = config.parent / "killed"
        cases = [entry(config, out, [SPLIT], kill=kill) for kill in (*cls.LIVES, None)]
        run_cases(1, cases, config.with_name("killed.json"))
        return out

    def test_losses_are_those_of_the_run_without_kills(self, killed: Path, whole: Path) -> None:
        for name in NAMES:
            assert_same_job(killed, whole, name, rel=1e-6)

    def test_each_life_goes_on_where_the_last_one_saved(self, killed: Path) -> None:
        told = starts(killed)
        assert len(told) == len(self.LIVES) + 1
        for name in NAMES:
            begins = [life[name] for life in told]
            assert begins == sorted(begins)
            assert begins[0] == 0
            assert begins[-1] >= 3
            assert all(step % 3 == 0 for step in begins)

    def test_nothing_half_written_is_left(self, killed: Path) -> None:
        summary = summary_of(killed)
        assert {job["status"] for job in summary["jobs"].values()} == {"finished"}
        for name in NAMES:
            folders = sorted(path.name for path in checkpoints(killed, name).iterdir())
            assert folders == ["step_00000009", "step_00000012"]
            files = {path.name for path in (killed / "jobs" / name).iterdir()}
            assert files == {"adapter", "checkpoints", "metrics.jsonl"}


class TestElsewhere:
    """A job of a stopped run goes on in another run."""

    def test_alone_in_the_same_folder(self, config: Path, copy_of_half: Path, whole: Path) -> None:
        other = {name: records(copy_of_half, name) for name in NAMES if name != "everything"}
        alone = with_jobs(config, "alone.json", "everything")
        summary = train_until(alone, copy_of_half, SPLIT, "run.resume=always")
        assert summary["jobs"].keys() == {"everything"}
        assert_same_job(copy_of_half, whole, "everything", rel=1e-6)
        assert starts(copy_of_half)[-1] == {"everything": 6}
        assert other == {name: records(copy_of_half, name) for name in other}

    @pytest.mark.parametrize("given", ["", "checkpoints", "checkpoints/step_00000006"])
    def test_by_resume_from(
        self, given: str, config: Path, half: Path, whole: Path, tmp_path: Path
    ) -> None:
        alone = with_jobs(config, "alone.json", "everything")
        source = half / "jobs" / "everything" / given
        train_until(alone, tmp_path, SPLIT, f"jobs.everything.resume_from={source}")
        assert_same_job(tmp_path, whole, "everything", rel=1e-6, begin=6)
        assert starts(tmp_path) == [{"everything": 6}]

    def test_resume_from_yields_to_what_the_new_run_has_saved(
        self, config: Path, half: Path, whole: Path, tmp_path: Path
    ) -> None:
        alone = with_jobs(config, "alone.json", "everything")
        key = f"jobs.everything.resume_from={half / 'jobs' / 'everything'}"
        train_until(alone, tmp_path, SPLIT, key, stop=("everything", 10))
        train_until(alone, tmp_path, SPLIT, key)
        assert_same_job(tmp_path, whole, "everything", rel=1e-6, begin=6)
        assert starts(tmp_path) == [{"everything": 6}, {"everything": 9}]

    def test_in_another_group(self, config: Path, half: Path, whole: Path, tmp_path: Path) -> None:
        newcomer = {
            "name": "newcomer",
            "data": {"train": "mlp.jsonl"},
            "lora": {"rank": 3, "alpha": 3, "dropout": 0.5},
            "batch_size": 3,
            "max_seq_len": 100,
            "max_steps": 9,
        }
        group = with_jobs(config, "group.json", newcomer, "outputs", "everything")
        moved = [
            f"jobs.{name}.resume_from={half / 'jobs' / name}" for name in ("everything", "outputs")
        ]
        train_until(group, tmp_path, SPLIT, *moved)
        begin = saved_steps(half)["outputs"]
        assert starts(tmp_path) == [{"newcomer": 0, "outputs": begin, "everything": 6}]
        assert_same_job(tmp_path, whole, "everything", rel=1e-6, begin=6)
        assert_same_job(tmp_path, whole, "outputs", rel=1e-6, begin=begin)


class TestOtherLayouts:
    """One process saves, two go on and save, one goes on."""

    @pytest.fixture(scope="class")
    @classmethod
    def moved(cls, config: Path, half: Path) -> Path:
        """Folder with an output a layout, stopped again; one changed twice."""
        root = config.parent / "moved"
        for name in (*LAYOUTS, "TP2+SP, PP2"):
            shutil.copytree(half, root / name)

        def case(output: str, layout: str, **more: Any) -> dict[str, Any]:
            return entry(config, root / output, [SPLIT, *LAYOUTS[layout]], **more)

        first = [case(name, name, stop=["everything", 10]) for name in LAYOUTS]
        first.append(case("TP2+SP, PP2", "TP2+SP", stop=["everything", 10]))
        run_cases(2, first, root / "first.json")
        run_cases(2, [case("TP2+SP, PP2", "PP2")], root / "second.json")
        return root

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_there_and_back(
        self, layout: str, moved: Path, config: Path, half: Path, whole: Path
    ) -> None:
        train_until(config, moved / layout, SPLIT)
        first, there, back = starts(moved / layout)
        assert set(first.values()) == {0}
        assert there == saved_steps(half)
        assert back["everything"] == 9
        for name in NAMES:
            assert_same_job(moved / layout, whole, name, rel=1e-5)

    def test_from_one_to_another(self, moved: Path, whole: Path) -> None:
        for name in NAMES:
            assert_same_job(moved / "TP2+SP, PP2", whole, name, rel=1e-5)


class TestUnreadable:
    @pytest.mark.parametrize("file", ["adapter.safetensors", "optimizer.safetensors", "state.json"])
    def test_the_one_before_is_taken(
        self,
        file: str,
        config: Path,
        copy_of_half: Path,
        whole: Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        newest = checkpoints(copy_of_half, "everything") / "step_00000006"
        content = (newest / file).read_bytes()
        (newest / file).write_bytes(content[: len(content) // 2])
        train_until(config, copy_of_half, SPLIT)
        assert f"checkpoint {newest} cannot be read and is passed over" in caplog.text
        assert starts(copy_of_half)[-1]["everything"] == 3
        for name in NAMES:
            assert_same_job(copy_of_half, whole, name, rel=1e-6)

    def test_without_any_other_the_job_does_not_begin_again(
        self, config: Path, copy_of_half: Path
    ) -> None:
        folder = checkpoints(copy_of_half, "everything")
        for path in folder.iterdir():
            (path / "state.json").write_text("{}")
        with pytest.raises(
            ValueError, match=r"must hold a checkpoint that can be read, got 2 that"
        ):
            train_until(config, copy_of_half, SPLIT)

    @pytest.mark.parametrize(
        ("spoil", "reason"),
        [
            (lambda s: s["progress"].pop("tokens"), "progress in state.json must hold the keys"),
            (lambda s: s["job"].pop("optimizer"), "job in state.json must hold the keys"),
            (lambda s: s["progress"].update(step="3"), "progress.step in state.json must be a c"),
        ],
    )
    def test_a_state_that_lacks_a_value_is_passed_over(
        self,
        spoil: Callable[[dict[str, Any]], object],
        reason: str,
        copy_of_half: Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        folder = checkpoints(copy_of_half, "everything")
        newest = folder / "step_00000006" / "state.json"
        state = json.loads(newest.read_text())
        spoil(state)
        newest.write_text(json.dumps(state))
        assert find_checkpoint(folder).step == 3
        assert reason in caplog.text

    def test_spoilt_ones_do_not_crowd_out_good_ones(self, config: Path, copy_of_half: Path) -> None:
        folder = checkpoints(copy_of_half, "everything")
        for step in (30, 33):
            spoilt = folder / f"step_{step:08d}"
            spoilt.mkdir()
            (spoilt / "state.json").write_text('{"format": 2}')
        train_until(config, copy_of_half, SPLIT, stop=("everything", 10))
        assert find_checkpoint(folder).step == 9


class TestRefusals:
    """Checkpoints that do not fit are refused by name; the run that is there stays as it was."""

    CASES = (
        ("jobs.everything.lora.rank=9", "job 'everything': lora.rank must be 8 as in its check"),
        (
            "jobs.attention.lora.target_modules=[q_proj]",
            "job 'attention': lora.target_modules must be ['q_proj', 'v_proj'] as in its",
        ),
        ("jobs.everything.batch_size=4", "job 'everything': batch_size must be 5 as in its check"),
        ("jobs.everything.seed=8", "job 'everything': seed must be 7 as in its checkpoint"),
        ("jobs.everything.max_seq_len=99", "job 'everything': max_seq_len must be 100 as in its"),
        (
            "jobs.everything.data.train=shorter.jsonl",
            "job 'everything': number of training sequences must be 18 as in its checkpoint",
        ),
        (
            "jobs.everything.data.train=changed.jsonl",
            "job 'everything': fingerprint of the training data must be",
        ),
        ("base_model.path=other base", "run.output_dir must be new or hold this run, got"),
        ("run.resume=never", "run.output_dir must not hold a run with run.resume: never, got"),
    )

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def other_inputs(cls, config: Path) -> None:
        shutil.copytree(config.parent / "base", config.parent / "other base")
        write_rows(config.parent / "shorter.jsonl", 17, seed=2)
        rows = (config.parent / "everything.jsonl").read_text()
        (config.parent / "changed.jsonl").write_text(rows.replace("?", "!", 1))
        narrow = make_tiny_model(
            config.parent / "narrow", "llama", vocab_size=VOCAB_SIZE, intermediate_size=80
        )
        save_tiny_tokenizer(narrow)

    @pytest.mark.parametrize(("override", "sentence"), CASES, ids=[case[0] for case in CASES])
    def test_by_name(
        self, override: str, sentence: str, config: Path, half: Path, tlora: Tlora
    ) -> None:
        before = _content(half)
        command = ("train", config, f"--output-dir={half}", f"--set={override}")
        assert f"error: {sentence}" in tlora(*command, code=2)
        assert _content(half) == before

    @pytest.mark.parametrize("file", ["adapter.safetensors", "optimizer.safetensors"])
    def test_values_that_are_not_finite(
        self, file: str, config: Path, copy_of_half: Path, tlora: Tlora
    ) -> None:
        """They would make its group's jobs NaN; nothing says what they should have been."""
        newest = checkpoints(copy_of_half, "everything") / "step_00000006" / file
        tensors = load_file(newest)
        name = sorted(tensors)[-1]
        tensors[name][0, 0] = torch.inf
        save_file(tensors, newest)
        sentence = f"error: job 'everything': {name} must be finite in its checkpoint"
        assert sentence in tlora("train", config, f"--output-dir={copy_of_half}", code=2)

    @pytest.mark.parametrize(
        ("overrides", "sentence"),
        [
            (["run.resume=always"], "run.output_dir must hold a run with run.resume: always, got"),
            (
                ["jobs.everything.resume_from=half"],
                "resume_from of job 'everything' must be a checkpoint or a jobs/NAME folder with",
            ),
            (
                ["jobs.everything.resume_from=half/jobs/everything", "base_model.path=narrow"],
                "job 'everything': layers.0.gate_proj.lora_b must have shape [80, 8] in its",
            ),
        ],
    )
    def test_in_a_new_folder(
        self,
        overrides: list[str],
        sentence: str,
        config: Path,
        half: Path,
        tmp_path: Path,
        tlora: Tlora,
    ) -> None:
        command = ("train", config, f"--output-dir={tmp_path / 'new'}")
        arguments = [f"--set={override}" for override in overrides]
        assert f"error: {sentence}" in tlora(*command, *arguments, code=2)

    def test_processes_that_read_other_checkpoints(
        self, config: Path, copy_of_half: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The case of nodes without a common file system; the second process is made up."""

        def gather(everyone: list[Any], mine: list[tuple[str, int]]) -> None:
            everyone[:] = [mine, [(name, 0) for name, _ in mine]]

        monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
        with pytest.raises(
            ValueError,
            match=r"every process must start the same jobs at the same steps, got "
            r".*\('everything', 0\).* on rank 1 and .*\('everything', 6\).* on rank 0",
        ):
            train_until(config, copy_of_half, SPLIT)


def _content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class LimitedDisk(Recorder):
    """Refuses to let files grow beyond a size from one step of a job on, until `until`.

    The kernel then fails writes of this process (EFBIG) as it does on a full disk (ENOSPC).
    """

    def __init__(
        self, output_dir: Path, *, size_bytes: int, begin: tuple[str, int], until: tuple[str, int]
    ) -> None:
        super().__init__(output_dir)
        self._size_bytes, self._begin, self._until = size_bytes, begin, until
        self.saved_at_event: dict[str, int] = {}

    def emit(self, kind: str, job: str | None, body: Mapping[str, Any]) -> None:
        """Sets and lifts the limit; keeps which checkpoint can be read at a note's time."""
        super().emit(kind, job, body)
        if kind == "stepped":
            if (job, body["step"]) == self._begin:
                limit_files(self._size_bytes)
            if (job, body["step"]) == self._until:
                limit_files(None)
        elif kind == "note":
            assert job is not None
            newest = find_checkpoint(checkpoints(self._output_dir, job))
            self.saved_at_event[job] = newest.step if newest else 0

    def told(self, name: str) -> list[str]:
        return [e["event"] for e in self.events if e["name"] == name and "event" in e]


def limit_files(size_bytes: int | None) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size_bytes is None else size_bytes, hard))


class TestFullDisk:
    @pytest.fixture(autouse=True)
    def unlimited(self) -> Iterator[None]:
        yield
        limit_files(None)

    @pytest.fixture
    def run(
        self, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Callable[..., tuple[dict[str, Any], Any]]:
        """Trains on a limited disk, every save of which ends before the next round; returns the
        summary and the listener.
        """
        monkeypatch.setattr(Saver, "save", Saver.save)  # put back afterwards
        wait_for_saves()

        def train(**limits: Any) -> tuple[dict[str, Any], LimitedDisk]:
            disk = LimitedDisk(tmp_path, **limits)
            return train_run(load_config(config, [SPLIT], str(tmp_path)), disk), disk

        return train

    def test_for_a_while_the_run_goes_on_and_loses_nothing(
        self, run: Callable[..., Any], tmp_path: Path, whole: Path
    ) -> None:
        # 500 bytes: not even the lines of the metrics fit.
        summary, disk = run(size_bytes=500, begin=("everything", 4), until=("everything", 7))
        (event,) = disk.told("everything")
        assert event.startswith("could not be saved at step 6: ")
        assert "File too large" in event
        assert disk.saved_at_event["everything"] == 3
        assert {job["status"] for job in summary["jobs"].values()} == {"finished"}
        for name in NAMES:
            assert records(tmp_path, name) == records(whole, name)

    def test_at_the_end_a_job_fails_by_name_and_can_be_finished_later(
        self, run: Callable[..., Any], config: Path, tmp_path: Path, whole: Path
    ) -> None:
        # Metrics and the summary fit; no checkpoint and no adapter does.
        begin, never = ("everything", 10), ("everything", 99)
        summary, disk = run(size_bytes=12_000, begin=begin, until=never)
        job = summary["jobs"]["everything"]
        assert job["status"] == "failed"
        assert job["reason"].startswith("its adapter could not be written: ")
        assert "File too large" in job["reason"]
        assert job["adapter"] is None
        assert summary_of(tmp_path)["jobs"]["everything"] == job
        assert f"failed: {job['reason']}" in disk.told("everything")
        assert disk.saved_at_event["everything"] == 9
        limit_files(None)
        summary = train_until(config, tmp_path, SPLIT)
        assert {job["status"] for job in summary["jobs"].values()} == {"finished"}
        assert_same_job(tmp_path, whole, "everything", rel=1e-6)

    def test_what_jobs_end_with_waits_for_room(
        self,
        run: Callable[..., Any],
        tmp_path: Path,
        whole: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        waits = iter([True] * 4)
        monkeypatch.setattr(job_files, "_FULL", (errno.EFBIG,))
        monkeypatch.setattr(job_files, "_TRY_AGAIN_S", 0.0)
        monkeypatch.setattr(
            RunWatch, "waits_for_room", lambda _: next(waits, False) or limit_files(None) or True
        )
        summary, disk = run(size_bytes=500, begin=("everything", 12), until=("everything", 99))
        assert {job["status"] for job in summary["jobs"].values()} == {"finished"}
        assert "its last checkpoint waits for room on the disk: [Errno 27]" in caplog.text
        assert not disk.told("everything")
        for name in NAMES:
            assert records(tmp_path, name) == records(whole, name)
            assert find_checkpoint(checkpoints(tmp_path, name)).step == NUM_STEPS

    @pytest.mark.parametrize("number", [0, signal.SIGTERM])
    def test_a_summary_that_is_refused_is_named(
        self,
        config: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        number: int,
    ) -> None:
        def refuse(*_: Any) -> None:
            raise OSError(errno.ENOSPC if number else errno.EACCES, "no")

        monkeypatch.setattr(training_run, "write_summary", refuse)
        monkeypatch.setattr(StopSignals, "received", number)
        arguments = load_config(config, [SPLIT], str(tmp_path)), None, StopSignals(speaks=False)
        told = f"{tmp_path}/summary.json could not be written: "
        if number:
            assert train_run(*arguments)["run"]["stopped"] == "SIGTERM"
            assert told in caplog.text
        else:
            with pytest.raises(OSError, match=told):
                train_run(*arguments)

    def test_metrics_that_a_disk_refused_are_whole_later(self, tmp_path: Path) -> None:
        job = metrics.JobMetrics(tmp_path, "j", tensorboard=False, wandb_project=None)
        limit_files(100)
        for step in range(1, 200):
            job.log_step(step, 1.0, 1.0, 1.0, 1, 1, 1.0)
        assert not job.close()
        assert job.path.stat().st_size == 100
        limit_files(None)
        assert job.close()
        assert [line["step"] for line in read_metrics(job.path)] == list(range(1, 200))

    def test_a_tensorboard_that_always_dies_is_opened_ever_more_rarely(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        class DeadWriter:
            def add_scalar(self, *_: object) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(metrics, "_open_tensorboard", lambda *_: DeadWriter())
        with metrics.JobMetrics(tmp_path, "j", tensorboard=True, wandb_project=None) as job:
            for step in range(1, 21):
                job.log_step(step, 1.0, 1.0, 1.0, 1, 1, 1.0)
        assert [line["step"] for line in read_metrics(job.path)] == [*range(1, 21)]
        assert caplog.text.count("job j: metrics could not be written: ") == 5, "1, 2, 4, 8, 16"


def test_an_adapter_that_is_not_finite_fails_its_job_alone(
    config: Path, tmp_path: Path, whole: Path
) -> None:
    overrides = ("jobs.mlp.optimizer.lr=1e39", "jobs.mlp.schedule.warmup_steps=0")
    summary = train_until(config, tmp_path, SPLIT, *overrides, "jobs.mlp.max_steps=1")
    job = summary["jobs"]["mlp"]
    assert (job["status"], job["adapter"]) == ("failed", None)
    assert "must be finite, got NaN or inf" in job["reason"]
    for name in ("attention", "everything", "outputs"):
        assert summary["jobs"][name]["status"] == "finished"
        assert losses(tmp_path, name) == pytest.approx(losses(whole, name), rel=1e-6)
