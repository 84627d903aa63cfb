"""Reads a DeepSpeed JSON with a `"tlora"` section, and handles the keys around it."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tlora_megatron.config.documents import apply_override, merge, read_document
from tlora_megatron.config.load import read_config
from tlora_megatron.config.parallel_rules import refuse_replicas
from tlora_megatron.config.reader import ConfigError, must, nearest, read_spec
from tlora_megatron.config.rules import resolve
from tlora_megatron.config.schema import BaseModelSpec, RunConfig, RunSpec
from tlora_megatron.config.sections import refuse_quantization
from tlora_megatron.integrations.deepspeed.job_defaults import (
    AUTO,
    TrainerValues,
    hand_over,
    refuse_autos,
    take_job_defaults,
)
from tlora_megatron.integrations.deepspeed.known_keys import check_keys

_OWNED = {
    "gradient_accumulation_steps": "a job's batch_size may span any number of micro-batches",
    "train_batch_size": "every job has a batch_size of its own",
    "train_micro_batch_size_per_gpu": "micro-batches hold run.micro_batch_tokens tokens",
    "zero_allow_untested_optimizer": "DeepSpeed gets no optimizer",
    "zero_force_ds_cpu_optimizer": "DeepSpeed gets no optimizer",
    "activation_checkpointing": "run.recompute says what is recomputed",
    # LLaMA-Factory's files have these two, which no DeepSpeed reads.
    **dict.fromkeys(("comms_config", "monitor_config"), "DeepSpeed does not read it"),
    **dict.fromkeys(
        ("flops_profiler", "wall_clock_breakdown", "tensorboard", "wandb", "csv_monitor", "comet"),
        "DeepSpeed's engine makes no steps here; every job has metrics of its own",
    ),
    **dict.fromkeys(
        (
            *("prescale_gradients", "gradient_predivide_factor", "communication_data_type"),
            *("gradient_allreduce_op", "managed_gradient_accumulation"),
        ),
        "this package adds adapters' gradients up, in fp32",
    ),
    **dict.fromkeys(("compression_training", "weight_quantization"), "the base is frozen as it is"),
    "dataloader_drop_last": "every job has data of its own",
    **dict.fromkeys(
        ("progressive_layer_drop", "curriculum_learning", "data_efficiency"),
        "DeepSpeed's engine makes no steps here; every job has data of its own",
    ),
}
"""Keys without a meaning here, each with the reason."""

_MICRO_BATCH_TOKENS = RunSpec(output_dir="").micro_batch_tokens

_REFUSED: tuple[tuple[tuple[str, ...], str], ...] = (
    (("bfloat16",), "its name is bf16"),
    (("fp16", "enabled"), "one loss scale for all jobs would let one job's inf stop the others"),
    (("amp", "enabled"), "adapters' products are in the base's dtype"),
    (("torch_autocast", "enabled"), "adapters' products are in the base's dtype"),
    (
        ("data_types", "grad_accum_dtype"),
        "it selects BF16_Optimizer, and adapters accumulate in fp32 in any case",
    ),
    (("zero_optimization", "zenflow"), "adapters have an optimizer of their own"),
    (
        ("zero_optimization", "offload_optimizer", "super_offload"),
        "adapters have an optimizer of their own",
    ),
    (("zero_optimization", "leaf_module"), "linears must be gathered one by one"),
    (("zero_optimization", "zero_quantized_weights"), "jobs' losses would be a rounded base's"),
    (
        ("zero_optimization", "zero_quantized_nontrainable_weights"),
        "jobs' losses would be a rounded base's",
    ),
    (
        ("zero_optimization", "mics_shard_size"),
        "DeepSpeed leaves it out without an optimizer; zero_hpz_partition_size gathers in a node",
    ),
    (("hybrid_engine", "enabled"), "it generates with its own kernels, which see no adapters"),
    (("pipeline",), "pipelines need PipelineModule; use tlora train with parallel.pp_size"),
    (("tensor_parallel", "tp_overlap_comm"), "it computes gradients of frozen weights"),
    (("compile", "deepcompile"), "compiled graphs do not see the micro-batch's routing"),
)
"""Settings that must be off, each with the reason."""

_SECTIONS = ("tlora", "tlora_config")
"""Top-level keys of our own."""

_OFF = ("amp",)
"""Sections that are off where they are not refused, but of which some DeepSpeed takes none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeedConfig:
    """A checked DeepSpeed JSON."""

    engine: dict[str, Any]
    """The JSON that `deepspeed.initialize` gets."""
    run: RunConfig
    stage: int
    """ZeRO stage asked for; DeepSpeed's engine itself gets stage 0 if it is below 3."""
    tp_size: int
    offload_optimizer: bool
    """True if master weights and moments of the adapters lie in host memory."""
    changes: tuple[str, ...]
    """One sentence for every key that is ignored or means something else than in DeepSpeed."""


def load_deepspeed_config(
    source: str | Path | dict[str, Any],
    overrides: Sequence[str] = (),
    *,
    output_dir: str | None = None,
    base_model: BaseModelSpec | None = None,
    trainer: TrainerValues | None = None,
) -> DeepSpeedConfig:
    """Reads and checks a DeepSpeed JSON with a `tlora` section, or a `tlora_config` file.

    Args:
        source: the file, or its values; relative paths start at its folder, or the working
            directory. `tlora` holds what a `tlora train` file holds, without `parallel`.
        base_model: describes a model that is built already; the section may then name its
            directory.
        trainer: what "auto" means; None = this package's defaults, and no "auto" in the section.
    """
    if isinstance(source, dict):
        document, folder = copy.deepcopy(source), Path.cwd()
    else:
        document = read_document(Path(source), "DeepSpeed's JSON")
        folder = Path(source).resolve().parent
    section, folder = _section(document, folder)
    _refuse_open_layout(document)
    defaults, asked, taken = take_job_defaults(document)
    document = _without_auto(document)
    _check_mappings(document)
    for override in overrides:
        apply_override(section, override)
    _refuse(document)
    changes = [f"{k} has no effect: {why}" for k, why in _OWNED.items() if _is_on(document.get(k))]
    changes += check_keys(document, ours=_SECTIONS, without_effect=(*_OWNED, *_OFF))
    if trainer is None:
        refuse_autos(section)
    else:
        taken = hand_over(section, defaults, asked, trainer)
        _check_bf16(document, base_model, trainer)
    _join(section, defaults)
    base_model = _agreed_base(document, section, base_model, folder)
    config = read_config(
        section, folder, output_dir=output_dir, targets=None, base_model=base_model
    )
    refuse_quantization(config.base_model, "DeepSpeed")
    zero, tp_size = dict(document.get("zero_optimization", {})), _tp_size(document)
    stage, offloads = zero.get("stage", 0), zero.pop("offload_optimizer", {}).get("device") == "cpu"
    config, changed = _as_engine_runs(config, stage)
    if stage != 3 and (zero.get("offload_param") or {}).get("device", "none") != "none":
        changed.append("zero_optimization.offload_param has no effect below stage 3")
    if config.run.deterministic:
        _refuse_what_neighbours_decide(stage, tp_size)
    return DeepSpeedConfig(
        engine=_engine_section(document, zero, stage, config.base_model.dtype),
        run=config,
        stage=stage,
        tp_size=tp_size,
        offload_optimizer=offloads,
        changes=(*changes, *changed, *taken),
    )


def _join(section: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Adds what holds under DeepSpeed to the section; the section's own values come first."""
    if defaults and isinstance(section.get("defaults", {}), dict):
        section["defaults"] = merge(defaults, section.get("defaults", {}))
    refuse_replicas(section.get("parallel"), "DeepSpeed")
    if "parallel" in section:
        raise ConfigError("tlora must not hold parallel: tensor_parallel.autotp_size says it")
    run = section.setdefault("run", {})
    if isinstance(run, dict) and "portion_tokens" not in run and not run.get("deterministic"):
        # Portions make a job's bits independent of its neighbours; `deterministic` has its own.
        tokens = run.get("micro_batch_tokens", _MICRO_BATCH_TOKENS)
        if isinstance(tokens, int):
            run["portion_tokens"] = max(1, tokens // 4)


def _agreed_base(
    document: dict[str, Any], section: dict[str, Any], given: BaseModelSpec | None, folder: Path
) -> BaseModelSpec | None:
    """Has `bf16` and the base agree; returns a given model's description."""
    bf16 = document.get("bf16", {}).get("enabled")
    if given is not None:
        given = _with_tokenizer(given, section.pop("base_model", None), folder)
        if bf16 is not None and bf16 != (given.dtype == "bfloat16"):
            raise must("bf16.enabled", f"agree with the model's {given.dtype}", bf16)
        return given
    base = section.get("base_model")
    if bf16 is not None and isinstance(base, dict):
        dtype = base.setdefault("dtype", "bfloat16" if bf16 else "float32")
        if bf16 and dtype != "bfloat16":
            raise must("base_model.dtype", "be bfloat16 with bf16.enabled", dtype)
    return None


def _check_bf16(
    document: dict[str, Any], given: BaseModelSpec | None, trainer: TrainerValues
) -> None:
    """Checks that a trainer's `bf16`, where it is set, agrees with DeepSpeed's and the model."""
    if not trainer.bf16:
        return
    if document.get("bf16", {}).get("enabled") is False:
        raise must("bf16.enabled", "agree with TrainingArguments.bf16 true", False)
    if given is not None and given.dtype != "bfloat16":
        remedy = "read it with dtype=torch.bfloat16"
        raise must("TrainingArguments.bf16", f"agree with the model's {given.dtype}", True, remedy)


def _as_engine_runs(config: RunConfig, stage: int) -> tuple[RunConfig, list[str]]:
    """Refuses or changes what the engine does not do; returns a sentence for each change."""
    run, changed = config.run, []
    if run.recompute not in ("none", "full"):
        raise must("run.recompute", "be none or full under DeepSpeed", run.recompute)
    if run.nano_batches not in (1, "auto"):
        raise must("run.nano_batches", "be 1 or auto under DeepSpeed", run.nano_batches)
    if run.nano_batches == "auto":
        run = replace(run, nano_batches=1)
        changed.append("run.nano_batches has no effect: DeepSpeed's engine runs batches whole")
    if stage == 3 and run.round_depth != 1:
        run = replace(run, round_depth=1)
        changed.append(
            "run.round_depth has no effect with ZeRO 3, whose ranks gather each layer together: "
            "rounds hold one micro-batch a rank, balanced by tokens"
        )
    return replace(config, run=run), changed


def _refuse_open_layout(document: dict[str, Any]) -> None:
    """Refuses "auto" where no trainer's argument says it; DeepSpeed would take its default."""
    for section, key in (("zero_optimization", "stage"), ("tensor_parallel", "autotp_size")):
        value = document.get(section)
        if isinstance(value, dict) and value.get(key) == AUTO:
            raise must(f"{section}.{key}", "be a number", AUTO, "no argument says it")


def _without_auto(value: Any) -> Any:
    """Leaves out values that the HF Trainer should fill in: all have defaults here."""
    if isinstance(value, dict):
        return {key: _without_auto(item) for key, item in value.items() if item != AUTO}
    return value


def _check_mappings(document: dict[str, Any]) -> None:
    zero = document.get("zero_optimization", {})
    for key in ("bf16", "zero_optimization", "tensor_parallel"):
        if not isinstance(document.get(key, {}), dict):
            raise must(key, "be a mapping", document[key])
    bf16 = document.get("bf16", {}).get("enabled", False)
    if not isinstance(bf16, bool):
        raise must("bf16.enabled", "be true or false", bf16)
    offload = zero.get("offload_optimizer", {})
    if not isinstance(offload, dict):
        raise must("zero_optimization.offload_optimizer", "be a mapping", offload)
    place = offload.get("device", "none")
    if place not in ("none", "cpu"):
        raise must("zero_optimization.offload_optimizer.device", "be none or cpu", place)
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise must("zero_optimization.stage", "be 0, 1, 2 or 3", stage)
    _tp_size(document)


def _section(document: dict[str, Any], folder: Path) -> tuple[dict[str, Any], Path]:
    """Removes the section from the JSON; returns it and the folder where its paths start."""
    section, file = document.pop("tlora", None), document.pop("tlora_config", None)
    if (section is None) == (file is None):
        got = "neither" if section is None else "both"
        meant = (f"{key}, {nearest(key, _SECTIONS)}" for key in document if nearest(key, _SECTIONS))
        got = next(meant, got) if section is None else got
        raise ConfigError(f"the JSON must hold exactly one of tlora and tlora_config, got {got}")
    if file is not None:
        path = folder / str(file)
        return read_document(path, "tlora_config"), path.resolve().parent
    if not isinstance(section, dict):
        raise must("tlora", "be a mapping of sections", section)
    return section, folder


def _refuse(document: dict[str, Any]) -> None:
    for path, reason in _REFUSED:
        value: Any = document
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if value not in (None, False, {}):
            name = ".".join(path)
            raise ConfigError(f"{name} must be left out, got {json.dumps(value)}: {reason}")
    sequence_parallel = document.get("sequence_parallel_size", 1)
    if sequence_parallel != 1:
        raise must("sequence_parallel_size", "be 1", sequence_parallel)


def _is_on(value: Any) -> bool:
    """False for a key that is absent, or for a section that is turned off."""
    return value not in (None, False) and not (
        isinstance(value, dict) and not value.get("enabled", True)
    )


def _with_tokenizer(given: BaseModelSpec, stated: Any, folder: Path) -> BaseModelSpec:
    """Adds the tokenizer's folder, if the section names it, to a built model's description."""
    if stated is not None:
        said = read_spec(BaseModelSpec, stated, "base_model")
        refuse_quantization(said, "DeepSpeed")
        if "dtype" in stated and said.dtype != given.dtype:
            raise must("base_model.dtype", f"agree with the model's {given.dtype}", said.dtype)
        if said.path is not None:
            return replace(given, path=resolve(said.path, folder))
    if given.path is None:
        raise ConfigError(
            "tlora.base_model.path must name the directory of the model's tokenizer, got none"
        )
    return given


def _refuse_what_neighbours_decide(stage: int, tp_size: int) -> None:
    """Refuses layouts in which a job's bits may depend on its neighbours."""
    if stage == 3:
        why = "its gathered layers run through DeepSpeed's own modules"
        raise must("zero_optimization.stage", f"be at most 2 with run.deterministic: {why}", stage)
    if tp_size > 1:
        why = "how its ranks share adapters follows from all jobs"
        rule = f"be 1 with run.deterministic: {why}"
        remedy = "take parallel.tp_size of tlora train"
        raise must("tensor_parallel.autotp_size", rule, tp_size, remedy)


def _tp_size(document: dict[str, Any]) -> int:
    size = document.get("tensor_parallel", {}).get("autotp_size", 1) or 1
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise must("tensor_parallel.autotp_size", "be an integer of at least 1", size)
    return size


def _engine_section(
    document: dict[str, Any], zero: dict[str, Any], stage: int, dtype: str
) -> dict[str, Any]:
    """Makes the JSON of an engine that has nothing to train.

    Stages 1 and 2 concern an optimizer alone, and DeepSpeed refuses them without one; so does
    `bf16` below stage 3, where it would make one.
    """
    dropped = {*_OWNED, *_OFF, "optimizer", "scheduler", "gradient_clipping"}
    dropped |= {"bf16", "fp16", "data_types"}
    engine = {key: value for key, value in document.items() if key not in dropped}
    engine["train_micro_batch_size_per_gpu"] = 1
    engine.setdefault("steps_per_print", 2**31)
    engine["zero_optimization"] = zero if stage == 3 else {"stage": 0}
    if stage == 3:
        engine["bf16"] = {"enabled": dtype == "bfloat16"}
    return engine
