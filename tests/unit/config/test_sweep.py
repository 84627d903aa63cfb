"""Trials as they are read, and which of them go on from a rung."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tlora_megatron.config.load import load_config, load_sweep
from tlora_megatron.config.reader import ConfigError
from tlora_megatron.config.rungs import Halving, num_kept, ordinal, ranked, rung_steps
from tlora_megatron.config.sweep import StopSpec, SweepSpec, read_sweep, settings_text

JOB = {"name": "math", "data": {"train": "a.jsonl", "eval": "b.jsonl"}, "max_steps": 9}
OVER = {"optimizer.lr": [1e-4, 1e-3], "lora.rank": [8, 32]}


def trials(job: Any = JOB, **sweep: Any) -> list[dict[str, Any]]:
    return list(map(dict, read_sweep(sweep, job)[0].settings.values()))


def test_a_grid_a_list_and_what_is_drawn() -> None:
    sweep, jobs = read_sweep({"over": OVER}, JOB)
    assert list(sweep.settings) == ["math-0", "math-1", "math-2", "math-3"]
    pairs = itertools.product((1e-4, 1e-3), (8, 32))
    assert trials(over=OVER) == [{"optimizer.lr": lr, "lora.rank": rank} for lr, rank in pairs]
    assert jobs[1] == JOB | {"name": "math-1", "optimizer": {"lr": 1e-4}, "lora": {"rank": 32}}
    assert trials(list=[{"seed": 1}, {"seed": 2, "lora.dropout": 0.1}])[1]["lora.dropout"] == 0.1
    assert trials(over={"optimizer.lr": ["1e-4", 1e-3]})[0] == {"optimizer.lr": 1e-4}
    some = trials(over=OVER, trials=3)
    assert len(some) == 3
    assert all(trial in trials(over=OVER) for trial in some)


def test_draws_lie_between_their_ends_and_do_not_depend_on_their_number() -> None:
    over = {
        "optimizer.lr": {"log_uniform": ["1e-5", 1e-3]},
        "lora.rank": {"uniform": [2, 8]},
        "lora.use_rslora": [True, False],
    }
    many = trials(over=over, trials=64, seed=3)
    assert trials(over=over, trials=5, seed=3) == many[:5]
    assert trials(over=over, trials=5, seed=4) != many[:5]
    rates = [trial["optimizer.lr"] for trial in many]
    assert 1e-5 <= min(rates) < 1e-4 < max(rates) <= 1e-3
    assert {trial["lora.rank"] for trial in many} == set(range(2, 9))
    assert {trial["lora.use_rslora"] for trial in many} == {True, False}


UNIFORM = {"uniform": [0, 0.5]}


@pytest.mark.parametrize(
    ("sweep", "told"),
    [
        ({"over": {"lora.rnak": [1]}}, "lora.rnak is not a known key; did you mean lora.rank?"),
        ({"over": {"data.train": ["x"]}}, "sweep.over must not set data: losses on other"),
        ({"over": {"max_seq_len": [8, 9]}}, "sweep.over must not set max_seq_len: it cuts"),
        ({"over": {"preference.beta": [0.1, 0.2]}}, "must not set preference: another loss"),
        ({"list": [{"name": "x"}]}, r"sweep.list\[0\] must not set name: every trial gets a name"),
        ({}, "sweep must set exactly one of over and list, got neither"),
        ({"over": OVER, "list": [{"seed": 1}]}, "exactly one of over and list, got both"),
        ({"over": {}}, "sweep.over must not be empty"),
        ({"over": {"lora.rank": []}}, "sweep.over.lora.rank must not be empty"),
        ({"over": {"lora.rank": 8}}, "must be a list of values, or one of uniform, log"),
        ({"over": {"lora.dropout": UNIFORM}}, "sweep.trials must be given: sweep.over.lora"),
        ({"over": {"lora.dropout": {"uniform": [1, 0]}}}, "have its first end below its second"),
        ({"over": {"lora.dropout": {"log_uniform": [0, 1]}}}, "its first end above 0 and below"),
        ({"over": {"schedule.name": UNIFORM}}, "must be a list of values: it is no number"),
        ({"over": OVER, "trials": 5}, "at most the 4 combinations of sweep.over, got 5"),
        ({"over": {"seed": [*range(64)], "lora.rank": [*range(1, 65)]}}, "1,024 trials, got 4,096"),
        ({"over": {"lora.dropout": UNIFORM}, "trials": 5000}, "1,024 trials, got 5,000"),
        ({"list": [{"seed": 1}, {"seed": 1}]}, "trials of a sweep must differ, got 1 as 0"),
        ({"over": OVER, "stop": {"keep": 1, "at": [0.1]}}, "sweep.stop.keep must be below 1"),
        ({"over": OVER, "stop": {"keep": 0.5, "at": [0.3, 0.1]}}, r"sweep.stop.at must ascend"),
        ({"over": OVER, "metric": "loss"}, "sweep.metric must be one of eval_loss"),
        ({"over": OVER, "metric": "eval_rewards/accuracies"}, "without pairs"),
    ],
)  # fmt: skip
def test_what_is_refused(sweep: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_sweep(sweep, JOB)


def test_no_evaluation_no_sweep() -> None:
    job = JOB | {"data": {"train": "a.jsonl"}}
    stop = {"keep": 0.5, "at": [0.1]}
    for more, what in (({}, "sweep.metric"), ({"stop": stop}, "sweep.stop")):
        with pytest.raises(ConfigError, match=f"{what} needs data.eval: eval_loss is measured on"):
            read_sweep({"over": OVER, **more}, job)


def test_a_file_gives_jobs_with_portions_and_mistakes_name_the_trial(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"text": "x"}\n')
    (tmp_path / "base").mkdir()
    path = tmp_path / "sweep.yaml"
    document = {"base_model": {"path": "base"}, "run": {"output_dir": "o"}, "job": JOB}
    path.write_text(yaml.safe_dump(document | {"sweep": {"over": OVER}}))
    config = load_sweep(path)
    assert [job.name for job in config.jobs] == list(config.sweep.settings if config.sweep else ())
    assert {job.portion_tokens for job in config.jobs} == {2048}
    with pytest.raises(ConfigError, match="`tlora sweep FILE` trains its trials"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"optimizer.lr must be above 0, got 0.0 \(job math-1\)"):
        load_sweep(path, ["sweep.over={optimizer.lr: [1.0, 0]}"])
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigError, match="sweep must be given"):
        load_sweep(path)


def test_rungs_are_whole_steps_of_their_own() -> None:
    assert rung_steps((0.1, 0.3), 100, "a") == (10, 30)
    assert rung_steps((0.1, 0.3), 7, "a") == (1, 3)
    for num_steps in (2, 1):
        with pytest.raises(ConfigError, match=r"before the end, got steps 1, 1 of \d \(job a\)"):
            rung_steps((0.1, 0.3), num_steps, "a")
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 21, 102)] == [
        *("1st", "2nd", "3rd", "4th", "11th", "12th", "21st", "102nd")
    ]
    assert (
        settings_text({"optimizer.lr": 1e-3, "lora.rank": 8}) == "optimizer.lr 0.001, lora.rank 8"
    )


@given(
    st.lists(st.floats(0, 4) | st.just(math.nan) | st.just(math.inf), min_size=1, max_size=30),
    st.floats(0.01, 0.99),
    st.booleans(),
    st.randoms(use_true_random=False),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_the_choice_follows_from_the_scores_alone(
    scores: list[float], keep: float, prefers_more: bool, order: Any, data: st.DataObject
) -> None:
    names = [f"t{number}" for number in range(len(scores))]
    known = dict(zip(names, scores, strict=True))
    metric = "eval_exact_match" if prefers_more else "eval_loss"
    spec = SweepSpec(metric=metric, stop=StopSpec(keep=keep, at=(0.5,)))
    steps = dict.fromkeys(names, (4,))
    halving, arrivals, made = Halving(spec, steps), [*names], []
    order.shuffle(arrivals)
    cut = data.draw(st.integers(0, len(names) - 1))
    for number, name in enumerate(arrivals):
        if number == cut:  # a restart takes up what is kept
            halving = Halving(spec, steps, halving.document())
        assert not made
        halving.take(name, known[name])
        made = halving.settle(names)
    ((rung, kept, stopped),) = made
    assert (
        (rung, len(kept))
        == (0, num_kept(len(names), keep))
        == (0, math.ceil(len(names) * keep - 1e-9))
    )
    best = ranked(known, prefers_more=prefers_more)
    assert set(kept) == set(best[: len(kept)])
    assert set(stopped) == set(names) - set(kept)
    finite = [n for n in names if math.isfinite(known[n])]
    assert set(finite) <= set(best[: len(finite)])
    again = Halving(spec, steps, halving.document())
    assert (again.settle(names), again.stopped_before(), again.left(names[0])) == ([], stopped, ())


def test_ties_go_to_the_lower_number_and_who_has_ended_is_the_worst() -> None:
    spec = SweepSpec(stop=StopSpec(keep=0.5, at=(0.2, 0.5)))
    halving = Halving(spec, dict.fromkeys("abcd", (2, 5)))
    for name in "dcb":
        halving.take(name, 1.0 if name != "d" else math.nan)
    assert halving.settle("abcd") == []
    (decision,) = halving.settle("bcd")
    assert decision.kept == ("b", "c")
    assert decision.stopped == {
        "d": "stopped at step 2: 3rd of 4 by eval_loss (not finite; the 2nd has 1)"
    }
    assert (halving.left("b"), halving.settle("bc")) == ((5,), [])
    (decision,) = halving.settle("")
    assert (decision.rung, decision.kept, decision.stopped) == (1, (), {})
