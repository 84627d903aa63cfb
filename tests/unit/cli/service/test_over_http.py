"""The commands over HTTP print and do what they print and do over the service's folder."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.helpers.commands import Tlora
from tests.helpers.http_service import BASE, Api, listening, open_api
from tests.helpers.stored_jobs import finish, serve_gang, start, write_steps
from tlora_megatron.cli.service import jobs as rows
from tlora_megatron.service.home import VARIABLE, make_folder
from tlora_megatron.service.store import WHY_QUEUED, JobState


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with open_api(tmp_path / "service") as opened:
        yield opened


@pytest.fixture
def address(api: Api, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Commands reach the service by its address, as tenant `local`, whose jobs the folder shows."""
    with listening(api.app) as found:
        monkeypatch.setenv(VARIABLE, found)
        monkeypatch.setenv("TLORA_TOKEN", api.token("local"))
        yield found


@pytest.fixture(scope="module")
def still_served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Api, str]]:
    root = tmp_path_factory.mktemp("still") / "service"
    with open_api(root) as opened, listening(opened.app) as found:
        yield opened, found


@pytest.fixture
def still(still_served: tuple[Api, str], monkeypatch: pytest.MonkeyPatch) -> Api:
    """A service that keeps nothing of what commands send it: they are refused."""
    monkeypatch.setenv(VARIABLE, still_served[1])
    monkeypatch.setenv("TLORA_TOKEN", still_served[0].token("local"))
    return still_served[0]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A run of the jobs `one` and `two`, whose data lie beside it."""
    (tmp_path / "data.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "eval.jsonl").write_text('{"text": "y"}\n')
    data = {"train": "data.jsonl"}
    jobs: list[dict[str, Any]] = [
        {"name": "one", "data": {**data, "eval": ["eval.jsonl", "data.jsonl"]}},
        {"name": "two", "data": data},
    ]
    path = tmp_path / "run.yaml"
    document = {"base_model": BASE, "defaults": {"max_steps": 5}, "jobs": jobs}
    path.write_text(yaml.safe_dump(document))
    return path


def told(argv: list[str], tlora: Tlora, api: Api) -> str:
    """The output of a command, which is the same over the folder at the same moment."""
    now_s = time.time()
    clock = SimpleNamespace(time=lambda: now_s)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "time", clock)  # ages are in seconds
        over_http = tlora(*argv)
        in_folder = tlora(*argv, "--service", api.home.root)
    serve = f"tlora serve --service {api.home.root}"
    assert over_http.replace("tlora serve --http on its host", serve) == in_folder
    return over_http


def test_data_of_this_host_are_uploaded_once(
    address: str, api: Api, run_file: Path, tlora: Tlora
) -> None:
    one, two = tlora.json("submit", run_file, "--set", "jobs.two.lora.rank=7")
    documents = [api.store.jobs.document(job["id"])["document"] for job in (one, two)]
    files = [file.name for file in api.store.uploads.page(tenant="local")]
    assert sorted(files) == ["data.jsonl", "eval.jsonl"]
    assert documents[0]["data"]["train"] == documents[1]["data"]["train"]
    evaluation, again = documents[0]["data"]["eval"]
    assert Path(evaluation).read_text() == '{"text": "y"}\n'
    assert again == documents[0]["data"]["train"]
    assert (documents[1]["lora"]["rank"], documents[1]["max_steps"]) == (7, 5)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--set", "jobs.one.max_step=3"], "jobs[0].max_step is not a known key"),
        (["--set", "base_model={path: none}"], "base_model must name a base of the service"),
        (["--set", "jobs[1].name=one"], "FILE... must name job 'one' once"),
        (["--set", "jobs.one.data.train=no.jsonl"], "must be there, in your folder"),
        (["--set", "jobs.one.data.train=/etc/hostnam"], "must be the id of a file, or a path"),
        (["{file}"], "FILE... must name job 'one' once, got it 2 times"),
        (["--set", "rum.x=1"], "rum is not a known key"),
    ],
)
def test_refusals(still: Api, run_file: Path, argv: list[str], sentence: str, tlora: Tlora) -> None:
    words = [word.replace("{file}", str(run_file)) for word in argv]
    assert sentence in tlora("submit", run_file, *words, code=2)
    assert still.store.jobs.page() == []


def test_files_of_several_bases_go_one_by_one(
    address: str, run_file: Path, tmp_path: Path, tlora: Tlora
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(run_file.read_text().replace(BASE, "other"))
    assert "FILE... must be of one base" in tlora("submit", run_file, other, code=2)


def test_lists_and_actions_print_the_same(
    address: str, api: Api, run_file: Path, tlora: Tlora
) -> None:
    one, two = tlora.json("submit", run_file)
    serve_gang(api.store, api.home)
    start(api.store, one["id"])
    assert "1 validating, 1 running" in told(["jobs"], tlora, api)
    told(["jobs", "--all", "--state", "running"], tlora, api)
    listed = tlora.json("jobs")
    assert (listed["service"], listed["served"]) == (address, False)
    assert listed["counts"] == {"running": 1, "validating": 1}
    assert [job["name"] for job in listed["jobs"]] == ["one", "two"]
    assert f"one ({one['id']}): pause asked; it is running" in told(["pause", "one"], tlora, api)
    assert "cancel asked" in told(["cancel", two["id"], "one"], tlora, api)
    api.store.jobs.change(two["id"], JobState.CANCELLED)
    make_folder(api.home.job(two["id"])).joinpath("x").write_text("x")
    assert "would be asked to rm" in told(["rm", "--name", "t*", "--dry-run"], tlora, api)
    assert "1 byte" in told(["jobs", "--all", "--disk"], tlora, api)
    for argv in (["pause", "two"], ["cancel", "none"], ["logs", ".."]):
        assert tlora(*argv, code=2) == tlora(*argv, "--service", api.home.root, code=2)
    assert tlora.json("rm", "--state", "cancelled", "--yes")[0]["name"] == "two"
    assert not api.home.job(two["id"]).exists()


STEPS = [
    {"step": 1, "loss": 2.0, "lr": 0.1, "tokens": 1200},
    {"step": 1, "eval_loss": 1.5, "eval_exact_match": None},
]


def test_logs_and_adapters_are_the_same(
    address: str, api: Api, run_file: Path, tmp_path: Path, tlora: Tlora
) -> None:
    one = tlora.json("submit", run_file)[0]["id"]
    serve_gang(api.store, api.home)
    start(api.store, one)
    folder = make_folder(api.home.job(one))
    write_steps(api.home, one, *STEPS)
    api.store.events.add("saved", job=one, body={"step": 1})
    assert "step 1  eval_loss 1.5" in told(["logs", "one"], tlora, api)
    adapters = ("adapters", "one", "--out", tmp_path / "out")
    for service in ((), ("--service", api.home.root)):
        said = tlora(*adapters, *service, code=2)
        assert "job one must be finished, got 'running at step 3'" in said
    adapter = make_folder(folder / "adapter")
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    finish(api.store, one)
    assert "-> finished" in told(["logs", "-f", "one"], tlora, api)
    rows = [json.loads(line) for line in tlora("logs", "-f", "one", "--json").splitlines()]
    assert [row["kind"] for row in rows if row["kind"] != "event"] == ["step", "evaluation"]
    assert f"adapter of one ({one}): {tmp_path}/out" in tlora(*adapters)
    assert (tmp_path / "out/adapter_model.safetensors").read_bytes() == b"weights"


def test_why_a_job_waits_is_the_same(address: str, api: Api, run_file: Path, tlora: Tlora) -> None:
    one = tlora.json("submit", run_file)[0]["id"]
    api.store.jobs.change(one, JobState.QUEUED)
    api.store.boards.write(WHY_QUEUED, {one: "1 of 1 GPU is held by 1 job"})
    assert "one waits: 1 of 1 GPU is held by 1 job\n" in told(["jobs"], tlora, api)
    assert "          waits: 1 of 1 GPU is held" in told(["logs", "one"], tlora, api)


def test_waiting_for_jobs(
    address: str, api: Api, run_file: Path, tlora: Tlora, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(_: float) -> None:
        for job in api.store.jobs.page():
            api.store.jobs.change(job.id, JobState.FAILED, why="no", error="no")

    monkeypatch.setattr("tlora_megatron.cli.service.jobs.time.sleep", sleep)
    assert "one: failed: no" in tlora("submit", run_file, "--wait", code=1)


def test_without_a_token_or_a_service(
    address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tlora: Tlora
) -> None:
    monkeypatch.setenv("TLORA_TOKEN", "tml-wrong")
    assert "a token must be one of the service's" in tlora("jobs", code=2)
    monkeypatch.delenv("TLORA_TOKEN")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "a token for http://127.0.0.1" in tlora("jobs", code=2)
    monkeypatch.setenv("TLORA_TOKEN", "x")
    tlora("jobs", "--service", "http://", code=2)
    said = tlora("serve", "--gpus", "1", code=2)
    assert "--service must be a folder of this host for this command" in said
    monkeypatch.setattr("time.sleep", lambda _: None)
    tlora("jobs", "--service", "http://127.0.0.1:9", code=1)
    first, last, *_ = tlora.err.splitlines()
    told = "WARNING: nothing answers at http://127.0.0.1:9 ([Errno 111] Connection"
    assert first.startswith(told)
    assert "the service must answer at http://127.0.0.1:9, got" in last
    assert "check the address" in last
    said = tlora("jobs", "--service", "host:8017", code=2)
    assert "an address begins with http://, as in http://host:8017" in said
