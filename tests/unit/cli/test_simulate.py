"""`tlora simulate` from files to files."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.helpers.commands import Tlora
from tests.helpers.html_page import Page, check_loads_nothing

POLICIES = "isolated,isolated_sjf,mlora,tlora,tlora_best"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "small.csv"
    lines = [f"{i},{30 * i},{600 + 10 * i},{(1, 2, 8, 128)[i % 4]}" for i in range(40)]
    path.write_text("\n".join(["job_id,submit_time,duration,gpu_num", *lines]))
    return path


@pytest.fixture
def arguments(repo: Path, trace: Path) -> list[str]:
    cluster = repo / "configs" / "hardware" / "cluster-128xA100.yaml"
    return ["simulate", "--trace", str(trace), "--cluster", str(cluster), "--policy", POLICIES]


def test_json_is_the_agreed_schema(arguments: list[str], tlora: Tlora) -> None:
    paid = ("--gpu-hour-price", "2.5", "--gpu-watts", "400")
    document = tlora.json(*arguments, "--load", "2", "--seed", "5", *paid)
    assert list(document) == ["trace", "cluster", "load", "seed", "policies", "least_jct_s"]
    assert (document["trace"], document["load"], document["seed"]) == ("small", 2.0, 5)
    assert list(document["policies"]) == POLICIES.split(",")
    for numbers in document["policies"].values():
        assert {"mean_jct_s", "wall_s"} <= set(numbers)
        assert numbers["jobs_finished"] == 40
        assert 0 < numbers["gpu_utilisation"] < 1
        assert numbers["cost"] == pytest.approx(2.5 * numbers["gpu_hours"], abs=0.01)
        assert numbers["energy_kwh"] == pytest.approx(0.4 * numbers["gpu_hours"], abs=0.01)
    least_s = document["least_jct_s"]
    assert 0 < least_s <= min(n["mean_jct_s"] for n in document["policies"].values())
    assert document["policies"]["isolated"]["max_slowdown"] == pytest.approx(1)
    assert document["policies"]["tlora"]["max_slowdown"] <= 1.5 + 1e-6


def test_load_is_the_offered_load(arguments: list[str], tlora: Tlora) -> None:
    """The trace: ten times 1, 2, 8 and 128 GPUs for about 810 s, on 128 GPUs for 1,170 s."""
    only = [*arguments, "--policy", "isolated"]
    assert tlora.json(*only)["load"] == pytest.approx(7.51, abs=0.01)
    shown = " ".join(tlora(*only, "--load", "0.5").split())
    assert "offered load 0.50" in shown
    assert "no policy beats" in shown


def test_no_bound_where_jobs_fail(arguments: list[str], tlora: Tlora) -> None:
    """Which jobs finish depends on the policy then."""
    only = [*arguments, "--policy", "isolated", "--job-failures", "0.1"]
    assert tlora.json(*only)["least_jct_s"] is None


def test_files_are_the_seeds_to_the_byte(
    arguments: list[str], tmp_path: Path, tlora: Tlora
) -> None:
    written = []
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        paths = [tmp_path / f"{name}{end}" for end in (".csv", "-jobs.csv", ".html")]
        options = ["--csv", "--jobs-csv", "--html"]
        if name == "c":  # its report, which takes as long as the rest, is compared with none
            paths, options = paths[:2], options[:2]
        extra = [text for pair in zip(options, map(str, paths), strict=True) for text in pair]
        extra += ["--policy", "isolated,tlora_best"]
        tlora(*arguments, *extra, "--seed", seed, "--job-failures", "0.1")
        written.append([path.read_bytes() for path in paths])
    assert written[0] == written[1]
    assert written[0][1] != written[2][1]
    assert "tlora_best" in tlora.out
    with (tmp_path / "a-jobs.csv").open() as file:
        jobs = list(csv.DictReader(file))
    assert len(jobs) == 2 * 40
    assert {job["status"] for job in jobs} == {"finished", "failed"}


def test_the_report_is_one_page_that_loads_nothing(
    arguments: list[str], tmp_path: Path, tlora: Tlora
) -> None:
    path = tmp_path / "report.html"
    tlora(*arguments, "--html", path)
    text = path.read_text()
    check_loads_nothing(text, Page(text))
    assert text.count("<figure>") == 6 + 5
    assert text.count("<svg") == text.count("</svg>") == 6 + 5
    for name in POLICIES.split(","):
        assert text.count(f">{name}<") + text.count(f"</i>{name}") >= 2


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--policy", "fifo"], "policy must be one of isolated"),
        (["--policy", ","], "--policy must name policies once each, got ''"),
        (["--policy", "mlora,mlora"], "--policy must name policies once each"),
        (["--load", "0"], "load must be positive and finite, got 0.0"),
        (["--mix", "nothing"], "--mix must be a file or one of"),
        (["--max-slowdown", "0.5"], "--max-slowdown must be at least 1, got 0.5"),
        (["--job-failures", "2"], "faults.job_failures must be at most 1, got 2"),
        (
            ["--csv", "/nowhere/x.csv"],
            "folder that exists, got '/nowhere/x.csv'; mkdir -p /nowhere",
        ),
        (["--csv", "/"], "--csv must name a file, not a directory, got '/'"),
        (["--gpu-watts", "-1"], "--gpu-watts must be a number from 0 on, got -1.0"),
        (["--gpu-hour-price", "nan"], "--gpu-hour-price must be a number from 0 on, got nan"),
        (["--seed", "-1"], "--seed must be at least 0, got -1"),
        (["--cluster", "nothing.yaml"], "--cluster must be a readable file, got"),
        (["--trace", "no.csv"], "--trace must be a readable text file, got 'no.csv'; No such"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], extra: list[str], message: str, tlora: Tlora
) -> None:
    said = tlora(*arguments, *extra, code=2)
    assert message in said
    assert said.count("\n") == 1, "no hint at TLORA_DEBUG"


@pytest.mark.parametrize("option", ["--csv", "--jobs-csv", "--html"])
def test_the_trace_is_not_overwritten(
    arguments: list[str], trace: Path, option: str, tlora: Tlora
) -> None:
    before = trace.read_bytes()
    assert f"{option} must leave {trace}, which is read, as it is" in tlora(
        *arguments, option, trace, code=2
    )
    assert trace.read_bytes() == before


def test_a_cluster_of_ones_own_names_shipped_profiles(
    arguments: list[str], repo: Path, tmp_path: Path, tlora: Tlora
) -> None:
    text = (repo / "configs" / "hardware" / "cluster-128xA100.yaml").read_text()
    mine = tmp_path / "mine.yaml"
    mine.write_text(text)
    tlora(*arguments, "--cluster", mine, "--policy", "isolated", "--json")
    mine.write_text(text.replace("a100-80g", "a100"))
    expected = "cluster.profile must be a file or one of a100-80g, "
    assert expected in " ".join(tlora(*arguments, "--cluster", mine, code=2).split())
