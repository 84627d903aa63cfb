"""Translates between `LoraSpec` and PEFT's `adapter_config.json`; refuses other than LoRA."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Set
from pathlib import Path
from typing import Any, Literal

from tlora_megatron.config.job import EXPERT_TARGETS, HF_TARGETS, LoraSpec
from tlora_megatron.model.backbone import Backbone
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.training.formats.peft_experts import module_names

_READ_FIELDS = {
    "peft_type",
    "r",
    "lora_alpha",
    "lora_dropout",
    "use_rslora",
    "target_modules",
    "bias",
    "init_lora_weights",
    "base_model_name_or_path",
    "use_bdlora",
}
_FIELDS_OF_EXPERTS = {"rank_pattern", "alpha_pattern", "target_parameters"}
"""Read of adapters on routed experts; of others they must be unset."""
_FIELDS_WITHOUT_EFFECT = {
    "auto_mapping",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "loftq_config",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}
"""Do not change what a trained adapter of plain linears computes. Every other field must be unset:
use_dora, modules_to_save, layers_to_transform and those of PEFT versions to come."""

_BLOCK_FIELDS = {"target_modules_bd_a", "target_modules_bd_b", "nblocks", "match_strict"}
_Side = Literal["lora_a", "lora_b"]
_SIDES: tuple[_Side, ...] = ("lora_a", "lora_b")

_PLAIN_INITS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Initial values that leave the base weight as it was; PiSSA, OLoRA, LoftQ and others change it."""

FUSED_PARTS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
    "experts.linear_fc1": ("experts.gate_proj", "experts.up_proj"),
    "experts.linear_fc2": ("experts.down_proj",),
}
"""The Hugging Face modules inside a Megatron linear, in the order of its rows."""


def hf_targets(targets: tuple[str, ...]) -> tuple[str, ...]:
    """The Hugging Face modules that `targets` adapt, each at most once."""
    modules = [part for target in targets for part in FUSED_PARTS.get(target, (target,))]
    for module in modules:
        if modules.count(module) > 1:
            raise ValueError(
                f"target_modules must adapt each module once, got {module} twice "
                f"in {', '.join(targets)}"
            )
    order = {target: place for place, target in enumerate(HF_TARGETS)}
    return tuple(sorted(modules, key=lambda module: order.get(module, len(order))))


def peft_config(
    lora: LoraSpec, targets: tuple[str, ...], base_model: str, model: Backbone
) -> dict[str, Any]:
    """Returns the fields of `adapter_config.json` for an adapter of the Hugging Face `targets`.

    alpha is an integer where it is one, as PEFT and vLLM declare it, else the exact float. Where
    routed experts have another rank than the rest, `r` is theirs and patterns name the rest: PEFT
    doubles theirs when it joins gate and up, and finds no pattern of these. Under a root it would
    so scale them wrongly: the scaling is then written as alpha / r.
    """
    of_experts = [target for target in targets if target in EXPERT_TARGETS]
    rank, alpha, patterns = lora.rank, float(lora.alpha), {}
    if of_experts:
        rank = lora.rank_of(of_experts[0])
        rest = [target for target in targets if target not in EXPERT_TARGETS]
        if rank != lora.rank:
            patterns = {
                "rank_pattern": dict.fromkeys(rest, lora.rank),
                "alpha_pattern": dict.fromkeys(rest, _plain(lora.scaling * lora.rank)),
            }
        if lora.use_rslora or rank != lora.rank:
            alpha = lora.scaling * rank
    # The names under which PEFT finds the modules of routed experts.
    names = module_names(model) if isinstance(model, ModelSpec) else {}
    blocks = {"use_bdlora": _block_fields(lora, targets)} if lora.is_block_diagonal else {}
    return (
        blocks
        | {
            "alpha_pattern": {},
            "auto_mapping": None,
            "base_model_name_or_path": base_model,
            "bias": "none",
            "exclude_modules": None,
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "layers_pattern": None,
            "layers_to_transform": None,
            "lora_alpha": _plain(alpha),
            "lora_dropout": lora.dropout,
            "modules_to_save": None,
            "peft_type": "LORA",
            "r": rank,
            "rank_pattern": {},
            "revision": None,
            "target_modules": sorted(names.get(target, target) for target in targets),
            "task_type": "CAUSAL_LM",
            "use_dora": False,
            "use_rslora": lora.use_rslora and not of_experts,
        }
        | patterns
    )


def _plain(alpha: float) -> float:
    return int(alpha) if alpha.is_integer() else alpha


def read_peft_config(path: Path) -> dict[str, Any]:
    """Reads `adapter_config.json` and refuses what plain LoRA does not compute.

    Raises:
        ValueError: if the file is missing or not a JSON object, or a field must not be so.
    """
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"directory must hold {path.name}, got none") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path.name} must be JSON, got {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path.name} must be a JSON object, got {type(config).__name__}")
    if config.get("peft_type") != "LORA":
        raise ValueError(f"peft_type must be 'LORA', got {config.get('peft_type')!r}")
    if config.get("bias", "none") != "none":
        raise ValueError(f"bias must be 'none', got {config['bias']!r}")
    base_model = config.get("base_model_name_or_path")
    if not isinstance(base_model, str | None):
        raise ValueError(f"base_model_name_or_path must be a string or null, got {base_model!r}")
    init = config.get("init_lora_weights")
    if init not in _PLAIN_INITS:
        raise ValueError(
            f"init_lora_weights must be true, false, gaussian, orthogonal or eva, got {init!r}: "
            "it changes the base weights; convert the adapter to plain LoRA with PEFT first"
        )
    known = _READ_FIELDS | _FIELDS_OF_EXPERTS | _FIELDS_WITHOUT_EFFECT
    _check_unset(config, config.keys() - known)
    return config


def _check_unset(config: dict[str, Any], keys: Set[str]) -> None:
    for key in sorted(keys):
        value = config.get(key)
        # A plain truth test would take `layers_to_transform: 0`, the first layer alone, for unset.
        if not (value is None or value is False or value in ("", [], {})):
            raise ValueError(f"{key} must be unset (plain LoRA only), got {value!r}")


def lora_spec(config: dict[str, Any], present: set[str], model: Backbone) -> LoraSpec:
    """Returns the adapter's values; its targets are the model's `peft_targets` in `present`.

    Args:
        present: the targets that have tensors. A list of names in `config` must agree with them;
            a pattern, `all-linear` or nothing is taken to mean them.

    Raises:
        ValueError: if a value is of the wrong type or range, or the listed targets do not agree.
    """
    known = model.peft_targets
    if not present & set(EXPERT_TARGETS):
        _check_unset(config, _FIELDS_OF_EXPERTS)
    _check_targets(_named(config, model), present, known)
    use_rslora = config.get("use_rslora") or False
    if not isinstance(use_rslora, bool):
        raise ValueError(f"use_rslora must be true or false, got {use_rslora!r}")
    rank = config.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"r must be a whole number of at least 1, got {rank!r}")
    alpha = _number(config, "lora_alpha")
    if not 0 < alpha < math.inf:
        raise ValueError(f"lora_alpha must be above 0 and finite, got {alpha}")
    dropout = _number(config, "lora_dropout", default=0.0)
    if not 0 <= dropout < 1:
        raise ValueError(f"lora_dropout must be at least 0 and below 1, got {dropout}")
    targets = tuple(target for target in known if target in present)
    blocks = _num_blocks(config.get("use_bdlora"), targets, model)
    if rank % blocks:
        raise ValueError(f"r must be a multiple of use_bdlora.nblocks = {blocks}, got {rank}")
    others = set(targets) - set(EXPERT_TARGETS)
    of_others = _patterns_of_others(config, others, alpha / rank)
    rank_of_others, alpha_of_others = of_others or (rank, alpha)
    return LoraSpec(
        rank=rank_of_others,
        alpha=alpha_of_others,
        expert_rank=None if of_others is None else rank,
        dropout=dropout,
        target_modules=targets,
        use_rslora=use_rslora,
        parametrization="block_diagonal" if blocks > 1 else "standard",
        num_blocks=blocks,
    )


def _patterns_of_others(
    config: dict[str, Any], others: set[str], scaling: float
) -> tuple[int, float] | None:
    """Reads rank and alpha of all modules but routed experts; None if no pattern names them."""
    given = [config.get(key) or {} for key in ("rank_pattern", "alpha_pattern")]
    if not any(given):
        return None
    ranks, alphas = given
    is_ours = (
        all(isinstance(pattern, dict) and set(pattern) == others for pattern in given)
        and all(len(set(pattern.values())) == 1 for pattern in given)
        and not config.get("use_rslora")
    )
    if is_ours:
        rank, alpha = next(iter(ranks.values())), next(iter(alphas.values()))
        if type(rank) is int and rank > 0 and math.isclose(alpha / rank, scaling, rel_tol=1e-6):
            return rank, float(alpha)
    raise ValueError(
        "rank_pattern and alpha_pattern must be unset, or give all modules but routed experts one "
        f"other rank and the same alpha / rank, got {ranks!r} and {alphas!r}"
    )


def _named(config: dict[str, Any], model: Backbone) -> Any:
    """Returns the listed targets of modules and parameters, routed experts by our names."""
    listed, parameters = config.get("target_modules"), config.get("target_parameters") or []
    if not isinstance(listed, list) or not isinstance(model, ModelSpec):
        return listed
    ours = {name: target for target, name in module_names(model).items()}
    return [
        *(ours.get(str(name), name) for name in listed),
        *(target for name in parameters for target in _of_parameter(str(name))),
    ]


def _of_parameter(name: str) -> tuple[str, ...]:
    gate, up, down = EXPERT_TARGETS
    known = {"experts.gate_up_proj": (gate, up), "experts.down_proj": (down,)}
    found = known.get(".".join(name.split(".")[-2:]))
    if found is None:
        raise ValueError(
            f"target_parameters must be among experts.gate_up_proj, experts.down_proj, got {name!r}"
        )
    return found


def _block_fields(lora: LoraSpec, targets: tuple[str, ...]) -> dict[str, Any]:
    """PEFT's `BdLoraConfig`; it looks for each name anywhere in a module's path."""
    sides = {side: [t for t in sorted(targets) if lora.block_factor(t) == side] for side in _SIDES}
    return {
        "target_modules_bd_a": sides["lora_a"],
        "target_modules_bd_b": sides["lora_b"],
        "nblocks": lora.num_blocks,
        "match_strict": True,
    }


def _num_blocks(raw: Any, targets: tuple[str, ...], model: Backbone) -> int:
    """Returns the blocks of an adapter whose `use_bdlora` is `raw`; 1 for a standard adapter."""
    if not raw:
        return 1
    if not isinstance(raw, dict) or not raw.keys() <= _BLOCK_FIELDS:
        raise ValueError(
            f"use_bdlora must be an object of {', '.join(sorted(_BLOCK_FIELDS))}, got {raw!r}"
        )
    blocks = raw.get("nblocks", 1)
    if not isinstance(blocks, int) or isinstance(blocks, bool) or blocks < 1:
        raise ValueError(f"use_bdlora.nblocks must be a whole number of at least 1, got {blocks!r}")
    patterns = {side: _patterns(raw, side) for side in _SIDES}
    is_strict = raw.get("match_strict", True)
    if not isinstance(is_strict, bool):
        raise ValueError(f"use_bdlora.match_strict must be true or false, got {is_strict!r}")
    if blocks > 1:
        lora = LoraSpec(parametrization="block_diagonal", num_blocks=blocks)
        _check_block_factors(lora, patterns, targets, model)
    return blocks


def _patterns(raw: dict[str, Any], side: _Side) -> list[str]:
    """Names of the modules whose factor is block-diagonal."""
    key = f"target_modules_bd_{side[-1]}"
    names = raw.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"use_bdlora.{key} must be a list of names, got {names!r}")
    return names


def _check_block_factors(
    lora: LoraSpec, patterns: dict[_Side, list[str]], targets: tuple[str, ...], model: Backbone
) -> None:
    """Checks that exactly the factor that tensor parallelism cuts is block-diagonal."""
    for layer, target in itertools.product(range(model.num_layers), targets):
        path, wanted = model.module_path(layer, target), lora.block_factor(target)
        found = [side for side, names in patterns.items() if any(name in path for name in names)]
        if found != [wanted]:
            raise ValueError(
                f"use_bdlora must make {wanted} of {path} block-diagonal, as tensor parallelism "
                f"cuts it, got {' and '.join(found) or 'neither factor'}"
            )


def _check_targets(listed: Any, present: set[str], known: tuple[str, ...]) -> None:
    if listed is None or isinstance(listed, str):
        return
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise ValueError(f"target_modules must be a list of names or a pattern, got {listed!r}")
    names = {_known_part(name, known) for name in listed}
    for name in sorted(names - set(known)):
        raise ValueError(f"target_modules must be among {', '.join(known)}, got {name!r}")
    if names != present:
        raise ValueError(
            f"target_modules must be the modules that have tensors, {', '.join(sorted(present))}, "
            f"got {', '.join(sorted(names))}"
        )


def _known_part(name: str, known: tuple[str, ...]) -> str:
    """The longest known target that a listed name ends in, as PEFT matches; else its last part."""
    ends = [target for target in known if f".{name}".endswith(f".{target}")]
    return max(ends, key=len, default=name.rpartition(".")[2])


def _number(config: dict[str, Any], key: str, *, default: float | None = None) -> float:
    value = config.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{key} must be a number, got {value!r}")
    return float(value)
