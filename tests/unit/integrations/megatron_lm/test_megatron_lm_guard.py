"""Versions and settings of Megatron-LM that are refused, and hooks that stay out of the way."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import megatron.core
import pytest

from tlora_megatron import launch
from tlora_megatron.integrations.megatron_lm import guard, hooks
from tlora_megatron.training.signals import StopSignals

FINE: dict[str, Any] = {
    "micro_batch_size": 1, "save": "out", "save_interval": 10, "hidden_size": 32, "seq_length": 64,
    "max_position_embeddings": 64, "transformer_impl": "local", "ckpt_format": "torch_dist",
    "context_parallel_size": 1, "tensor_model_parallel_size": 1, "sequence_parallel": False,
    "train_iters": 10, "train_samples": None, "normalization": "RMSNorm", "swiglu": True,
    "position_embedding_type": "rope", "optimizer": "adam", "cuda_graph_impl": "none",
    "moe_token_dispatcher_type": "allgather", "moe_aux_loss_coeff": 0.0,
    "rerun_mode": "validate_results",
}  # fmt: skip
BAD: dict[str, Any] = {
    "micro_batch_size": 2, "cuda_graph_impl": "local", "moe_token_dispatcher_type": "flex",
    "attention_dropout": 0.1, "hidden_dropout": 0.1, "moe_aux_loss_coeff": 1e-2,
    "moe_z_loss_coeff": 1e-3, "moe_expert_capacity_factor": 1.0,
    "moe_expert_rank_capacity_factor": 1.0, "moe_input_jitter_eps": 0.1, "optimizer": "muon",
    "position_embedding_type": "learned_absolute",
    "experimental_attention_variant": "gated_delta_net", "window_size": (128, 0),
    "normalization": "LayerNorm", "swiglu": False, "rotary_percent": 0.5,
    "rotary_seq_len_interpolation_factor": 4, "no_rope_freq": 4, "mtp_num_layers": 1,
    "heterogeneous_layers_config_path": "layers.json", "mlp_chunks_for_training": 2,
    "iterations_to_skip": [3], "phase_transition_iterations": [100], "logits_load_dir": "teacher",
    "logits_save_dir": "teacher", "export_kd_teacher_load": "teacher", "rerun_mode": "report_stats",
    "gtp_weight_remat_size": 2, "num_distributed_optimizer_instances": 2,
    "ckpt_convert_format": "torch_dist",
}  # fmt: skip
"""Values that are refused; of all other arguments True is."""


def check(**fields: Any) -> None:
    guard.check_arguments(argparse.Namespace(**(FINE | fields)))


TP: dict[str, Any] = {"tensor_model_parallel_size": 2}
BALANCING = "moe_router_load_balancing_type"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        TP,
        TP | {"num_experts": 4, "sequence_parallel": True},
        {"train_iters": None, "train_samples": 8},
        {BALANCING: ["seq_aux_loss", "aux_loss"]},
    ],
    ids=str,
)
def test_settings_that_pass(fields: dict[str, Any]) -> None:
    check(**fields)


@pytest.mark.parametrize("rule", guard.RULES, ids=lambda rule: rule.argument)
def test_each_setting_is_refused_by_its_flag(rule: Any) -> None:
    message = rf"^{rule.flag} must be .* with --tlora-config, got .*; \S"
    with pytest.raises(ValueError, match=message):
        check(**{rule.argument: BAD.get(rule.argument, True)})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        # As it is typed: the flag negates its argument.
        ({"add_bias_linear": True}, "--disable-bias-linear must be on with .*, got off; "),
        ({"save": None}, "--save must be given"),
        ({"train_iters": None}, "--train-iters must be given .*, got absent"),
        (TP | {"num_experts": 4}, "--sequence-parallel must be on with .*, got off"),
        # They mix jobs.
        ({BALANCING: "sinkhorn"}, "--moe-router-load-balancing-type must be none"),
        (
            {BALANCING: ["seq_aux_loss", "quantile_balancing"]},
            "--moe-router-load-balancing-type must be none",
        ),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        check(**fields)


@pytest.mark.parametrize(
    ("parallel", "multiple"),
    [
        ({"context_parallel_size": 2}, 4),
        ({"tensor_model_parallel_size": 4, "sequence_parallel": True}, 4),
        ({"context_parallel_size": 2, "tensor_model_parallel_size": 4, "sequence_parallel": True},
         8),
    ],
)  # fmt: skip
def test_rows_are_cut_evenly_over_ranks(parallel: dict[str, Any], multiple: int) -> None:
    check(**parallel)
    with pytest.raises(ValueError, match=rf"--seq-length must be a multiple of {multiple} with"):
        check(**parallel, seq_length=64 + multiple // 2)


def test_the_launcher_sets_hardware_queues_with_the_flag_alone(
    trainer: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    nano, two, one = (tmp_path / f"{count}.yaml" for count in ("auto", 2, 1))
    for file in (nano, two, one):
        file.write_text(f"run: {{nano_batches: {file.stem}}}")
    monkeypatch.setenv(name, "8")  # so that it is put back
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for words, before, after in (
        (["x.py"], None, None),
        (["x.py", "--tlora-config", "a"], None, "1"),
        (["x.py", "--tlora-config", "a"], "8", "8"),
        (["x.py", "--tlora-config", str(nano)], "1", "32"),
        (["x.py", f"--tlora-config={nano}", "--bf16"], None, "32"),
        (["x.py", "--tlora-config", str(two), "--tp-comm-overlap-rs-dgrad"], None, "32"),
        (["x.py", "--tlora-config", str(two), "--tp-comm-overlap"], None, "1"),
        (["x.py", "--tlora-config", str(one)], None, "1"),
        (["x.py", "--tlora-config"], None, "1"),
    ):
        monkeypatch.setattr(sys, "argv", words)
        os.environ.pop(name, None)
        if before:
            os.environ[name] = before
        launch.install()
        assert os.environ.get(name) == after


def _function(parameters: tuple[str, ...]) -> Callable[..., Any]:
    """A function with these parameters that returns what it was called with."""
    names = ", ".join(parameters) or "*values"
    scope: dict[str, Any] = {}
    exec(f"def f({names}): return ({', '.join(parameters) or '*values'},)", scope)
    function: Callable[..., Any] = scope["f"]
    return function


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Modules of a trainer that holds what the hooks rely on; `megatron.core` is the real one."""
    modules = {"megatron.training": ModuleType("megatron.training")}
    for name, functions in guard._RELIED_ON.items():
        if name.startswith("megatron.training"):
            modules[name] = module = ModuleType(name)
            for function, parameters in functions.items():
                setattr(module, function, _function(parameters))
    modules["megatron.training.initialize"] = ModuleType("megatron.training.initialize")
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules


TRAINING = "megatron.training.training"


@pytest.mark.parametrize(
    ("owner", "name", "value", "message"),
    [
        (TRAINING, "train_step", None,
         r"megatron-core 0.16 to 0.20 .*, got 0\.\S+: megatron.training.training has no train_"),
        (TRAINING, "train_step", lambda iterator, model: None,
         "train_step has no parameter data_iterator"),
        ("relied on", "megatron.core.moved", {"name": ()},
         r"got 0\.\S+: there is no megatron\.core\.moved"),
        ("core", "__version__", "0.21.0", r"got 0.21.0: its version is another"),
    ],
)  # fmt: skip
def test_a_trainer_that_does_not_fit_is_named(
    trainer: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, owner: str, name: str,
    value: Any, message: str,
) -> None:  # fmt: skip
    guard.check_trainer()
    if owner == "relied on":
        monkeypatch.setitem(guard._RELIED_ON, name, value)  # type: ignore[arg-type]
    elif value is None:
        delattr(trainer[owner], name)
    else:
        monkeypatch.setattr(megatron.core if owner == "core" else trainer[owner], name, value)
    with pytest.raises(ImportError, match=message):
        guard.check_trainer()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nowhere_to_be_found.part", "the package nowhere_to_be_found must be installed .*"),
        ("from typing import nothing_of_the_kind", "Megatron-LM must be importable .*nothing_of"),
        ("type A[T] = :", "Megatron-LM must be importable .*invalid syntax"),
    ],
)
def test_what_the_trainer_cannot_import_gets_a_remedy(
    trainer: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    source: str,
    message: str,
) -> None:
    (tmp_path / "moved_on.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(guard._RELIED_ON, "moved_on", {})  # type: ignore[arg-type]
    with pytest.raises(ImportError, match=message):
        guard.check_trainer()


def test_an_older_python_than_wanted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "megatron")])
    monkeypatch.setattr(guard.importlib.util, "find_spec", lambda name: spec)
    (tmp_path / "pyproject.toml").write_text('[project]\nrequires-python = ">=3.99"\n')
    error = guard._wrong_python(ImportError("cannot import name 'override' from 'typing'"))
    assert re.match(r"Python must be 3\.99 or newer for this Megatron-LM, got 3\.\d+; ", str(error))
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "megatron-core"\n')
    assert str(guard._wrong_python(ImportError("x"))).startswith("Megatron-LM must be importable")


@pytest.mark.skipif("megatron.training" in sys.modules, reason="there is a trainer")
def test_without_a_checkout_the_remedy_is_named() -> None:
    with pytest.raises(ImportError, match=r"a Megatron-LM checkout must be .*PYTHONPATH"):
        guard.check_trainer()


class Host:
    """The launcher's part without the flag."""

    signals = StopSignals(speaks=False)

    def fail(self, error: Exception) -> NoReturn:
        raise SystemExit(2) from error


def test_without_the_flag_every_hook_calls_what_it_wraps(
    trainer: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    global_vars = trainer["megatron.training.global_vars"]
    monkeypatch.setattr(global_vars, "get_args", lambda: argparse.Namespace(tlora_config=None))
    training = trainer[TRAINING]
    before = dict(vars(training))
    hooks.install(Host())
    hooked = [name for name, value in vars(training).items() if before.get(name) is not value]
    assert len([name for name in hooked if not name.startswith("_")]) == 10
    for name in hooked:
        if name.startswith("_"):
            continue
        parameters = guard._RELIED_ON[TRAINING][name]
        values = [object() for _ in parameters]
        assert getattr(training, name)(*values) == tuple(values), name
    namespace = argparse.Namespace(tlora_config=None)
    assert trainer["megatron.training.arguments"].validate_args(namespace) == (namespace,)
    first = dict(vars(training))
    hooks.install(Host())
    assert dict(vars(training)) == first, "installed once"


@pytest.mark.parametrize(("nano_batches", "seen"), [("1", "32"), ("2", "1"), ("auto", "1")])
def test_validation_is_shown_one_queue_where_nano_batches_need_more(
    trainer: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    nano_batches: str,
    seen: str,
) -> None:
    from tlora_megatron.integrations.megatron_lm import experts

    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setenv(name, "32")
    monkeypatch.setattr(experts, "install", lambda **_: None)
    arguments: Any = trainer["megatron.training.arguments"]
    arguments.validate_args = lambda args: os.environ[name]
    jobs = tmp_path / "jobs.yaml"
    jobs.write_text(f"run: {{nano_batches: {nano_batches}}}\n")
    hooks.install(Host())
    more = {"tlora_config": str(jobs), "lr": 0.1}
    assert arguments.validate_args(argparse.Namespace(**FINE, **more)) == seen
    assert os.environ[name] == "32"


def test_a_trainer_that_does_not_fit_is_left_alone_without_the_flag(
    trainer: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = trainer[TRAINING]
    del training.train_step  # type: ignore[attr-defined]
    before = dict(vars(training))
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--lr", "1"])
    hooks.install(Host())
    assert dict(vars(training)) == before
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--tlora-config=jobs.yaml"])
    with pytest.raises(SystemExit) as leaving:
        hooks.install(Host())
    assert isinstance(leaving.value.__cause__, ImportError)
