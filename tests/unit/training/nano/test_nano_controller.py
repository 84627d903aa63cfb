"""The choice of the number of nano-batches, on simulated steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlora_megatron.training.nano.controller import (
    HYSTERESIS,
    MOST_COUNT,
    AimdController,
    HysteresisController,
    NanoController,
    StepTime,
)

Noise = Callable[[int], float]
"""Factor on the time of a step, by its number."""


def run(
    controller: NanoController,
    costs: Sequence[float],
    steps: int,
    *,
    noise: Noise = lambda step: 1.0,
    tokens: Callable[[int], int] = lambda step: 8192,
    mix_key: str = "mix",
    most: Callable[[int], int] = lambda step: 64,
    first_is_slow: float = 3.0,
) -> list[int]:
    """The counts of so many steps; a step whose count has just changed takes longer."""
    counts: list[int] = []
    for step in range(steps):
        count = min(controller.count, most(step))
        changed = step == 0 or count != counts[-1]
        counts.append(count)
        time_s = costs[count - 1] * tokens(step) * noise(step) * (first_is_slow if changed else 1)
        controller.next_count(
            StepTime(time_s=time_s, tokens=tokens(step), mix_key=mix_key, most=most(step))
        )
    return counts


def gaussian(sigma: float, seed: int) -> Noise:
    draw = random.Random(seed)
    return lambda step: max(0.2, 1.0 + draw.gauss(0.0, sigma))


@pytest.mark.parametrize(
    ("costs", "best"),
    [
        ((1.00, 0.90, 0.85, 0.87), 3),
        ((1.00, 1.05, 1.10, 1.20), 1),
        ((1.00, 1.02, 0.90, 0.91), 3),  # two is a step down before three is one up
        ((1.00, 0.90, 0.93, 0.80), 4),
        ((1.00, 0.995, 0.995, 0.993), 1),  # not worth a change
    ],
)
def test_finds_the_best_and_keeps_it(costs: tuple[float, ...], best: int) -> None:
    controller = HysteresisController()
    counts = run(controller, costs, 50)
    assert counts[0] == 1
    assert controller.phase != "explore"
    assert controller.count == controller.kept == best
    assert controller.times[1] == pytest.approx(1.0)


def test_is_settled_within_50_steps_with_any_limit_up_to_six() -> None:
    falling = [1.0 - 0.05 * n for n in range(6)]
    for limit in range(1, 7):
        controller = HysteresisController(limit)
        run(controller, falling, 50)
        assert controller.phase != "explore"
        assert controller.kept == limit


@pytest.mark.parametrize("seed", range(20))
def test_noise(seed: int) -> None:
    """3 % of noise and every fifteenth step an outlier: what is kept is near the best."""
    costs = (1.00, 0.88, 0.86, 0.93)
    draw = gaussian(0.03, seed)
    controller = HysteresisController()
    run(controller, costs, 50, noise=lambda step: draw(step) * (4.0 if step % 15 == 7 else 1.0))
    assert controller.kept in (2, 3, 4)
    assert costs[controller.kept - 1] <= 0.93


@pytest.mark.parametrize("drift", [-0.002, -0.0005, 0.0005, 0.002])
def test_drift_of_all_times_does_not_decide(drift: float) -> None:
    """2 to 6 % over the exploration, where the counts differ by 3 %."""
    for costs, best in (((1.00, 0.97, 1.02, 1.05), 2), ((1.00, 1.03, 1.06, 1.09), 1)):
        controller = HysteresisController()
        run(controller, costs, 50, noise=lambda step: 1.0 + drift * step)
        assert controller.kept == best


def test_times_are_compared_a_token() -> None:
    sizes = random.Random(0)
    tokens = [sizes.randrange(5000, 8192) for _ in range(60)]
    controller = HysteresisController()
    run(controller, (1.0, 0.9, 0.95, 1.0), 60, tokens=tokens.__getitem__)
    assert controller.kept == 2


def test_small_rests_are_passed_over() -> None:
    """A step of few tokens takes as long a token as it likes."""
    controller = HysteresisController()
    is_rest = [step % 4 == 3 for step in range(80)]
    run(
        controller, (1.0, 0.9, 0.95, 1.0), 80, tokens=lambda step: 500 if is_rest[step] else 8192,
        noise=lambda step: 5.0 if is_rest[step] else 1.0,
    )  # fmt: skip
    assert controller.kept == 2


def test_counts_that_the_mix_cannot_be_cut_into_are_not_tried() -> None:
    controller = HysteresisController()
    counts = run(controller, (1.0, 0.9, 0.8, 0.7), 50, most=lambda step: 2)
    assert max(counts) == controller.kept == 2
    alone = HysteresisController()
    assert run(alone, (1.0, 0.9), 50, most=lambda step: 1) == [1] * 50


def test_a_new_mix_is_explored_and_a_known_one_is_not() -> None:
    controller = HysteresisController()
    run(controller, (1.0, 0.9, 0.95, 1.0), 50, mix_key="a")
    assert controller.kept == 2
    counts = run(controller, (1.0, 1.1, 1.2, 1.2), 50, mix_key="b")
    assert set(counts[:10]) == {2}, "what was good stays until the mix has lasted a while"
    assert controller.chosen("b") is not None
    assert controller.kept == 1
    assert set(run(controller, (1.0, 0.9, 0.95, 1.0), 50, mix_key="a")[1:]) == {2}


@pytest.mark.parametrize("seed", range(10))
def test_a_new_mix_does_not_keep_what_is_no_faster_than_one(seed: int) -> None:
    controller = HysteresisController()
    run(controller, (1.0, 0.9, 0.95, 1.0), 50, mix_key="a")
    run(controller, (1.0, 1.004, 1.2, 1.2), 50, mix_key="b", noise=gaussian(0.001, seed))
    assert controller.kept == 1


def test_a_choice_that_has_become_slow_is_found_out() -> None:
    controller = HysteresisController()
    run(controller, (1.0, 0.9, 0.95, 1.0), 50)
    assert controller.kept == 2
    run(controller, (1.0, 1.1, 1.1, 1.1), 250)
    assert controller.kept == 1


def test_checks_cost_little() -> None:
    controller = HysteresisController()
    run(controller, (1.0, 0.8, 0.9, 1.0), 50)
    counts = run(controller, (1.0, 0.8, 0.9, 1.0), 5000)
    assert 0 < sum(count != 2 for count in counts) < 60


def test_a_resumed_choice_is_kept_without_exploring() -> None:
    controller = HysteresisController()
    controller.resume("mix", 3)
    assert controller.count == 3
    assert set(run(controller, (1.0, 0.9, 0.8, 0.9), 100)) == {3}
    other = HysteresisController()
    other.resume("another", 3)
    counts = run(other, (1.0, 0.9, 0.95, 1.0), 50)
    assert counts[0] == 3
    assert other.kept == 2


@settings(max_examples=50, deadline=None)
@given(
    costs=st.lists(st.floats(0.7, 1.3), min_size=MOST_COUNT, max_size=MOST_COUNT),
    seed=st.integers(0, 2**20),
    extremes=st.booleans(),
)
def test_under_the_hysteresis_every_change_is_to_a_truly_faster_count(
    costs: list[float], seed: int, extremes: bool
) -> None:
    """Whatever noise below half of the hysteresis, none cycles: the bound of the docstring."""
    width = 0.49 * HYSTERESIS
    draw = random.Random(seed)
    choose = (
        (lambda: draw.choice((-width, width))) if extremes else lambda: draw.uniform(-width, width)
    )
    controller = HysteresisController()
    kept = [1]
    for _ in range(40):
        run(controller, costs, 50, noise=lambda step: 1.0 + choose())
        if controller.kept != kept[-1]:
            kept.append(controller.kept)
    assert len(kept) <= MOST_COUNT
    times = [costs[count - 1] for count in kept]
    assert times == sorted(times, reverse=True)


@settings(max_examples=100, deadline=None)
@given(
    costs=st.lists(st.floats(0.7, 1.3), min_size=MOST_COUNT, max_size=MOST_COUNT),
    width=st.floats(0.0, 0.1),
    seed=st.integers(0, 2**20),
)
def test_what_is_kept_is_near_the_best_tried(costs: list[float], width: float, seed: int) -> None:
    """Bounded noise: the kept count is within the margin and the noise of all that were measured.

    The margin is at most 1.7 times the noise (its estimate is a block's range, at most 2 widths).
    """
    draw = random.Random(seed)
    controller = HysteresisController()
    run(controller, costs, 50, noise=lambda step: 1.0 + draw.uniform(-width, width))
    assert controller.phase != "explore"
    margin = max(HYSTERESIS, 1.7 * width / (1 - width))
    bound = (1 + width) / (1 - width) / (1 - margin)
    kept = costs[controller.kept - 1]
    assert kept <= min(costs[count - 1] for count in controller.times) * bound * (1 + 1e-9)
    assert kept <= costs[0] * (1 + width) / (1 - width)


def test_aimd_is_the_papers_rule() -> None:
    """Four more while it gets faster, else half: 1, 5, 9, then down and up for ever."""
    controller = AimdController()
    costs = [1.0, 0.9, 0.85, 0.82, 0.8, 0.82, 0.84, 0.86, 0.88] + [0.9] * 8
    counts = run(controller, costs, 200)
    order = [
        count for index, count in enumerate(counts) if index == 0 or counts[index - 1] != count
    ]
    assert order[:5] == [1, 5, 9, 4, 8]
    assert len(set(counts[-60:])) > 1, "it never settles"
    limited = AimdController(limit=4)
    assert max(run(limited, costs, 100)) == 4
