"""Checks that Megatron-LM has what the hooks rely on, and no settings that exclude adapters.

Checked before anything is built: a trainer that has moved on is named with its version, and a
setting that would be silently wrong is refused with what to change.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

FLAG = "--tlora-config"
OLDEST, NEWEST = (0, 16), (0, 20)
"""Megatron-core versions, major and minor, both included; 0.20 as its development version."""

_TRAINING = "megatron.training.training"
_RELIED_ON: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "megatron.training.arguments": {
        "add_megatron_arguments": ("parser",),
        "validate_args": ("args",),
    },
    _TRAINING: {
        "pretrain": ("train_valid_test_dataset_provider", "forward_step_func"),
        "setup_model_and_optimizer": ("model_provider_func",),
        "get_model": ("model_provider_func",),
        "get_megatron_optimizer": ("config",),
        "get_optimizer_param_scheduler": ("optimizer",),
        "update_train_iters": ("args",),
        "build_train_valid_test_data_iterators": (),
        "train_step": ("forward_step_func", "data_iterator", "model", "optimizer"),
        "training_log": ("loss_dict", "total_loss_dict", "iteration"),
        "save_checkpoint": ("iteration",),
        "load_checkpoint": (),
    },
    "megatron.training.checkpointing": {"checkpoint_exists": ()},
    "megatron.training.global_vars": {"get_args": (), "get_tokenizer": ()},
    "megatron.core.num_microbatches_calculator": {"get_num_microbatches": ()},
    "megatron.core.optimizer.optimizer": {"MegatronOptimizer": ("optimizer", "config")},
    "megatron.core.pipeline_parallel": {"get_forward_backward_func": ()},
    "megatron.core.rerun_state_machine": {"RerunDataIterator": ("iterable",)},
    "megatron.core.tensor_parallel.layers": {
        "ColumnParallelLinear._forward_impl": ("input", "weight"),
        "RowParallelLinear._forward_impl": ("input", "weight"),
    },
    "megatron.core.tensor_parallel.random": {
        "CheckpointFunction.forward": ("run_function",),
        "CheckpointWithoutOutput.checkpoint": ("run_function",),
    },
}
"""Module -> name -> parameters it must have, in any order."""


class Rule(NamedTuple):
    """The values of a Megatron argument under which adapters train correctly."""

    argument: str
    allowed: tuple[Any, ...]
    """A message asks for the first."""
    why: str

    def check(self, values: Any, where: str = f"with {FLAG}") -> None:
        """Raises ValueError for a wrong value; an argument that this version lacks is fine.

        Args:
            values: Megatron's arguments, or a TransformerConfig.
            where: ends the rule: what asks for it.
        """
        wanted = self.allowed[0]
        value = getattr(values, self.argument, wanted)
        if value in self.allowed:
            return
        if self.argument in _NEGATED:
            wanted, value = not wanted, not value
        raise ValueError(
            f"{self.flag} must be {shown(wanted)} {where}, got {shown(value)}; {self.why}"
        )

    @property
    def flag(self) -> str:
        return _FLAGS.get(self.argument, "--" + self.argument.replace("_", "-"))


_NEGATED = ("add_bias_linear",)
"""Arguments whose flags say the contrary."""
_FLAGS = {
    "add_bias_linear": "--disable-bias-linear",
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
}

_NO_GRAPHS = "jobs join and leave between iterations, which captured CUDA graphs do not see"
_NO_EXPERT_OVERLAP = "it calls parts of layers past the model, without the micro-batch's routing"
_NO_FSDP = "use --use-distributed-optimizer, or DeepSpeed ZeRO for sharded base weights"
_FROZEN = "the base is frozen and its activations are those of inference"
_PER_JOB = "it would mix the jobs' gradients"
_DOCUMENTS = "packed documents of several jobs do not have it"
_ARCHITECTURE = "adapters are exported for Hugging Face's Llama, Mistral and Qwen"
_OWN_DATA = "data come from the jobs of the configuration"
_NO_TEACHER = "jobs learn from their own data alone"
_WHOLE_ROWS = "whose rows are whose is known for whole micro-batches; recompute saves memory"
_MIXING_ROUTERS = ("sinkhorn", "quantile_balancing")
NOT_TRIED = "it has not been tried"

RULES: tuple[Rule, ...] = (
    Rule("micro_batch_size", (1,), "a micro-batch is one packed row of --seq-length tokens"),
    Rule("fp16", (False,), "loss scaling would skip all jobs for one; use --bf16"),
    Rule("cuda_graph_impl", ("none", None), _NO_GRAPHS),
    Rule("enable_cuda_graph", (False, None), _NO_GRAPHS),
    Rule("external_cuda_graph", (False, None), _NO_GRAPHS),
    Rule("overlap_moe_expert_parallel_comm", (False,), _NO_EXPERT_OVERLAP),
    Rule("moe_token_dispatcher_type", ("alltoall", "allgather"), _NO_EXPERT_OVERLAP),
    Rule("moe_enable_deepep", (False, None), _NO_EXPERT_OVERLAP),
    Rule("use_megatron_fsdp", (False, None), _NO_FSDP),
    Rule("use_custom_fsdp", (False, None), _NO_FSDP),
    Rule("use_torch_fsdp2", (False, None), _NO_FSDP),
    Rule("attention_dropout", (0.0,), _FROZEN),
    Rule("hidden_dropout", (0.0,), _FROZEN),
    Rule("moe_aux_loss_coeff", (0.0, 0, None, [0.0], [0]), _PER_JOB),
    Rule("moe_z_loss_coeff", (None, 0.0), _PER_JOB),
    Rule("moe_expert_capacity_factor", (None,), "a job's tokens would push out another's"),
    Rule("moe_expert_rank_capacity_factor", (None,), "a job's tokens would push out another's"),
    Rule("moe_router_force_load_balancing", (False,), "it routes at random"),
    Rule("moe_input_jitter_eps", (None, 0.0), _FROZEN),
    Rule("optimizer", ("adam", "sgd"), "each job has the optimizer of its own configuration"),
    Rule("position_embedding_type", ("rope",), _DOCUMENTS),
    Rule("multi_latent_attention", (False,), _ARCHITECTURE),
    Rule("experimental_attention_variant", (None,), _ARCHITECTURE),
    Rule("window_size", (None,), "train jobs that fit into the window without it"),
    Rule("normalization", ("RMSNorm",), _ARCHITECTURE),
    Rule("swiglu", (True,), _ARCHITECTURE),
    Rule("add_bias_linear", (False,), _ARCHITECTURE),
    Rule("rotary_percent", (1.0,), _ARCHITECTURE),
    Rule("rotary_interleaved", (False,), _ARCHITECTURE),
    Rule("rotary_seq_len_interpolation_factor", (None, 1), _ARCHITECTURE),
    Rule("no_rope_freq", (None,), _ARCHITECTURE),
    Rule("mtp_num_layers", (None, 0), "its losses are not the jobs'"),
    Rule("heterogeneous_layers_config_path", (None,), _ARCHITECTURE),
    Rule("mlp_chunks_for_training", (1, 0), _WHOLE_ROWS),
    Rule("iterations_to_skip", ([], None), _OWN_DATA),
    Rule("hybrid_context_parallel", (False,), _OWN_DATA),
    Rule("dynamic_context_parallel", (False,), _OWN_DATA),
    Rule("phase_transition_iterations", (None, []), _OWN_DATA),
    Rule("perform_rl_step", (False,), _OWN_DATA),
    Rule("vision_pretraining", (False,), _OWN_DATA),
    Rule("logits_load_dir", (None,), _NO_TEACHER),
    Rule("logits_save_dir", (None,), _NO_TEACHER),
    Rule("export_kd_teacher_load", (None,), _NO_TEACHER),
    Rule("rerun_mode", ("validate_results", "disabled"), "a rerun would add gradients twice"),
    Rule("skip_train", (False,), "there is nothing to do without training"),
    Rule("freeze_all_layers", (False,), "the hooks freeze the base and leave adapters trainable"),
    Rule("init_model_with_meta_device", (False,), NOT_TRIED),
    Rule("inprocess_restart", (False,), "use torchrun --max-restarts: jobs resume by themselves"),
    Rule("gtp_weight_remat_size", (1, None), NOT_TRIED),
    Rule("num_distributed_optimizer_instances", (1,), NOT_TRIED),
    Rule("moe_use_upcycling", (False,), NOT_TRIED),
    Rule("ckpt_convert_format", (None,), "convert the base first, without the flag"),
    Rule("use_legacy_models", (False,), NOT_TRIED),
)


def check_trainer() -> None:
    """Refuses a Megatron-LM that lacks what the hooks rely on, or that cannot be imported.

    Raises:
        ImportError: naming its version, the supported ones and what is missing.
    """
    version = str(_import("megatron.core").__version__)
    for module_name, names in _RELIED_ON.items():
        module = _import(module_name, version)
        for name, parameters in names.items():
            problem = _problem(module, name, parameters)
            if problem is not None:
                raise _mismatch(version, f"{module_name} {problem}")
    if not OLDEST <= core_version(version) <= NEWEST:
        raise _mismatch(version, "its version is another")


def core_version(text: str) -> tuple[int, ...]:
    """Returns a version of Megatron-core as major and minor."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def _import(name: str, version: str = "none") -> ModuleType:
    """Imports a module of the trainer; its own ImportErrors get a remedy."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or "?"
        # The package index has megatron.core alone.
        if missing in ("megatron", "megatron.core", "megatron.training"):
            raise ImportError(
                f"a Megatron-LM checkout must be importable for {FLAG}: start its own script, or "
                f"put it on PYTHONPATH"
            ) from error
        if missing.split(".")[0] == "megatron":
            raise _mismatch(version, f"there is no {missing}") from error
        raise missing_package(error) from error
    except (ImportError, SyntaxError) as error:
        raise _wrong_python(error) from error


def missing_package(error: ImportError) -> ImportError:
    """Returns an error that says what to install."""
    package = (error.name or "?").split(".")[0]
    return ImportError(
        f"the package {package} must be installed for this Megatron-LM, got none; `pip install "
        f"six einops psutil` brings what its trainer needs and does not declare, `pip install "
        f"{package}` this one"
    )


def _wrong_python(error: ImportError | SyntaxError) -> ImportError:
    """Returns an error that compares this Python with the one that the checkout asks for."""
    running = ".".join(map(str, sys.version_info[:2]))
    wanted = _wanted_python()
    if wanted is not None and sys.version_info[:2] < tuple(map(int, wanted.split("."))):
        return ImportError(
            f"Python must be {wanted} or newer for this Megatron-LM, got {running}; use another "
            f"Python, or core_v0.16.1, which runs on 3.11 ({error})"
        )
    return ImportError(f"Megatron-LM must be importable for {FLAG}, got: {error}")


def _wanted_python() -> str | None:
    """Reads the oldest Python of the checkout on `sys.path` from its pyproject.toml."""
    spec = importlib.util.find_spec("megatron")
    for folder in (spec and spec.submodule_search_locations) or ():
        file = Path(folder).parent / "pyproject.toml"
        if file.is_file():
            given = tomllib.loads(file.read_text()).get("project", {}).get("requires-python", "")
            found = re.search(r">=\s*(\d+\.\d+)", given)
            return found[1] if found else None
    return None


def _mismatch(version: str, what: str) -> ImportError:
    oldest, newest = (".".join(map(str, pair)) for pair in (OLDEST, NEWEST))
    return ImportError(
        f"Megatron-LM must be of megatron-core {oldest} to {newest} for {FLAG}, got {version}: "
        f"{what}"
    )


def _problem(module: Any, name: str, parameters: tuple[str, ...]) -> str | None:
    target = module
    for part in name.split("."):
        target = getattr(target, part, None)
        if target is None:
            return f"has no {name}"
    missing = set(parameters) - set(inspect.signature(target).parameters)
    return f"{name} has no parameter {sorted(missing)[0]}" if missing else None


def check_arguments(args: Any) -> None:
    """Refuses settings that adapters of several jobs cannot be trained with.

    Args:
        args: Megatron's, validated.
    """
    for rule in RULES:
        rule.check(args)
    if not args.save:
        raise ValueError(f"--save must be given with {FLAG}: it is the output folder of the jobs")
    if not args.train_iters and not args.train_samples:
        raise ValueError(
            f"--train-iters must be given with {FLAG}, got {shown(args.train_iters)}; training "
            f"ends earlier when all jobs have"
        )
    balancing = getattr(args, "moe_router_load_balancing_type", "none")
    for kind in [balancing] if isinstance(balancing, str) else balancing:
        if kind in _MIXING_ROUTERS:
            raise ValueError(
                f"--moe-router-load-balancing-type must be none with {FLAG}, got {kind}; it would "
                f"route a job's tokens by another's"
            )
    is_cut = bool(getattr(args, "num_experts", None)) and args.tensor_model_parallel_size > 1
    if is_cut and not args.sequence_parallel:
        raise ValueError(
            f"--sequence-parallel must be on with {FLAG}, --num-experts and "
            f"--tensor-model-parallel-size above 1, where Megatron trains no layer without it, got "
            f"off"
        )
    chunks = 2 if args.context_parallel_size > 1 else 1
    shards = args.tensor_model_parallel_size if args.sequence_parallel else 1
    multiple = args.context_parallel_size * math.lcm(chunks, shards)
    if args.seq_length % multiple:
        raise ValueError(
            f"--seq-length must be a multiple of {multiple} with {FLAG}, for rows to be cut "
            f"evenly over context and sequence parallel ranks, got {args.seq_length}"
        )


def shown(value: Any) -> str:
    """Returns the value of an argument as a message shows it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "absent" if value is None else str(value)


def layer_pattern(args: Any) -> str | None:
    """Returns the string that says HybridModel's layers; None for GPTModel."""
    names = ("hybrid_layer_pattern", "hybrid_override_pattern")
    return next(filter(None, (getattr(args, name, None) for name in names)), None)
