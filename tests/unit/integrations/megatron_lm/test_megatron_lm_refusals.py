"""Sentences in the place of Megatron-LM's tracebacks: scripts, flags, its checks, its loader."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

from tlora_megatron.integrations.megatron_lm import hooks, refusals

PARSED: dict[str, Any] = {
    "save": "out",
    "save_interval": 10,
    "hidden_size": 32,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "transformer_impl": "local",
    "position_embedding_type": "learned_absolute",  # validation makes it rope
    "add_bias_linear": False,
}


def parsed(**fields: Any) -> argparse.Namespace:
    """Megatron's arguments before its validation."""
    return argparse.Namespace(**(PARSED | fields))


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("pretrain_vlm.py", "its model reads images"),
        ("train_rl.py", "reinforcement learning makes its own data"),
        ("pretrain_mamba.py", "state-space layers"),
        ("pretrain_bert.py", "no decoder"),
    ],
)
def test_scripts_of_other_models_are_refused(script: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"SCRIPT must train a GPT model .*got {script}: .*{why}"):
        refusals.check_script(Path("checkout") / script, ["--bf16"])


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
        (
            {"seq_length": 128},
            "--max-position-embeddings must be at least --seq-length 128, got 64; .*"
            "give --max-position-embeddings 128",
        ),
    ],
)
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
    """A checkpoint's folder, without weights."""
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
    file = Path(__file__).name
    with pytest.raises(ValueError, match=rf"must pass its own check \({file}:\d+\), {said}"):
        hooks._validated(check, value)


LOADED = argparse.Namespace(load="base", num_experts=None)
ABSENT = "\"{} from model not in state dict: ['decoder.final_layernorm.weight']\""


def test_a_weight_that_the_base_lacks_is_named() -> None:
    error = KeyError(ABSENT.format("decoder.layers.self_attention.q_layernorm.weight"))
    message = "--load base must hold the model that the arguments describe, got no "
    expected = f"{message}decoder.layers.self_attention.q_layernorm.weight in it"
    assert str(refusals.explain_loading(error, LOADED)) == expected


def test_experts_over_a_dense_base_are_named() -> None:
    error = KeyError(ABSENT.format("decoder.layers.mlp.router.weight"))
    args = argparse.Namespace(load="base", num_experts=4)
    said = str(refusals.explain_loading(error, args))
    assert "got no decoder.layers.mlp.router.weight in it; --num-experts 4 is for a base of" in said


def test_a_weight_of_another_shape_is_named() -> None:
    error = Exception(
        "Global shape mismatch for loaded (torch.Size([264, 64])) and expected ((264, 128)) tensor "
        "for key embedding.word_embeddings.weight"
    )
    said = str(refusals.explain_loading(error, LOADED))
    assert (
        "got embedding.word_embeddings.weight of torch.Size([264, 64]) where they ask for" in said
    )


def test_other_failures_of_the_loader_are_left_alone() -> None:
    assert refusals.explain_loading(OSError("disk"), LOADED) is None
    strict = ValueError("the checkpoint must hold the weights of this model and no others")
    assert refusals.explain_loading(strict, LOADED) is strict
