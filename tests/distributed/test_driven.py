"""Jobs that clients drive, in gangs of real ranks: PEFT's losses, and bits that nobody disturbs."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.driven_worker import ADAM, BETA, CLIP, LOSSES, RUNS, batch, sampled
from tests.helpers.gang_driver import quickstart_base
from tests.helpers.sampling_case import Reference
from tests.helpers.standing_world import forked_result
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.tiny_tokenizer import save_tiny_tokenizer

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP2": (2, {"tp_size": 2}),
    "DP2 sharded optimizer": (2, {"shard_optimizer": True}),
}


def drive(case: str, root: Path, *args: object) -> dict[str, Any]:
    try:
        return forked_result("-m", "tests.helpers.driven_worker", case, root, *args)
    except AssertionError as error:
        logs = [path.read_text()[-3000:] for path in root.glob("gangs/*/rank_*.log")]
        raise AssertionError("\n".join([str(error), *logs])) from None


def peft_rows(adapter: Path, steps: int, base: str) -> list[list[float]]:
    """The same loop with PEFT and torch's AdamW alone."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    frozen = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(frozen, adapter, is_trainable=True)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        weights, lr=ADAM["learning_rate"], betas=(0.9, ADAM["beta2"]), eps=ADAM["eps"],
        weight_decay=ADAM["weight_decay"],
    )  # fmt: skip
    rows = []
    for number in range(steps):
        loss = LOSSES[number % len(LOSSES)]
        halves = [_row(model, batch(number), "cross_entropy")]
        halves.append(_row(model, sampled(number, loss), loss))
        norm = float(torch.nn.utils.clip_grad_norm_(weights, CLIP))
        rows.append([norm, *halves[0], *halves[1]])
        optimizer.step()
        optimizer.zero_grad()
    return rows


def _row(model: Any, arrays: dict[str, np.ndarray], loss: str) -> list[float]:
    found = []
    for begin, length in zip(_begins(arrays["lengths"]), arrays["lengths"].tolist(), strict=True):
        rows = slice(begin, begin + length)
        tokens = torch.from_numpy(arrays["tokens"][rows]).long()[None]
        targets = torch.from_numpy(arrays["targets"][rows])
        logprobs = model(input_ids=tokens).logits[0].log_softmax(dim=-1)
        found.append(logprobs.gather(1, targets[:, None])[:, 0])
    own = torch.cat(found)
    given = {name: torch.from_numpy(array) for name, array in arrays.items()}
    total = _documented(loss, own, given)
    total.backward()
    gap = [] if loss == "cross_entropy" else _gap(own.detach(), given)
    return [float(total.detach()), *gap, *own.tolist()]


def _gap(own: torch.Tensor, given: dict[str, torch.Tensor]) -> list[float]:
    """Mean and largest distance from the sampler, of the targets themselves."""
    runs = RUNS if len(given["lengths"]) > 3 else 1
    away = _split((own - given["logprobs"]).abs(), given)
    own_away = torch.cat([part[: len(part) // runs] for part in away])
    return [float(own_away.mean()), float(own_away.max())]


def _begins(lengths: np.ndarray) -> list[int]:
    return [0, *np.cumsum(lengths)[:-1].tolist()]


def _documented(loss: str, p: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The losses as Tinker documents them."""
    if loss == "cross_entropy":
        return -(p * given["weights"]).sum()
    a, away = given["advantages"], p - given["logprobs"]
    if loss == "importance_sampling":
        return -(away.exp() * a).sum()
    if loss == "ppo":
        return -torch.min(away.exp() * a, away.exp().clamp(0.8, 1.2) * a).sum()
    if loss == "cispo":
        return -(away.exp().clamp(0.0, 4.0).detach() * p * a).sum()
    if loss == "gspo":
        parts = (p, a, away, given["sequence_ratio_mask"])
        return sum(gspo(*one) for one in zip(*(_split(x, given) for x in parts), strict=True))
    if loss == "stable_reinforce":
        parts = zip(*(_split(x, given) for x in (p, a, given["logprobs"])), strict=True)
        return sum(centred(*(x.reshape(RUNS, -1) for x in one)) for one in parts)
    return -(p * a - 0.5 * BETA * away**2).sum()


def _split(values: torch.Tensor, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The values of each datum, whose sequences are neighbours of one length."""
    lengths = given["lengths"].tolist()
    runs = RUNS if len(lengths) > 3 else 1
    return list(values.split([length * runs for length in lengths[::runs]]))


def gspo(p: torch.Tensor, a: torch.Tensor, away: torch.Tensor, mask: torch.Tensor) -> Any:
    log_ratio = away.detach()[mask != 0].mean()
    ratio = torch.exp(log_ratio + p - p.detach())
    return -torch.min(ratio * a, ratio.clamp(1 - 3e-4, 1 + 4e-4) * a).sum()


def centred(p: torch.Tensor, a: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """REINFORCE less the mean of its score under the sampler, whose tail has the trainer's form."""
    tail = (1 - q.exp().sum(0)).clamp(min=0) / (1 - p.exp().sum(0))
    weight = (q.exp() - tail * p.exp()).detach()
    return (-a[0] * (p[0] - (weight * p).sum(0))).sum()


def check_loop(found: dict[str, Any], root: Path, steps: int, base: str) -> None:
    """A loop that has ended by itself had PEFT's losses."""
    expected = peft_rows(root / "jobs" / "j1" / "sampler" / "first", steps, base)
    for row, own in zip(found["rows"], expected, strict=True):
        np.testing.assert_allclose(row, own, rtol=1e-5, atol=1e-5)
    assert found["ended"] == {"status": "finished", "reason": None, "step": steps}


def test_loop_has_the_losses_of_peft(tmp_path: Path) -> None:
    found = drive("oracle", tmp_path, len(LOSSES))
    check_loop(found, tmp_path, len(LOSSES), quickstart_base()["path"])
    check_scores(found["scores"])


def check_scores(scores: dict[str, Any]) -> None:
    """What a gang says of its base is what transformers says."""
    base = quickstart_base()["path"]
    own = Reference(Path(base), None).logprobs(scores["tokens"])
    assert len(scores["tokens"]) == 64
    np.testing.assert_allclose(scores["logprobs"], own.numpy(), rtol=1e-5, atol=1e-5)


def test_loop_over_shared_experts_has_the_losses_of_peft(tmp_path: Path) -> None:
    """Beside another loop, with errors in between, and moved in the middle of a batch."""
    base = make_tiny_model(tmp_path / "base", "qwen3_moe", num_hidden_layers=2)
    save_tiny_tokenizer(base)
    root = tmp_path / "service"
    found = drive("over experts", root, 4, base, 2, json.dumps({"ep_size": 2}))
    check_loop(found, root, 4, str(base))


Runs = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    @functools.cache
    def found(layout: str) -> dict[str, Any]:
        ranks, parallel = LAYOUTS[layout]
        root = tmp_path_factory.mktemp("layout") / "service"
        return drive("layout", root, ranks, json.dumps(parallel))

    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_jobs_and_errors_change_no_bit(layout: str, run: Runs) -> None:
    found = run(layout)
    check_undisturbed(found)
    assert "rank must be 4" in found["load_refused"]
    assert found["ordinary_beside"] == found["ordinary_alone"]
    assert found["digests"]["j2"] == found["digests"]["j5"]
    check_scores(found["scores"])


def check_undisturbed(found: dict[str, Any]) -> None:
    assert found["beside"] == found["alone"]
    assert found["reloaded"] == found["later"]
    # The next step's first request, without gradients.
    assert found["forward"] == found["later"][1 : 1 + len(found["forward"])]
    huge, *good = found["overflows"][1:]
    assert "gradient must be finite" in huge
    assert good == [None, None]


def test_layouts_agree(run: Runs) -> None:
    first, *others = (run(layout)["alone"] for layout in LAYOUTS)
    for other in others:
        for row, own in zip(other, first, strict=True):
            np.testing.assert_allclose(row, own, rtol=1e-4, atol=1e-4)


def test_killed_ranks_change_no_bit(tmp_path: Path) -> None:
    quiet = drive("killed", tmp_path / "quiet", "[]")
    found = drive("killed", tmp_path / "killed", "[3, -4]")
    assert found["deaths"] == 2
    assert found["rows"] == quiet["rows"]
    assert found["digests"] == quiet["digests"]
    assert found["versions"] == quiet["versions"]
    assert len(found["versions"]) == 3 * 6 + 2
    assert found["kept"] == quiet["kept"] == []
