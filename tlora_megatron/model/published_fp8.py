"""The quantisation that a published FP8 folder states in its config.json, or a refusal by name.

Two families are read. compressed-tensors writes `format: float-quantized` with a scale for each
output channel, tensor or block; DeepSeek and Qwen write `quant_method: fp8` with blocks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tlora_megatron.model.gpt_oss import MODEL_TYPE

Strategy = Literal["channel", "tensor", "block"]
BLOCK = (128, 128)
_KEY = "quantization_config"
_METHODS = ("compressed-tensors", "fp8")
_LINEAR = "Linear"
"""Name of the class of all targets, as folders list it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedFormat:
    """The weights of a published folder: what has codes, and where scales are."""

    method: Literal["compressed-tensors", "fp8"]
    """The folder's `quant_method`."""
    strategy: Strategy
    """The part of a weight that has one scale."""
    scale: str
    """Name of the scales beside `weight`; codes are multiplied with them."""
    targets: tuple[str, ...]
    """Names, `re:` patterns or the class `Linear`."""
    ignored: tuple[str, ...]
    """The same, of modules that stay as they are."""
    rounds_scales: bool = False
    """Scales are powers of two, and so those of activations where the folder is served."""

    def quantises(self, module: str) -> bool:
        """True if a linear of the layers has codes, by its full name in transformers."""
        if self.method == "fp8" and any(f".{name}." in f".{module}." for name in self.ignored):
            return False  # transformers takes a part of a name, too
        return _names(self.targets, module) and not _names(self.ignored, module)


def _names(entries: Iterable[str], module: str) -> bool:
    for entry in entries:
        if entry.startswith("re:"):
            if re.match(entry[3:], module):
                return True
        elif entry == _LINEAR or module == entry or module.startswith(f"{entry}."):
            return True
    return False


def read_published_format(config_json: Path) -> PublishedFormat | None:
    """Reads the quantisation of a folder; None if its config.json states none.

    Also None for gpt-oss in MXFP4, which is decoded as it is read.

    Raises:
        ValueError: naming a value that is not supported.
    """
    raw = _stated(config_json)
    if raw is None or (_is_mxfp4(raw) and _read(config_json).get("model_type") == MODEL_TYPE):
        return None
    try:
        return _parse(raw)
    except _Unsupported as error:
        raise ValueError(f"{error} in {_KEY} of {config_json}") from None


def _read(config_json: Path) -> dict[str, Any]:
    try:
        values = json.loads(Path(config_json).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # `read_model_spec` says what is wrong with the file
    return values if isinstance(values, dict) else {}


def _stated(config_json: Path) -> Any:
    return _read(config_json).get(_KEY)


def _is_mxfp4(stated: Any) -> bool:
    return isinstance(stated, dict) and stated.get("quant_method") == "mxfp4"


def refuse_published(config_json: Path, where: str) -> None:
    """Refuses a folder of FP8 weights where a trainer of somebody else's would read it.

    Raises:
        ValueError: if its config.json says that it holds some.
    """
    stated = _stated(config_json)
    if isinstance(stated, dict) and stated.get("quant_method") in _METHODS:
        raise ValueError(
            f"base_model.path must hold weights that are not quantised under {where}, got FP8 ones "
            f"in {config_json.parent}; `tlora train` reads them"
        )


class _Unsupported(Exception):
    """A refusal whose message lacks only the file's name."""


def _must(name: str, rule: str, value: Any) -> _Unsupported:
    return _Unsupported(f"{name} must {rule}, got {json.dumps(value)}")


def _parse(raw: Any) -> PublishedFormat:
    if not isinstance(raw, dict):
        raise _must(_KEY, "be a JSON object", raw)
    method = raw.get("quant_method")
    if raw.get("kv_cache_scheme") is not None:
        raise _must("kv_cache_scheme", "be null", raw["kv_cache_scheme"])
    if method == "compressed-tensors":
        return _parse_compressed(raw)
    if method == "fp8":
        return _parse_blocks(raw)
    raise _must("quant_method", "be compressed-tensors or fp8", method)


def _parse_blocks(raw: Mapping[str, Any]) -> PublishedFormat:
    if raw.get("fmt", "e4m3") != "e4m3":
        raise _must("fmt", "be e4m3", raw["fmt"])
    if raw.get("activation_scheme", "dynamic") != "dynamic":
        raise _must("activation_scheme", "be dynamic", raw["activation_scheme"])
    _check_block("weight_block_size", raw.get("weight_block_size"))
    if raw.get("scale_fmt") not in (None, "float", "ue8m0"):
        raise _must("scale_fmt", "be ue8m0 or absent", raw["scale_fmt"])
    names = ("modules_to_not_convert", "ignored_layers")
    return PublishedFormat(
        method="fp8",
        strategy="block",
        scale="weight_scale_inv",
        targets=(_LINEAR,),
        ignored=tuple(entry for name in names for entry in _strings(name, raw.get(name))),
        rounds_scales=raw.get("scale_fmt") == "ue8m0",
    )


def _parse_compressed(raw: Mapping[str, Any]) -> PublishedFormat:
    if raw.get("format") != "float-quantized":
        raise _must("format", "be float-quantized", raw.get("format"))
    for name in ("sparsity_config", "transform_config"):
        value = raw.get(name)
        if value and value != {"format": "dense"}:
            raise _must(name, "be empty", value)
    groups = raw.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _must("config_groups", "hold a group", groups)
    schemes = {name: _parse_group(f"config_groups.{name}", group) for name, group in groups.items()}
    strategies = {strategy for strategy, _ in schemes.values()}
    if len(strategies) > 1:
        raise _must("config_groups", "have one strategy for weights", sorted(strategies))
    return PublishedFormat(
        method="compressed-tensors",
        strategy=strategies.pop(),
        scale="weight_scale",
        targets=tuple(target for _, targets in schemes.values() for target in targets),
        ignored=_strings("ignore", raw.get("ignore")),
    )


def _parse_group(path: str, group: Any) -> tuple[Strategy, tuple[str, ...]]:
    """The strategy of a group's weights, and its targets."""
    if not isinstance(group, dict):
        raise _must(path, "be a JSON object", group)
    if group.get("format") not in (None, "float-quantized"):
        raise _must(f"{path}.format", "be float-quantized", group["format"])
    if group.get("output_activations") is not None:
        raise _must(f"{path}.output_activations", "be null", group["output_activations"])
    weights = _scheme(f"{path}.weights", group.get("weights"), is_dynamic=False)
    strategy: Any = weights.get("strategy")
    if strategy not in ("channel", "tensor", "block"):
        raise _must(f"{path}.weights.strategy", "be channel, tensor or block", strategy)
    if strategy == "block":
        _check_block(f"{path}.weights.block_structure", weights.get("block_structure"))
    inputs = _scheme(f"{path}.input_activations", group.get("input_activations"), is_dynamic=True)
    wanted = "group" if strategy == "block" else "token"
    if inputs.get("strategy") != wanted:
        rule = f"be {wanted} with weights of strategy {strategy}"
        raise _must(f"{path}.input_activations.strategy", rule, inputs.get("strategy"))
    if strategy == "block" and inputs.get("group_size") != BLOCK[1]:
        rule = f"be {BLOCK[1]}"
        raise _must(f"{path}.input_activations.group_size", rule, inputs.get("group_size"))
    return strategy, _strings(f"{path}.targets", group.get("targets"))


def _scheme(path: str, scheme: Any, *, is_dynamic: bool) -> dict[str, Any]:
    if not isinstance(scheme, dict):
        raise _must(path, "be 8-bit floats", scheme)
    for name, wanted in (("num_bits", 8), ("type", "float"), ("symmetric", True)):
        if scheme.get(name, True if name == "symmetric" else None) != wanted:
            raise _must(f"{path}.{name}", f"be {json.dumps(wanted)}", scheme.get(name))
    if scheme.get("dynamic", False) is not is_dynamic:
        rule = f"be {json.dumps(is_dynamic)}"
        raise _must(f"{path}.dynamic", rule, scheme.get("dynamic", False))
    if scheme.get("actorder") is not None:
        raise _must(f"{path}.actorder", "be null", scheme["actorder"])
    return scheme


def _check_block(name: str, value: Any) -> None:
    if value not in (list(BLOCK), "x".join(map(str, BLOCK))):
        raise _must(name, f"be {list(BLOCK)}", value)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    values: Sequence[Any] = () if value is None else value
    if not isinstance(values, list | tuple) or not all(isinstance(entry, str) for entry in values):
        raise _must(name, "be a list of names", value)
    for entry in values:
        try:
            re.compile(entry.removeprefix("re:"))
        except re.error as error:
            if entry.startswith("re:"):
                raise _must(name, f"hold regular expressions ({error})", entry) from error
    return tuple(values)
