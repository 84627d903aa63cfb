"""Which linears of a frozen base are held in FP8, and what a published folder states of its codes.

Two families are read. compressed-tensors writes `format: float-quantized` with a scale for each
output channel, tensor or block; DeepSeek and Qwen write `quant_method: fp8` with blocks.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tlora_megatron.config.schema import EMBEDDING, HEAD, BaseModelSpec
from tlora_megatron.config.sections import is_unquantised
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.spec import GPT_OSS, LINEAR_TARGETS, ModelSpec, refuse_experts

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
    """
    values = _read(config_json)
    raw = values.get(_KEY)
    is_mxfp4 = isinstance(raw, dict) and raw.get("quant_method") == "mxfp4"
    if raw is None or (is_mxfp4 and values.get("model_type") == GPT_OSS):
        return None
    try:
        return _parse(raw)
    except ValueError as error:
        raise ValueError(f"{error} in {_KEY} of {config_json}") from None


def _read(config_json: Path) -> dict[str, Any]:
    try:
        values = json.loads(Path(config_json).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # `read_model_spec` says what is wrong with the file
    return values if isinstance(values, dict) else {}


def refuse_published(config_json: Path, where: str) -> None:
    """Refuses a folder of FP8 weights where a trainer of somebody else's would read it."""
    stated = _read(config_json).get(_KEY)
    if isinstance(stated, dict) and stated.get("quant_method") in _METHODS:
        raise ValueError(
            f"base_model.path must hold weights that are not quantised under {where}, got FP8 ones "
            f"in {config_json.parent}; `tlora train` reads them"
        )


def _must(name: str, rule: str, value: Any) -> ValueError:
    return ValueError(f"{name} must {rule}, got {json.dumps(value)}")


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


PARTS = {linear: targets[:-1] for linear, targets in LINEAR_TARGETS.items()}
"""Megatron's linears of a layer, and the separate targets that each holds."""
ADAPTER_METADATA = "tlora_base_quantization"
"""In the metadata of an adapter's safetensors: the base's quantisation, as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseQuantisation:
    """The quantisation of one base."""

    format: str
    """Describes it to people and to checkpoints, such as `e4m3, one scale an output channel`."""
    kind: Literal["channel", "block"]
    """The part of a weight that has one scale: an output channel, or a block of 128 x 128."""
    linears: frozenset[tuple[int, str]]
    """(layer, Megatron's name) of the linears that hold codes."""
    published: PublishedFormat | None = None
    """The format of a folder that holds the codes; None = weights are quantised while read."""

    @property
    def layers_by_linear(self) -> tuple[tuple[str, int], ...]:
        """Megatron's names of the linears that hold codes, each with its number of layers."""
        counts = Counter(linear for _, linear in self.linears)
        return tuple((name, counts[name]) for name in PARTS if counts[name])

    def num_bytes(self, spec: ModelSpec) -> int:
        """Returns the bytes of all codes and scales of the model."""
        total = 0
        for _, linear in self.linears:
            rows, columns = spec.target_shape(linear)
            blocks = -(-rows // BLOCK[0]) * -(-columns // BLOCK[1])
            total += rows * columns + 4 * (rows if self.kind == "channel" else blocks)
        return total

    def describe(self, spec: ModelSpec) -> str:
        """Returns one line for people: the format, its origin, and how much of the base it is."""
        origin = "quantised while it is read" if self.published is None else "as published"
        total, gib = spec.num_layers * len(PARTS), self.num_bytes(spec) / 2**30
        return (
            f"fp8, {self.format}, {origin}; {len(self.linears)} of {total} linears, {gib:.2f} GiB"
        )


def base_quantisation(base: BaseModelSpec, spec: ModelSpec) -> BaseQuantisation | None:
    """Returns how a configured base is quantised; None if it is not.

    Raises:
        ValueError: if its folder is quantised in a way that is not supported, or the configuration
            names a layer that the model lacks.
    """
    config = Path(base.path) / "config.json" if base.path is not None else None
    published = None if config is None else read_published_format(config)
    if published is not None or base.quantization:
        refuse_experts(spec.experts, "a base in FP8")
    if published is None:
        return quantised_on_reading(spec, base.unquantised) if base.quantization else None
    if set(base.unquantised) != {EMBEDDING, HEAD}:
        raise ValueError(
            f"base_model.unquantised must be left out over a folder that is published in FP8, "
            f"whose config.json says what stays unquantised, got {list(base.unquantised)}"
        )
    return quantised_as_published(spec, published)


def quantised_as_published(spec: ModelSpec, published: PublishedFormat) -> BaseQuantisation:
    """Returns the quantisation of a folder that holds codes.

    Raises:
        ValueError: if only a part of one of Megatron's linears has codes.
    """
    linears = set()
    for layer in range(spec.num_layers):
        for linear, targets in PARTS.items():
            quantised = [published.quantises(spec.module_path(layer, t)) for t in targets]
            if any(quantised) and not all(quantised):
                raise ValueError(
                    f"quantization_config must treat {', '.join(targets)} of layer {layer} alike, "
                    f"which are one GEMM here, got {quantised}"
                )
            if all(quantised):
                linears.add((layer, linear))
    per = {
        "channel": "one scale an output channel",
        "tensor": "one scale a tensor",
        "block": "one scale a block of 128 x 128",
    }[published.strategy]
    return BaseQuantisation(
        format=f"e4m3, {per} ({published.method})",
        kind="block" if published.strategy == "block" else "channel",
        linears=frozenset(linears),
        published=published,
    )


def check_block_layout(
    spec: ModelSpec, quantisation: BaseQuantisation, layout: ParallelLayout
) -> None:
    """Refuses a layout, or a model, that would cut blocks of 128 x 128."""
    if quantisation.kind != "block":
        return
    names = {linear for _, linear in quantisation.linears}
    cut = cut_block(spec, names, layout.tp_size)
    if cut is None:
        return
    sizes = (spec.num_heads, spec.num_kv_heads, spec.ffn_size)
    fits = [n for n in range(1, spec.num_kv_heads + 1) if not any(size % n for size in sizes)]
    fits = [n for n in fits if cut_block(spec, names, n) is None]
    remedy = f"parallel.tp_size may be {', '.join(map(str, fits))}" if fits else "no tp_size fits"
    raise ValueError(
        f"{cut[0]} must be a multiple of {BLOCK[0]} with scales of blocks, got {cut[1]} with "
        f"parallel.tp_size {layout.tp_size}; {remedy}"
    )


def cut_block(spec: ModelSpec, linears: Collection[str], tp_size: int) -> tuple[str, int] | None:
    """Names a size at which a rank's part, or a part of a fused linear, would cut a block."""
    sizes = []
    if "linear_qkv" in linears:
        sizes.append(("head_dim", spec.head_dim))  # a key's rows lie behind its group's queries
    if "linear_proj" in linears and tp_size > 1:
        sizes.append(("num_heads * head_dim / tp_size", spec.q_size // tp_size))
    if "linear_fc1" in linears or ("linear_fc2" in linears and tp_size > 1):
        sizes.append(("intermediate_size / tp_size", spec.ffn_size // tp_size))
    return next(((name, size) for name, size in sizes if size % BLOCK[0]), None)


def quantised_on_reading(spec: ModelSpec, unquantised: Sequence[str]) -> BaseQuantisation:
    """Returns the quantisation of a base in a wider dtype.

    Raises:
        ValueError: if it names a layer that the model lacks.
    """
    for name in unquantised:
        number = name.removeprefix("layers.").split(".")[0]
        if name not in (EMBEDDING, HEAD) and number.isdigit() and int(number) >= spec.num_layers:
            raise ValueError(
                f"base_model.unquantised must name layers 0 to {spec.num_layers - 1}, got {name}"
            )
    return BaseQuantisation(
        format="e4m3, one scale an output channel",
        kind="channel",
        linears=frozenset(
            (layer, linear)
            for layer in range(spec.num_layers)
            for linear, targets in PARTS.items()
            if not is_unquantised(unquantised, layer, targets[0])
        ),
    )
