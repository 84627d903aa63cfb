"""Bases in FP8 on the disk: published folders, and what checkpoints say of their codes.

Every value stays what it is: scales are widened to fp32 exactly, and a tensor's one scale is
repeated for its rows. `model.quantisation` reads what the folder says of itself; here its tensors
are held to that. Every FP8 tensor must have a scale and every scale a tensor: a missing one is an
error and never 1.

An adapter learns around a fixed rounding of its base's weights, so it belongs to these codes.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tlora_megatron.config.schema import BaseModelSpec
from tlora_megatron.model.quantisation import (
    ADAPTER_METADATA,
    BLOCK,
    PARTS,
    BaseQuantisation,
    PublishedFormat,
)
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.quantised.rows import NAN_CODE, encode_rows
from tlora_megatron.training.formats.hf_checkpoint import HFCheckpoint, StoredTensor
from tlora_megatron.training.formats.hf_convert import hf_shapes
from tlora_megatron.training.formats.rank_tensors import RankTensor

_CODES = "F8_E4M3"
_POWERS = "F8_E8M0"
_SCALES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_WEIGHT = ".weight"
_NOTES = ("_scale", "_scale_inv", "_zero_point", "_g_idx", "_global_scale")
"""Ends of the names of tensors that belong to codes."""


class QuantizedSource(HFCheckpoint):
    """The safetensors of a published FP8 folder; codes are read as uint8."""

    def __init__(self, directory: Path, published: PublishedFormat) -> None:
        super().__init__(directory)
        self._published = published

    def stored(self, name: str) -> StoredTensor:
        """Place of a tensor; that of codes has dtype uint8."""
        return (
            self._place(name, torch.uint8) if self.dtype(name) == _CODES else super().stored(name)
        )

    def check(self, spec: ModelSpec, quantisation: BaseQuantisation) -> None:
        """Holds names, types and shapes of all tensors to config.json, reading none."""
        quantised = {
            f"{spec.module_path(layer, target)}{_WEIGHT}"
            for layer, linear in quantisation.linears
            for target in PARTS[linear]
        }
        for name in hf_shapes(spec):
            dtype = self.dtype(name)
            if (dtype == _CODES) != (name in quantised):
                wanted = _CODES if name in quantised else "float32, bfloat16 or float16"
                raise ValueError(
                    f"{name} must be {wanted}, as config.json says with its targets and the "
                    f"modules that it leaves out, got {dtype}"
                )
        for name in self.keys():
            if self.dtype(name).startswith("F8_") and not self._is_scale(name):
                self._check_codes(name)
            elif name.endswith(_NOTES):
                self._check_note(name)

    def _is_scale(self, name: str) -> bool:
        return name.endswith(f".{self._published.scale}")

    def _check_codes(self, name: str) -> None:
        if self.dtype(name) != _CODES:
            raise ValueError(f"{name} must be {_CODES}, got {self.dtype(name)}")
        scale = self._scale_of(name)
        if scale not in self._file_of:
            raise ValueError(f"{name} must have its scales in {scale}, got none")
        shape = self.shape(name)
        allowed = _scale_shapes(shape, self._published.strategy) if len(shape) == 2 else ()
        if self.shape(scale) not in allowed:
            raise ValueError(
                f"{scale} must have shape {' or '.join(str(list(s)) for s in allowed)} over "
                f"{list(shape)} codes, got {list(self.shape(scale))}"
            )
        if self.dtype(scale) not in (*_SCALES, _POWERS):
            kinds = f"{', '.join(_SCALES)} or {_POWERS}"
            raise ValueError(f"{scale} must be {kinds}, got {self.dtype(scale)}")

    def _check_note(self, name: str) -> None:
        """Refuses a scale without codes, and what other ways of quantising leave."""
        weight = name.removesuffix(f".{self._published.scale}") + _WEIGHT
        if not self._is_scale(name):
            scale = f"*.{self._published.scale}"
            raise ValueError(f"tensors beside codes must be {scale}, got {name}")
        if weight not in self._file_of or self.dtype(weight) != _CODES:
            found = self.dtype(weight) if weight in self._file_of else "no such tensor"
            raise ValueError(f"{weight} must be {_CODES}, as {name} belongs to it, got {found}")

    def _scale_of(self, name: str) -> str:
        return f"{name.removesuffix(_WEIGHT)}.{self._published.scale}"

    def scales(self, name: str) -> Tensor:
        """All scales of a weight, fp32: `[N]`, or those of its blocks.

        Raises:
            ValueError: if one is negative or not finite.
        """
        stored = self._slice(self._scale_of(name))
        wide = _widened(stored[...] if not stored.get_shape() else stored[:], stored.get_dtype())
        if not (wide.isfinite() & (wide >= 0)).all():
            raise ValueError(f"{self._scale_of(name)} must be finite and not negative")
        if self._published.strategy == "block":
            return wide
        return wide.flatten().expand(self.shape(name)[0]).contiguous()

    def put_scales(self, tensor: RankTensor, scales: Tensor) -> None:
        put = self._put_blocks if self._published.strategy == "block" else self._put_channels
        put(tensor, scales)

    def _put_channels(self, tensor: RankTensor, scales: Tensor) -> None:
        places = tensor.units_of(scales)
        for piece in tensor.pieces:
            part = self.scales(piece.source)[piece.rows]
            window = places[:, piece.begin : piece.begin + piece.width]
            window.copy_(part.view(window.shape))

    def _put_blocks(self, tensor: RankTensor, scales: Tensor) -> None:
        """Moves whole blocks; `model.quantisation.check_block_layout` has seen that none is cut."""
        per_unit = tensor.num_rows // tensor.units
        for piece in tensor.pieces:
            source = self.scales(piece.source)
            cols = slice(None) if piece.cols is None else _blocks(piece.cols)
            for unit in range(tensor.units):
                first, begin = unit * per_unit + piece.begin, piece.rows.start + unit * piece.width
                to = _blocks(slice(first, first + piece.width))
                taken = source[_blocks(slice(begin, begin + piece.width)), cols]
                scales[to].copy_(taken)


def all_numbers(codes: Tensor) -> Tensor:
    """A scalar on the codes' device: False if there is a NaN among them."""
    return ((codes & NAN_CODE) != NAN_CODE).all()


def _blocks(run: slice) -> slice:
    assert run.start % BLOCK[0] == 0, f"a run must begin with a block, got {run}"
    return slice(run.start // BLOCK[0], -(-run.stop // BLOCK[0]))


def _scale_shapes(shape: tuple[int, ...], strategy: str) -> tuple[tuple[int, ...], ...]:
    rows, columns = shape
    if strategy == "channel":
        return (rows, 1), (rows,)
    if strategy == "tensor":
        return (), (1,)
    return ((-(-rows // BLOCK[0]), -(-columns // BLOCK[1])),)


def _widened(stored: Tensor, dtype: str) -> Tensor:
    """Scales in fp32, exactly; bytes of UE8M0 are exponents."""
    if dtype != _POWERS:
        return stored.float()
    exponents = stored.view(torch.uint8).to(torch.int32)
    # The bits of fp32: 0 is 2 ** -127, which is no normal number, and 255 is none at all.
    bits = torch.where(exponents == 0, 1 << 22, exponents << 23)
    return bits.to(torch.int32).view(torch.float32)


logger = logging.getLogger(__name__)

README = "README.md"
_MARK = "<!-- written by tlora -->"
_ROWS = 16
_UNQUANTISED = "null (bf16 or fp32 weights)"


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantisationCard:
    """The quantisation of a base, as files name it."""

    method: str
    """The value of `base_model.quantization`."""
    format: str
    """Describes codes and scales."""
    digest: str
    """Hash of codes and scales of some rows of a few linears, and of which linears have codes."""

    def __str__(self) -> str:
        return f"{self.method} ({self.format}, {self.digest[:12]})"


def quantisation_card(
    base: BaseModelSpec, spec: ModelSpec, quantisation: BaseQuantisation | None
) -> QuantisationCard | None:
    """Returns the card of a configured base, the same in every layout; None if unquantised."""
    if quantisation is None:
        return None
    digest = hashlib.sha256(json.dumps([quantisation.kind, sorted(quantisation.linears)]).encode())
    if base.random_init or base.path is None:
        digest.update(f"random {base.seed} {base.dtype}".encode())
    else:
        for tensor in _samples(Path(base.path), spec, quantisation):
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return QuantisationCard(method="fp8", format=quantisation.format, digest=digest.hexdigest())


def _samples(directory: Path, spec: ModelSpec, quantisation: BaseQuantisation) -> Iterator[Tensor]:
    """Codes and scales of the first rows of the first, middle and last layer's linears."""
    published = quantisation.published
    source = HFCheckpoint(directory) if published is None else QuantizedSource(directory, published)
    for layer in sorted({0, spec.num_layers // 2, spec.num_layers - 1}):
        for linear, targets in PARTS.items():
            if (layer, linear) not in quantisation.linears:
                continue
            name = f"{spec.module_path(layer, targets[-1])}.weight"
            if isinstance(source, QuantizedSource):
                yield source.read_bytes(name, slice(0, _ROWS))
                yield source.scales(name)
            else:
                rows = encode_rows(source.read(name, slice(0, _ROWS)))
                yield rows.codes_TK
                yield rows.scales


def check_same_base(
    job: str,
    where: Path,
    state: Mapping[str, Any],
    ours: QuantisationCard | None,
    *,
    allow_change: bool,
) -> None:
    """Refuses a job that would go on over a base of other codes than it has trained on.

    Args:
        state: of the checkpoint; those of earlier versions name no quantisation.

    Raises:
        ValueError: unless `base_model.allow_change` says that it may.
    """
    theirs = card_of(state.get("quantisation"))
    if (theirs and theirs.digest) == (ours and ours.digest):
        return
    was, now = (_UNQUANTISED if card is None else str(card) for card in (theirs, ours))
    if not allow_change:
        raise ValueError(
            f"job {job!r}: the base's quantization must be {was} as in its checkpoint {where}, got "
            f"{now}; base_model.allow_change: true lets jobs go on over it"
        )
    logger.warning("job %s goes on over a base with quantization %s instead of %s", job, now, was)


def card_of(value: Any) -> QuantisationCard | None:
    """Reads a card from plain values; None for anything else."""
    names = ("method", "format", "digest")
    if not isinstance(value, dict) or not all(isinstance(value.get(n), str) for n in names):
        return None
    return QuantisationCard(**{name: value[name] for name in names})


def as_metadata(card: QuantisationCard | None) -> dict[str, str]:
    """Returns what an adapter's safetensors say of the base's quantisation."""
    return {} if card is None else {ADAPTER_METADATA: json.dumps(asdict(card))}


def read_card(weights: Path) -> QuantisationCard | None:
    """Returns the card in the metadata of an adapter's safetensors; None if they hold none."""
    try:
        with safe_open(weights, "pt") as file:
            return card_of(json.loads((file.metadata() or {}).get(ADAPTER_METADATA, "null")))
    except (OSError, ValueError, SafetensorError):
        return None


def readme(base_model: str, card: QuantisationCard) -> str:
    """Returns the README of an adapter over a quantised base, with the hub's front matter."""
    return f"""\
---
base_model: {json.dumps(base_model)}
library_name: peft
tags: [lora, tlora]
---
{_MARK}
# LoRA adapter over an FP8 base

This adapter was trained over {base_model} with the linears of its layers in FP8: {card.format}.
It has learnt around the rounding of these weights: serve it over the same FP8 base. Over the base
in bf16 it loads as well, but does not compute quite what it was trained to.

- quantization: {card.method}
- digest of codes and scales: {card.digest}
"""


def remove_readme(directory: Path) -> None:
    """Removes a README that was written here: the adapter is now over an unquantised base."""
    if (directory / README).is_file() and may_write_readme(directory):
        (directory / README).unlink()


def may_write_readme(directory: Path) -> bool:
    """True if a directory has no README, or one that was written here."""
    try:
        return _MARK in (directory / README).read_text(encoding="utf-8")
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False
