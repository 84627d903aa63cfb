"""What a service is told: folder, bases, paths of users, files of runs; and gpt-oss, refused."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.helpers.launch import imported, modules_in
from tests.helpers.scenario import make_scenario
from tests.helpers.tiny_models import tiny_config
from tlora_megatron.config.job import ServiceSpec
from tlora_megatron.config.load import read_gang_config
from tlora_megatron.config.reader import ConfigError
from tlora_megatron.files import UserFiles, read_json, write_json
from tlora_megatron.runtime.resident import open_resident
from tlora_megatron.runtime.sampling.batcher import open_batcher
from tlora_megatron.runtime.sampling.values import SamplerLimits
from tlora_megatron.service import home as home_module
from tlora_megatron.service.home import Home, Lease, read_lease, write_lease
from tlora_megatron.service.prepare.submission import (
    PrepareRules,
    Refused,
    Submission,
    read_submissions,
    split_submissions,
)
from tlora_megatron.service.prepare.worker import validate
from tlora_megatron.service.settings import declare_bases, read_bases
from tlora_megatron.training.metrics import Reports


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_folder_and_its_files_are_the_users_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        home = Home.open(tmp_path / "new" / "service")
        write_json(home.root / "x.json", {"a": 1})
    finally:
        os.umask(old)
    for folder in (home.root, home.jobs, home.gangs, home.tokens, home.standby):
        assert _mode(folder) == 0o700
    assert _mode(home.root / "x.json") == 0o600
    assert read_json(home.root / "x.json") == {"a": 1}
    assert read_json(home.root / "y.json") is None


def test_an_open_or_foreign_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ValueError, match=r"closed to other users, got .* mode 0755; chmod 700"):
        Home.open(tmp_path)
    tmp_path.chmod(0o700)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--service must be a folder that can be used"):
        Home.open(tmp_path / "file")
    monkeypatch.setattr(home_module.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ValueError, match=r"folder of your own"):
        Home.open(tmp_path)


@pytest.mark.parametrize("name", ["", "..", "j/../x", "j1\n", "J1", "/etc", "j1/.."])
def test_only_ids_of_the_store_name_folders(name: str) -> None:
    home = Home(Path("/r"))
    assert home.job("j1a") == Path("/r/jobs/j1a")
    assert home.gang("g-1", 3) == Path("/r/gangs/g-1-3")
    with pytest.raises(ValueError, match="must match"):
        home.job(name)


def test_a_lease_is_read_back_and_a_damaged_one_is_nobodys(tmp_path: Path) -> None:
    assert read_lease(tmp_path) is None
    lease = Lease(gang="g1", epoch=2, lease=3)
    write_lease(tmp_path, lease)
    assert read_lease(tmp_path) == lease
    for damaged in ("", "[]", '{"gang":"g1"}', '{"gang":"g1","epoch":"x","lease":1}'):
        (tmp_path / "lease.json").write_text(damaged)
        assert read_lease(tmp_path) is None


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A service's folder beside a base."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text(json.dumps({}))
    return Home.open(tmp_path / "service")


def test_names_are_remembered_and_a_later_word_counts(home: Home, tmp_path: Path) -> None:
    assert read_bases(home) == {}
    declare_bases(home, [f"org/base-1.0={tmp_path}/base"])
    text = tmp_path / "base.yaml"
    text.write_text("base_model: {path: base, dtype: float32}\n")
    declare_bases(home, [f"exact={text}", f"org/base-1.0={tmp_path}/base"])
    declare_bases(home, [])
    found = read_bases(home)
    assert sorted(found) == ["exact", "org/base-1.0"]
    assert {base.path for base in found.values()} == {str(tmp_path / "base")}
    assert found["exact"].dtype == "float32"


@pytest.mark.parametrize("word", ["base", "=base", "../x={tmp}/base", "a b={tmp}/base", "a="])
def test_what_is_no_name(home: Home, tmp_path: Path, word: str) -> None:
    with pytest.raises(ConfigError, match=r"--base must be NAME=DIR or NAME=FILE\.yaml"):
        declare_bases(home, [word.format(tmp=tmp_path)])


def test_a_base_must_be_there_and_all_are_added_or_none(home: Home, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be an existing directory"):
        declare_bases(home, [f"good={tmp_path}/base", f"bad={tmp_path}/nowhere"])
    assert read_bases(home) == {}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root" / "a"
    folder.mkdir(parents=True)
    (folder / "data.jsonl").write_text("inside")
    (tmp_path / "outside").write_text("secret")
    return tmp_path / "root"


def test_a_file_and_a_folder_below_the_root(root: Path) -> None:
    files = UserFiles(root)
    with files.open_file(root / "a" / "data.jsonl", "data.train") as file:
        assert file.read() == b"inside"
    with files.open_folder(root / "a", "init_from") as folder:
        assert os.listdir(folder) == ["data.jsonl"]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("{root}/../outside", r"must not go up with \.\."),
        ("{root}/a/../../outside", r"must not go up with \.\."),
        ("{top}/outside", r"must be a path below"),
        ("/etc/passwd", r"must be a path below"),
        ("a/data.jsonl", r"must be a path below"),
        ("{root}2/x", r"must be a path below"),
        ("{root}", r"got that folder itself"),
        ("{root}/a\0b", r"must hold no null character"),
        ("{root}/link", r"links are not followed"),
        ("{root}/linked/outside", r"links are not followed"),
        ("{root}/inner/data.jsonl", r"links are not followed"),
        ("{root}/a", r"must be a regular file"),
        ("{root}/fifo", r"must be a regular file"),
        ("{root}/missing", r"No such file"),
        ("{root}/a/data.jsonl/x", r"must be a file that can be read"),
    ],
)
def test_what_leads_elsewhere_is_refused(root: Path, name: str, error: str) -> None:
    (root / "link").symlink_to(root.parent / "outside")
    (root / "linked").symlink_to(root.parent)
    (root / "inner").symlink_to(root / "a")  # even one that stays inside
    os.mkfifo(root / "fifo")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match=error) as caught:
        UserFiles(root).open_file(name.format(root=root, top=root.parent), "data.train of job 'x'")
    assert str(caught.value).startswith("data.train of job 'x' must ")
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_a_root_links_are_followed(root: Path) -> None:
    (root / "link").symlink_to(root.parent / "outside")
    with UserFiles().open_file(root / "link", "data.train") as file:
        assert file.read() == b"secret"
    with pytest.raises(ValueError, match="be a folder that can be read"):
        UserFiles().open_folder(root / "link", "init_from").__enter__()


JOB = {"name": "a", "data": {"train": "a.jsonl"}, "max_steps": 3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    return tmp_path


def _document(**more: Any) -> dict[str, Any]:
    return {"base_model": {"path": "base"}, **more}


def test_every_job_of_a_file_is_a_submission_that_travels(folder: Path) -> None:
    asked = {"gpus": 2, "max_slowdown": 2, "priority": -1}
    document = _document(
        defaults={"batch_size": 3},
        jobs=[JOB, {**JOB, "name": "b", "service": asked, "eval_every_steps": 2}],
        run={"output_dir": "x"},
        parallel={"tp_size": 2},
    )
    (folder / "run.json").write_text(json.dumps(document))
    (one, two), notes = read_submissions(folder / "run.json", ["jobs.a.lora.rank=4"])
    assert (one.name, one.job_spec().lora.rank, one.job_spec().batch_size) == ("a", 4, 3)
    assert one.document["data"]["train"] == str(folder / "a.jsonl")
    assert one.base_model["path"] == str(folder / "base")
    assert two.job_spec().service == ServiceSpec(gpus=2, max_slowdown=2.0, priority=-1)
    assert Submission.from_json(two.to_json()) == two
    assert [note.split(" ")[1] for note in notes] == ["parallel", "run", "of"]


def test_bases_that_differ_have_other_keys(folder: Path) -> None:
    keys = set()
    for more in ({}, {"dtype": "float32"}, {"path": "."}):
        document = _document(jobs=[JOB])
        document["base_model"].update(more)
        keys.add(split_submissions(document, folder).submissions[0].base_key)
    assert len(keys) == 3
    assert sum(key.startswith("base-") for key in keys) == 2


def test_a_single_job_needs_no_list(folder: Path) -> None:
    (one,), notes = split_submissions(_document(**JOB), folder)
    assert (one.name, notes) == ("a", ())


@pytest.mark.parametrize(
    ("document", "error"),
    [
        ({"jobs": [JOB]}, "base_model must be given"),
        (_document(jobs=[]), r"jobs must be a list of at least one job"),
        (_document(jobs=[JOB], jbos=1), r"jbos is not a known key"),
        (_document(jobs=[{**JOB, "max_steps": 0}]), r"jobs\[0\].max_steps must be at least 1"),
        (_document(jobs=[{**JOB, "service": {"gpu": 1}}]), r"jobs\[0\].service.gpu is not a known"),
        (_document(jobs=[{**JOB, "service": {"gpus": 0}}]), r"service.gpus must be at least 1"),
        (_document(jobs=[{**JOB, "data": {"train": "no"}}]), r"train must be an existing file"),
    ],
)
def test_mistakes_have_the_sentences_of_train(
    folder: Path, document: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        split_submissions(document, folder)


def test_the_service_without_its_worker_imports_no_torch() -> None:
    # These are other processes, which import torch or Ray.
    own = re.compile(r"tlora_megatron\.service\.(worker\b|engines\.ray\.bridge|sampling\.process)")
    names = [name for name in modules_in("service") if not own.match(name)]
    code = f"import importlib\nfor name in {names}: importlib.import_module(name)"
    assert not imported(code, "torch", "megatron", "transformers", "ray", "psycopg")


REFUSED = "must not be of model_type gpt_oss yet, got one; train its jobs with tlora train"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder with a config.json of gpt-oss, and nothing else."""
    folder = tmp_path / "base"
    tiny_config("gpt_oss").save_pretrained(folder)
    return folder


def test_bases_by_name(tmp_path: Path, base: Path) -> None:
    home = Home.open(tmp_path / "service")
    message = "--base must name a base of another model_type than gpt_oss, got .*oss=.*; train"
    with pytest.raises(ConfigError, match=message):
        declare_bases(home, [f"oss={base}"])
    assert read_bases(home) == {}


def test_jobs(tmp_path: Path) -> None:
    job = {"name": "a", "lora": {"target_modules": ["q_proj"]}}
    scenario = make_scenario(tmp_path / "jobs", [job], num_layers=1, model_type="gpt_oss")
    submission = read_submissions(scenario).submissions[0]
    home = Home.open(tmp_path / "service")
    found = validate("j1", submission, PrepareRules(root=str(home.root), micro_batch_tokens=256))
    assert isinstance(found, Refused)
    assert found.error == f"the base of job 'a' in a service {REFUSED}"
    assert not home.tokens.exists() or not any(home.tokens.iterdir())  # no data was read


def test_gangs_and_samplers(tmp_path: Path, base: Path) -> None:
    config = read_gang_config({"base_model": {"path": str(base)}}, tmp_path, output_dir=tmp_path)
    with (
        pytest.raises(ValueError, match=f"the base of a service {REFUSED}"),
        open_resident(config, events=Reports(None, logs=False), read_order=pytest.fail),
    ):
        pass
    with pytest.raises(ValueError, match=f"the base of a sampler {REFUSED}"):
        open_batcher({"path": str(base)}, SamplerLimits())
    assert not dist.is_initialized()
