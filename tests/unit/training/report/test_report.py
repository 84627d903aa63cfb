"""The report is one self-contained, well-formed, light page, for any state of a run."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.html_page import Page, check_loads_nothing
from tlora_megatron.training.metrics import JobMetrics, write_summary
from tlora_megatron.training.run import curves as report_curves
from tlora_megatron.training.run import report
from tlora_megatron.training.run.curves import PanelStyle, ReportJob, has_dots, overview, read_jobs
from tlora_megatron.training.run.report import Report

pytest.importorskip("matplotlib")

PANELS = ("Loss", "Gradient norm before clipping", "Learning rate")


def write_job(
    out: Path, name: str, steps: int, *, bad: frozenset[int] = frozenset(), eval_every: int = 10**9
) -> None:
    rng = np.random.default_rng(len(name))
    with JobMetrics(out, name, tensorboard=False, wandb_project=None) as job:
        job.log_eval(0, 4.0, 0.0)
        for step in range(1, steps + 1):
            loss = math.nan if step in bad else 3 * math.exp(-2 * step / steps) + rng.random() / 9
            norm = float(rng.lognormal(-1, 0.5))
            job.log_step(step, loss, norm, 1e-3 / step, 40, 100, 0.2, skipped=step in bad)
            if step % eval_every == 0:
                job.log_eval(step, loss, step / steps / 2)
        job.log_eval(steps, 0.75, 0.5)


def write_config(out: Path, names: list[str]) -> None:
    jobs = [
        {"name": name, "lora": {"rank": 6, "target_modules": ["q_proj"]}, "max_steps": 300}
        for name in names
    ]
    config = {"base_model": {"path": "tiny"}, "parallel": {"tp_size": 2}, "jobs": jobs}
    (out / "config.json").write_text(json.dumps(config))


def page_of(out: Path) -> tuple[str, Page]:
    path = Report(out).write()
    assert path == out / "report.html"
    text = path.read_text(encoding="utf-8")
    return text, Page(text)


def card_of(text: str, index: int) -> str:
    return text.split(f'id="job-{index}"')[1].split("</section>")[0]


def test_page_is_self_contained(tmp_path: Path) -> None:
    write_config(tmp_path, ["a", "b"])
    write_job(tmp_path, "a", 250, bad=frozenset({7}))
    write_job(tmp_path, "b", 20)
    text, page = page_of(tmp_path)
    check_loads_nothing(text, page)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "jobs", "report.html"]


def test_curves_drawn_beside_the_last_saves_are_not_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a", "b"]
    write_config(tmp_path, names)
    for name in names:
        write_job(tmp_path, name, 30)
    drawn = []

    def record(job: ReportJob, key: str, style: PanelStyle) -> str:
        drawn.append((job.name, key, threading.current_thread().name))
        return f"<svg>{job.name} {key}</svg>"

    monkeypatch.setattr(report, "panel", record)
    page = Report(tmp_path)
    page.draw_beside()
    page._thread.join()
    write_summary(tmp_path, {"run": {"rounds": 77}, "jobs": {"c": {"status": "rejected"}}})
    text = page.write().read_text(encoding="utf-8")
    assert len(drawn) == len(set(drawn)) == 12  # the four curves of c are drawn at the end
    assert {thread for name, _, thread in drawn if name != "c"} == {"report"}
    assert "<b>77</b>" in text
    assert "<svg>b loss</svg>" in text


@pytest.mark.slow
def test_every_job_has_every_curve_and_its_own_colour(tmp_path: Path) -> None:
    names = ["a", "b", "c"]
    write_config(tmp_path, names)
    for name in names:
        write_job(tmp_path, name, 30)
    text, page = page_of(tmp_path)
    for title in (*PANELS, "Exact match"):
        assert page.words.count(title) == len(names) + (title == "Exact match")
    for index, name in enumerate(names):
        card = card_of(text, index)
        assert card.count("<svg") == 4
        assert f"--job:var(--c{index})" in card
        assert card.count("stroke:var(--job)") >= 4
        assert f"<title>{name}</title>" in text
    assert "no values" not in text


def test_exact_match_is_left_out_when_no_job_measures_it(tmp_path: Path) -> None:
    with JobMetrics(tmp_path, "a", tensorboard=False, wandb_project=None) as job:
        job.log_step(1, 1.0, 1.0, 1e-3, 4, 8, 0.1)
        job.log_eval(1, 1.0, None)
    text, _ = page_of(tmp_path)
    assert "Exact match" not in text
    assert card_of(text, 0).count("<svg") == 3


def test_finished_run_shows_its_summary(tmp_path: Path) -> None:
    write_job(tmp_path, "a", 10)
    layout = {"tp_size": 2, "pp_size": 1, "cp_size": 1, "dp_size": 4, "sequence_parallel": True}
    run = {"tokens_per_s": 14250.4, "world_size": 8, "layout": layout, "wall_time_s": 3719.7}
    job = {"status": "finished", "steps": 10, "max_steps": 10, "rank": 24, "last_loss": 0.125}
    job |= {"eval_loss_before": 4.5, "eval_loss_after": 0.0005, "exact_match_before": 0.0}
    job |= {"exact_match_after": 0.97, "tokens": 123456, "skipped_steps": 0, "num_blocks": 4}
    job |= {"truncated_sequences": 77}
    run |= {"resumed": True}
    versions = {"torch": "2.13.0"}
    write_summary(tmp_path, {"run": run | {"versions": versions}, "jobs": {"a": job}})
    text, page = page_of(tmp_path)
    for shown in (
        "14,250",
        "TP 2 · PP 1 · CP 1 · DP 4",
        "1:02:00",
        "2.13.0",
        "123,456",
        "wall time since it was continued",
    ):
        assert shown in text, shown
    for shown in ("10 / 10", "24 / 4 blocks", "0.125", "5e-4", "97 %", "77"):
        assert shown in page.words, shown
    assert "finished · written" in text


def test_running_run_falls_back_to_its_metrics(tmp_path: Path) -> None:
    write_config(tmp_path, ["going", "queued"])
    write_job(tmp_path, "going", 150)
    text, page = page_of(tmp_path)
    assert "in progress" in text
    assert {"150 / 300", "0 / 300", "running", "waiting", "15,000"} <= set(page.words)
    assert card_of(text, 1).count("no values") == 4
    assert len(page.ids) == len(set(page.ids))


@pytest.mark.parametrize("jobs", [[], ["a"], ["a", "b"]])
def test_run_without_a_line_has_a_report(tmp_path: Path, jobs: list[str]) -> None:
    if jobs:
        write_config(tmp_path, jobs)
    for name in jobs:
        JobMetrics(tmp_path, name, tensorboard=False, wandb_project=None).close()
    text, _ = page_of(tmp_path)
    assert text.count('class="card"') == len(jobs)


@pytest.mark.parametrize(
    ("states", "said"),
    [
        (("finished", "finished"), "finished · "),
        (("finished", "failed"), "ended: 1 finished, 1 failed · "),
        (("running", "failed"), "stopped: 1 running, 1 failed · "),
        (("finished", "rejected"), "ended: 1 finished, 1 rejected · "),
    ],
)
def test_failed_jobs_are_in_the_title_and_their_reasons_on_the_page(
    tmp_path: Path, states: tuple[str, str], said: str
) -> None:
    jobs = {f"job{i}": {"status": s, "reason": f"job {i} is {s}"} for i, s in enumerate(states)}
    write_summary(tmp_path, {"run": {"rounds": 3}, "jobs": jobs})
    text, page = page_of(tmp_path)
    assert f"<p>{said}written" in text
    if states[1] != "finished":
        assert f"job 1 is {states[1]}" in "".join(page.words)
        assert f'class="chip {states[1]}"' in text


@pytest.mark.slow
def test_axes_are_titled_and_evaluations_are_dots_at_both_widths(tmp_path: Path) -> None:
    write_config(tmp_path, ["a", "b"])
    for name in ("a", "b"):
        write_job(tmp_path, name, 30, eval_every=10)
    text, page = page_of(tmp_path)
    assert page.words.count("optimizer step") == 2 * 4 + 2
    wide, narrow = text.split('<div class="wide">')[1].split('<div class="narrow">')
    for picture in (wide, narrow.split("</div>")[0]):
        assert picture.count("<use ") == 2 * 4
    assert "dots: evaluation" in page.words
    jobs = read_jobs(tmp_path, {}, {})
    assert not has_dots(jobs * 5)


def test_names_and_reasons_are_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>&\"'$x$"
    jobs = {name: {"status": evil, "reason": evil} for name in (evil, "b")}
    write_job(tmp_path, "b", 5)
    write_summary(tmp_path, {"run": {"versions": {evil: evil}}, "jobs": jobs})
    write_config(tmp_path, [evil])
    text, page = page_of(tmp_path)
    assert "<script" not in text
    assert evil in page.words


@pytest.mark.slow
def test_long_curves_are_smoothed_over_the_raw_values(tmp_path: Path) -> None:
    for name, steps in (("short", 200), ("longer", 201)):
        write_job(tmp_path, name, steps)
    text, _ = page_of(tmp_path)
    longer, short = card_of(text, 0), card_of(text, 1)
    assert longer.count("stroke-opacity:0.3") == 2  # loss and gradient norm, not the schedule
    assert "stroke-opacity" not in short


@pytest.mark.slow
def test_incidents_are_marked_in_their_job_only(tmp_path: Path) -> None:
    write_job(tmp_path, "a", 40, bad=frozenset({3, 20}))
    write_job(tmp_path, "b", 40)
    text, page = page_of(tmp_path)
    card = card_of(text, 0)
    ticks = [path for path in re.findall(r"<path [^>]*>", card) if "--bad" in path]
    assert [path.count("M") for path in ticks] == [2, 2]  # in loss and gradient norm
    assert "--bad" not in card_of(text, 1)
    assert "2" in page.words


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_extreme_values_can_be_drawn(tmp_path: Path) -> None:
    with JobMetrics(tmp_path, "a", tensorboard=False, wandb_project=None) as job:
        for step in range(1, 300):
            loss = 1e30 if step % 50 == 0 else 1e-30
            job.log_step(step, loss, 0.0 if step < 200 else 1e9, 0.0, 4, 8, 0.1)
    write_job(tmp_path, "b", 1)
    page_of(tmp_path)


@pytest.mark.slow
def test_page_with_64_long_jobs_is_below_one_megabyte(tmp_path: Path) -> None:
    write_job(tmp_path, "a", 1200, bad=frozenset(range(5, 1200, 100)), eval_every=100)
    (job,) = read_jobs(tmp_path, {}, {})
    jobs = [
        ReportJob(index=i, name=f"job{i}", summary={}, config={}, records=job.records)
        for i in range(64)
    ]
    style = PanelStyle.for_jobs(jobs)
    card = report._card(jobs[0], list(report._TITLES), style, report.panel)
    assert len(overview(jobs, style)) + 64 * len(card) < 1_000_000
    few = PanelStyle.for_jobs(jobs[:4])
    assert few.num_points > 2 * style.num_points


def test_thinning_keeps_ends_and_spikes() -> None:
    steps, values = np.arange(5000.0), np.zeros(5000)
    values[1234], values[4321] = 9, -9
    thin_steps, thin_values = report_curves._thin((steps, values), 100)
    assert len(thin_steps) <= 102
    assert (thin_values.max(), thin_values.min()) == (9, -9)
    assert (thin_steps[0], thin_steps[-1]) == (0, 4999)
    assert (np.diff(thin_steps) > 0).all()


@pytest.mark.parametrize("log", [False, True])
def test_smoothing_is_the_windowed_mean(log: bool) -> None:
    values = np.random.default_rng(0).lognormal(size=401)
    smooth = report_curves._smooth(values, log=log)
    for i in (0, 2, 200, 400):
        window = values[max(0, i - 4) : i + 5]
        expected = np.exp(np.log(window).mean()) if log else window.mean()
        assert smooth[i] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], False), ([5.0], False), ([0.1, 2.0], False), ([0.1, 4.0], True), ([0.0, 9.0], False)],
)
def test_log_axis_is_for_positive_wide_values(values: list[float], expected: bool) -> None:
    assert report_curves._wants_log(np.asarray(values)) == expected


def test_without_matplotlib_pip_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_job(tmp_path, "a", 3)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = "an HTML report needs matplotlib; pip install matplotlib"
    with pytest.raises(ImportError, match=message):
        Report(tmp_path).write()


@pytest.mark.parametrize("text", ["{", "[1]", '"x"'])
def test_corrupt_summary_is_refused_and_the_old_report_stays(tmp_path: Path, text: str) -> None:
    write_job(tmp_path, "a", 3)
    before = Report(tmp_path).write().read_bytes()
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(ValueError, match=r"summary\.json must hold a JSON object, got"):
        Report(tmp_path).write()
    assert (tmp_path / "report.html").read_bytes() == before


@pytest.mark.slow
def test_nano_batches_have_a_picture(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_config(tmp_path, ["a"])
    write_job(tmp_path, "a", 20)
    assert "Nano-batches" not in page_of(tmp_path)[0]
    lines = [
        {"step": step, "nano_batches": 1 + step % 3, "time_s": 9.0 if step == 1 else 0.1 + step % 3,
         "tokens": 8192, "phase": "explore", "kept": 2, "jobs": 1, "mix": "m"}
        for step in range(1, 40)
    ]  # fmt: skip
    trace = tmp_path / "nano_batches.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 40, "na')
    trace.write_text('{"step": 0}\nnonsense\n' + trace.read_text())
    text, page = page_of(tmp_path)
    assert f"{trace}:1 is passed over: nano_batches must be" in caplog.text
    section = text.split("<h2>Nano-batches</h2>")[1]
    assert "kept at the end: <b>2</b>" in section
    assert all(f"var(--c{color})" in section for color in range(3))
    assert len(page.ids) == len(set(page.ids))
    assert set(page.references) <= set(page.ids)
