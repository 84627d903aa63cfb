"""Names the quantisation of a base: for checkpoints, which hold a job to it, and for adapters.

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

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tlora_megatron.config.schema import BaseModelSpec
from tlora_megatron.model.quantisation import ADAPTER_METADATA, PARTS, BaseQuantisation
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.quantised.rows import encode_rows
from tlora_megatron.training.formats.hf_checkpoint import HFCheckpoint
from tlora_megatron.training.formats.quantised.source import QuantizedSource

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
    """Returns the card of a configured base, the same in every layout; None without quantisation.

    Raises:
        ValueError: if the base's folder cannot be read.
    """
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
                yield source.read_codes(name, slice(0, _ROWS))
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
        where: its checkpoint, for the sentence.
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
