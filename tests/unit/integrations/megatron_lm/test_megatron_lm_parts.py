"""Stand-ins in the trainer's places, and sentences in the place of Megatron-LM's tracebacks."""

from __future__ import annotations

import argparse
import logging
import math
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.unit.integrations.megatron_lm.test_megatron_lm_guard import FINE
from tlora_megatron.integrations.megatron_lm import experts as model_fixes
from tlora_megatron.integrations.megatron_lm import refusals
from tlora_megatron.integrations.megatron_lm.engine import (
    IntervalLosses,
    JobOptimizer,
    MicroBatchFeed,
    NoSchedule,
)


class _Named(NamedTuple):
    name: str


class _Outcome(NamedTuple):
    loss: float


class _Report(NamedTuple):
    """The fields of a `StepReport` that are read."""

    job: _Named
    outcome: _Outcome
    target_tokens: int


def report(name: str, loss: float, targets: int = 1) -> Any:
    return _Report(_Named(name), _Outcome(loss), targets)


class Trainer:
    """How `training_log` of Megatron-LM adds up and shows losses."""

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.losses = IntervalLosses()
        self.totals: dict[str, Any] = {}

    def log(self, iteration: int, reports: list[Any]) -> dict[str, float]:
        """The line of an iteration; nothing between intervals but behind the first."""
        added = self.losses.add(reports)
        loss_dict = {key: torch.tensor(loss) for key, loss in added.items()}
        if iteration % self.interval == 0:
            self.losses.correct(loss_dict, self.totals)
        totals = self.totals
        totals["advanced iterations"] = totals.get("advanced iterations", 0) + 1
        for key, loss in loss_dict.items():
            totals[key] = totals.get(key, torch.tensor([0.0])) + loss
        first = iteration == 1
        if not first and iteration % self.interval:
            return {}
        keys = [key for key in totals if key != "advanced iterations"]
        line = {key: totals[key].item() / totals["advanced iterations"] for key in keys}
        if not first:
            totals.update(dict.fromkeys(keys, torch.tensor([0.0])), **{"advanced iterations": 0})
        return {key: value for key, value in line.items() if value > 0.0}


def test_a_job_s_loss_is_the_mean_over_its_own_steps() -> None:
    trainer = Trainer(interval=4)
    steps = [[("a", 4.0), ("b", 8.0)], [("a", 2.0)], [("a", 3.0)], [("a", 3.0), ("b", 6.0)]]
    lines = [
        trainer.log(i, [report(*step) for step in done]) for i, done in enumerate(steps, start=1)
    ]
    assert lines[0] == {"lm loss": 6.0, "loss/a": 4.0, "loss/b": 8.0}
    assert lines[1:3] == [{}, {}]
    assert lines[3] == pytest.approx({"lm loss": (6 + 2 + 3 + 4.5) / 4, "loss/a": 3, "loss/b": 7})
    # Who did not step in an interval is not in its line, also not with an old value.
    lines = [trainer.log(i, [report("a", 1.0)]) for i in range(5, 9)]
    assert lines[-1] == pytest.approx({"lm loss": 1.0, "loss/a": 1.0})


def test_the_loss_of_all_jobs_is_weighted_by_tokens_and_finite() -> None:
    reports = [report("a", 1.0, 30), report("b", 5.0, 10), report("c", math.nan, 10)]
    losses = IntervalLosses().add(reports)
    assert losses["lm loss"] == 2.0
    assert math.isnan(losses["loss/c"])
    assert list(losses) == ["lm loss", "loss/a", "loss/b", "loss/c"]
    assert IntervalLosses().add([]) == {}


def test_all_readers_give_the_round_in_order() -> None:
    feed = MicroBatchFeed()
    readers = [feed.reader(), feed.reader()]
    batches: Any = [object(), object(), object()]
    feed.fill(batches)
    assert [next(readers[0]) for _ in range(3)] == batches
    assert next(iter(readers[1])) is batches[0]
    feed.fill(batches[:1])
    assert next(readers[1]) is batches[0]
    with pytest.raises(RuntimeError, match="as many micro-batches as the trainer asks for"):
        next(readers[1])


def test_the_trainer_s_optimizer_ends_the_round() -> None:
    from megatron.core.optimizer import OptimizerConfig

    rounds: list[int] = []

    def end_round() -> tuple[float, float]:
        rounds.append(1)
        return 2.5, 1e-3

    optimizer = JobOptimizer(OptimizerConfig(), end_round, torch.device("cpu"))
    optimizer.zero_grad()
    assert optimizer.step() == (True, 2.5, None)
    assert len(rounds) == 1
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert optimizer.param_groups[0]["default_config"]
    loss: Tensor = optimizer.scale_loss(torch.tensor(3.0))
    assert loss.item() == 3.0
    assert optimizer.state_dict() == optimizer.sharded_state_dict({}) == {}
    schedule = NoSchedule()
    schedule.step(increment=8)
    assert schedule.num_steps == 8
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_torch_s_norm_stands_where_megatron_found_apex(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    for module, name in model_fixes._NORMS:
        monkeypatch.setattr(module, name, FusedLayerNorm)
    with caplog.at_level(logging.INFO):
        model_fixes._leave_apex_norm()
        model_fixes._leave_apex_norm()
    assert {getattr(module, name) for module, name in model_fixes._NORMS} == {WrappedTorchNorm}
    (record,) = caplog.records
    assert "is torch's" in record.getMessage()


def parsed(**fields: Any) -> argparse.Namespace:
    """Usual arguments before validation, which makes the positions' embedding rope."""
    return argparse.Namespace(**(FINE | {"position_embedding_type": "learned_absolute"} | fields))


def test_scripts_that_may_build_attention_alone_pass() -> None:
    refusals.check_script(Path("pretrain_gpt.py"), [])
    refusals.check_script(Path("my_own.py"), [])
    refusals.check_script(Path("pretrain_mamba.py"), ["--hybrid-override-pattern", "*-*-"])
    refusals.check_script(Path("pretrain_mamba.py"), ["--hybrid-layer-pattern=*-"])


def test_usual_arguments_pass_before_validation() -> None:
    refusals.check_parsed(parsed())
    refusals.check_parsed(parsed(hybrid_layer_pattern="*-*E"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp must be off .*DeepSpeed ZeRO"),
        ({"use_torch_fsdp2": True}, "--use-torch-fsdp2 must be off"),
        ({"perform_rl_step": True}, "--perform-rl-step must be off"),
        ({"hybrid_override_pattern": "M-*-"}, "--hybrid-layer-pattern must have .*got M-"),
        ({"hidden_size": None}, "the model's flags must be given .*model_flags.txt"),
        ({"save_interval": None}, "--save-interval must be given with --tlora-config, got none"),
        ({"seq_length": 128},
         "--max-position-embeddings must be at least --seq-length 128, got 64; .*"
         "give --max-position-embeddings 128"),
    ],
)  # fmt: skip
def test_what_megatron_would_assert_is_refused_before(fields: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        refusals.check_parsed(parsed(**fields))


def test_transformer_engine_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(ValueError, match=r"--transformer-impl must be local where .*no-rope-f"):
        refusals.check_parsed(parsed(transformer_impl="transformer_engine"))
    # The user's own spec says which layers there are.
    refusals.check_parsed(parsed(transformer_impl="transformer_engine", spec=["a", "b"]))


def write_checkpoint(folder: Path, tracker: str, name: str, *, is_distributed: bool) -> str:
    (folder / name).mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(tracker)
    if is_distributed:
        (folder / name / "metadata.json").write_text("{}")
    return str(folder)


@pytest.mark.parametrize(("tracker", "name"), [("release\n", "release"), ("12", "iter_0000012")])
def test_a_distributed_checkpoint_is_read_as_one(tmp_path: Path, tracker: str, name: str) -> None:
    base = write_checkpoint(tmp_path / "base", tracker, name, is_distributed=True)
    for load, pretrained in ((base, None), (str(tmp_path / "fresh"), base)):
        args = parsed(ckpt_format="torch", load=load, pretrained_checkpoint=pretrained)
        assert "--ckpt-format torch (the base in " in (refusals.detect_format(args) or "")
        assert args.ckpt_format == "torch_dist"
        assert refusals.detect_format(args) is None


def test_other_formats_stay_as_given(tmp_path: Path) -> None:
    old = write_checkpoint(tmp_path / "old", "3", "iter_0000003", is_distributed=False)
    for load, given in ((old, "torch"), (old, "torch_dist"), (None, "torch")):
        args = parsed(ckpt_format=given, load=load, pretrained_checkpoint=None)
        assert refusals.detect_format(args) is None
        assert args.ckpt_format == given


def fail_without_a_word(value: object) -> None:
    """Raises as a bare assertion does; pytest would put its own words into one."""
    raise AssertionError


def refuse(message: str) -> None:
    raise RuntimeError(message)


@pytest.mark.parametrize(
    ("check", "value", "said"),
    [
        (fail_without_a_word, None, "got: raise AssertionError"),
        (refuse, "no such layout", "got: no such layout"),
    ],
)
def test_megatron_s_own_checks_become_sentences(check: Any, value: Any, said: str) -> None:
    with pytest.raises((AssertionError, RuntimeError)) as caught:
        check(value)
    sentence = str(refusals.explain_arguments(caught.value))
    assert re.search(rf"must pass its own check \({Path(__file__).name}:\d+\), {said}", sentence)


LOADED = argparse.Namespace(load="base", num_experts=None)
ABSENT = "\"{} from model not in state dict: ['decoder.final_layernorm.weight']\""
MISMATCH = (
    "Global shape mismatch for loaded (torch.Size([264, 64])) and expected ((264, 128)) tensor "
    "for key embedding.word_embeddings.weight"
)


@pytest.mark.parametrize(
    ("error", "experts", "said"),
    [
        (KeyError(ABSENT.format("decoder.layers.self_attention.q_layernorm.weight")), None,
         "--load base must hold the model that the arguments describe, got no "
         "decoder.layers.self_attention.q_layernorm.weight in it"),
        (KeyError(ABSENT.format("decoder.layers.mlp.router.weight")), 4,
         "got no decoder.layers.mlp.router.weight in it; --num-experts 4 is for a base of"),
        (Exception(MISMATCH), None,
         "got embedding.word_embeddings.weight of torch.Size([264, 64]) where they ask for"),
    ],
)  # fmt: skip
def test_a_weight_that_does_not_fit_is_named(error: Exception, experts: Any, said: str) -> None:
    args = argparse.Namespace(load="base", num_experts=experts)
    found = str(refusals.explain_loading(error, args))
    assert found == said if said.startswith("--load") else said in found


def test_other_failures_of_the_loader_are_left_alone() -> None:
    assert refusals.explain_loading(OSError("disk"), LOADED) is None
    strict = ValueError("the checkpoint must hold the weights of this model and no others")
    assert refusals.explain_loading(strict, LOADED) is strict
