"""Profiles on disk, how they are fitted, and the lengths of jobs' data."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.commands import Tlora
from tests.helpers.planner_case import HARDWARE, memory_use
from tests.unit.runtime.planning.conftest import ProfileFile
from tlora_megatron.cli.profile import profile_json
from tlora_megatron.config.load import load_config
from tlora_megatron.config.reader import ConfigError
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.hardware import LoraCost, load_profile
from tlora_megatron.profiling.ops import LoraSample
from tlora_megatron.profiling.profile import fit_lora, non_negative_fit
from tlora_megatron.runtime.planning.plan_files import start_command
from tlora_megatron.runtime.planning.plan_inputs import (
    base_shape,
    parse_lengths,
    plan_hardware,
    plan_jobs,
    profile_of_gpu,
    run_hardware,
)

SHIPPED = (
    "h200", "h200-infiniband", "h100", "h100-infiniband", "a100-80g", "l40s", "b200", "gb200",
)  # fmt: skip


def test_a_profile_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(profile_json(HARDWARE))
    assert load_profile(path) == HARDWARE
    path.write_text(json.dumps(asdict(HARDWARE)))
    assert load_profile(path) == HARDWARE


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_profiles_are_whole_and_say_where_they_are_from(name: str) -> None:
    profile = plan_hardware(name)
    assert profile.name == name
    assert profile.notes or profile.source == "measured"
    assert profile.source == "datasheet" or profile.versions


def test_a_rack_of_one_nvlink_is_started_on_each_of_its_hosts(tmp_path: Path) -> None:
    line = start_command(tmp_path / "run.yaml", 72, plan_hardware("gb200"))
    assert '--nnodes 18 --rdzv-backend c10d --rdzv-endpoint "${RDZV_ENDPOINT:?must be' in line
    assert "--nproc-per-node 4 " in line


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda d: d.pop("memory_bytes"), "hardware.memory_bytes must be given"),
        (lambda d: d["intra_node"].update(bytes_per_s=-1), "bytes_per_s must be above 0, got -1"),
        (lambda d: d.update(gemms=[]), "hardware.gemms must not be empty"),
        (lambda d: d["gemms"][0].update(rows=0), r"gemms\[0\].rows must be at least 1, got 0"),
        (lambda d: d.update(overlap=1.5), "overlap must be at most 1, got 1.5"),
        (lambda d: d.update(dat="x"), "hardware.dat is not a known key; did you mean date"),
        (lambda d: d.update(date="yesterday"), "hardware.date must be a day"),
        (lambda d: d.update(source="guess"), "source must be one of measured, datasheet"),
        (lambda d: d.update(nics_per_node=0), "hardware.nics_per_node must be at least 1, got 0"),
        (
            lambda d: d.update(nics_per_node=8, inter_node=None),
            "hardware.nics_per_node must be given with inter_node, the link of each card, got 8",
        ),
        (
            lambda d: d.update(gpus_per_host=3),
            "hardware.gpus_per_host must divide gpus_per_node = 8, got 3",
        ),
    ],
)
def test_a_bad_profile_is_refused_by_name(
    profile_file: ProfileFile, change: Any, match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        load_profile(profile_file(change))


def test_an_unknown_profile_names_those_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"--hardware must be a file or one of .*h200.*got 'b300'"
    ):
        plan_hardware("b300")


def test_a_profile_of_the_working_folder_is_found_by_name(
    profile_file: ProfileFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "configs" / "hardware"
    folder.mkdir(parents=True)
    profile_file(name="mine").rename(folder / "mine.json")
    monkeypatch.chdir(tmp_path)
    assert plan_hardware("mine").name == "mine"
    assert plan_hardware("h200").name == "h200"
    with pytest.raises(ConfigError, match=r"one of .*h200-infiniband, l40s, mine, got 'theirs'"):
        plan_hardware("theirs")


def test_a_profile_of_the_working_folder_is_found_by_its_gpu(
    profile_file: ProfileFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "configs" / "hardware"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert profile_of_gpu("abacus") is None
    ours = profile_file(name="mine", gpu="abacus")
    ours.rename(folder / "mine.json")
    (folder / "notes.json").write_text("{}")
    found = profile_of_gpu("abacus")
    assert found is not None
    assert found.name == "mine"


@pytest.mark.parametrize("text", ["", "abc", "10:x", "1", "512:-3", "512:0", ":4"])
def test_bad_lengths_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--lengths must"):
        parse_lengths(text)


def test_memory_counts_the_runs_own_dtype(
    quickstart: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(quickstart)
    assert run_hardware("h200", config) == replace(plan_hardware("h200"), dtype="float32")
    assert "measured in bfloat16, the run is in float32" in caplog.text
    caplog.clear()
    half = load_config(quickstart, ["base_model.dtype=bfloat16"])
    assert run_hardware("h200", half) == plan_hardware("h200")
    assert not caplog.text
    spec = base_shape(config.base_model)
    loads = plan_jobs(config, spec, parse_lengths("64"))
    whole, halved = (
        memory_use(spec, loads, Plan(), run_hardware("h200", c)).base_weights
        for c in (config, half)
    )
    assert whole == 2 * halved


def test_lengths_are_rows_one_less_than_tokens() -> None:
    assert parse_lengths("513").pairs == ((512, 1.0),)
    assert parse_lengths("257:3,1025:1").pairs == ((256, 0.75), (1024, 0.25))


def test_lengths_come_from_the_jobs_data_and_are_kept(
    quickstart: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(quickstart)
    spec = base_shape(config.base_model)
    first = plan_jobs(config, spec, None)
    monkeypatch.setattr(
        "tlora_megatron.training.data.job_data.load_job_data",
        lambda *_: pytest.fail("not from the cache"),
    )
    assert plan_jobs(config, spec, None) == first
    assert [job.name for job in first] == ["mirror", "ordered", "sums", "records"]
    assert all(job.lengths.longest < config.jobs[i].max_seq_len for i, job in enumerate(first))
    assert all(0 < job.target_share < 1 for job in first)
    option = plan_jobs(config, spec, parse_lengths("40:1,5000:1"))
    assert option[0].lengths.longest == config.jobs[0].max_seq_len - 1


def test_what_max_seq_len_cuts_off_given_lengths_is_told(
    quickstart: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(quickstart, ["jobs.mirror.max_seq_len=100"])
    limits = sorted({job.max_seq_len for job in config.jobs})
    spec = base_shape(config.base_model)
    plan_jobs(config, spec, parse_lengths(str(limits[0])))
    assert not caplog.text
    plan_jobs(config, spec, parse_lengths("50:3,200:1"))
    said = [record.message for record in caplog.records]
    assert len(said) == len([limit for limit in limits if limit < 200])
    (mirror,) = (line for line in said if "max_seq_len 100 of job mirror cuts" in line)
    # 100 of the 350 tokens of four sequences
    assert "cuts 25.00% of the sequences and loses 28.57% of all tokens, as training will" in mirror
    assert "Raise max_seq_len to 200, or" in mirror
    refuses = load_config(quickstart, ["jobs.mirror.data.overlong=error"])
    with pytest.raises(ConfigError, match=r"max_seq_len 64 of job 'mirror', .* got 200; raise"):
        plan_jobs(refuses, spec, parse_lengths("200"))
    caplog.clear()
    split = ["jobs.mirror.data.overlong=split", "jobs.mirror.max_seq_len=81"]
    planned, *_ = plan_jobs(load_config(quickstart, split), spec, parse_lengths("51:3,200:1"))
    # 199 predicted tokens are 80 + 80 + 39
    assert planned.lengths.pairs == ((39, 1 / 6), (50, 0.5), (80, 2 / 6))
    assert "max_seq_len 81" not in caplog.text


def test_what_is_cut_is_told_from_kept_lengths_too(
    quickstart: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(quickstart, ["jobs.mirror.max_seq_len=40"])
    spec = base_shape(config.base_model)
    for _ in range(2):
        caplog.clear()
        plan_jobs(config, spec, None)
        assert "sequences cut to max_seq_len 40" in caplog.text


def test_coefficients_are_found_again_and_never_negative() -> None:
    draw = np.random.default_rng(0)
    features = draw.random((200, 4))
    true = np.array([1.0, 0.0, 2.5, 0.5])
    assert non_negative_fit(features, features @ true, np.ones(200)) == pytest.approx(
        true, abs=1e-6
    )
    opposed = non_negative_fit(features, features @ np.array([1.0, -1, 0, 0]), np.ones(200))
    assert (opposed >= 0).all()


def test_adapters_coefficients_explain_the_samples_they_come_from() -> None:
    truth = LoraCost(**{field.name: 1.0 + number for number, field in enumerate(fields(LoraCost))})
    samples = [_sample(truth, *counts) for counts in np.random.default_rng(0).random((60, 7))]
    found, error = fit_lora(samples)
    assert error < 0.001
    assert asdict(found) == pytest.approx(asdict(truth), rel=0.02)
    with pytest.raises(ValueError, match="samples must hold at least one"):
        fit_lora([])


def _sample(cost: LoraCost, frozen_s: float, *counts: float) -> LoraSample:
    """What a linear with such counts takes."""
    x = LoraSample(0.0, 0.0, 1.0 + frozen_s, *counts)
    forward = (
        cost.forward_fixed_s
        + cost.forward_input_s * x.input_elements
        + cost.forward_rank_s * x.rank_columns
        + cost.forward_factor_s * x.gradients
        + cost.forward_dropout_s * x.dropped
    )
    backward = (
        cost.backward_fixed_s
        + cost.backward_stream_s * (2 * x.output_elements + x.input_elements)
        + cost.backward_rank_s * x.rank_inputs
        + cost.backward_factor_s * x.gradients
        + cost.backward_dropout_s * x.dropped
    )
    return x._replace(forward_s=forward, backward_s=backward)


def test_profile_wants_a_json_file_and_a_budget(tmp_path: Path, tlora: Tlora) -> None:
    assert "--out must end with .json" in tlora("profile", "--out", tmp_path / "x.yaml", code=2)
    assert "budget_s must be above 0, got 0" in tlora(
        "profile", "--out", tmp_path / "x.json", "--budget-s", "0", code=2
    )
    tlora("profile", "--out", tmp_path / "x.json", "--gpus-per-node", "0", code=2)
