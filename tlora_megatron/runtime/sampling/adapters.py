"""Adapters that are there to be sampled with: read from PEFT folders, the least used thrown out."""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tlora_megatron.config.job import LoraSpec
from tlora_megatron.layers.adapter_bank import Adapter, AdapterBank
from tlora_megatron.layers.slab import AdapterSlab, Copier, StatePlacement
from tlora_megatron.layers.slab_layout import SlabLayout
from tlora_megatron.model.backbone import Backbone
from tlora_megatron.runtime.sampling.values import AdapterKey
from tlora_megatron.training.formats.checkpoint import find_checkpoint
from tlora_megatron.training.formats.peft import AdapterFile, export_adapter, load_adapter

_COPIER = Copier(lambda room, fill: fill(room), 4, 1 << 20)
"""Fills weights in where they stay: a thread for each small factor takes longer than all of them.
"""


class AdapterShelf:
    """A few adapters in a bank, by their keys."""

    def __init__(self, bank: AdapterBank, spec: Backbone, most: int) -> None:
        self._bank = bank
        self._spec = spec
        self._most = most
        self._held: dict[AdapterKey, Adapter] = {}
        """From the least to the most lately used."""

    @property
    def num_slots(self) -> int:
        """Slots of the bank; this is also the null slot, which is the base alone."""
        return len(self._bank.adapters)

    def fetch(self, key: AdapterKey, in_use: Collection[AdapterKey]) -> bool:
        """Makes sure that an adapter is in the bank; slots may change, but those `in_use` stay.

        Returns False if there is no room until one of these is free.
        """
        if key in self._held:
            self._held[key] = self._held.pop(key)
            return True
        is_full = len(self._held) >= self._most
        leaving = next((held for held in self._held if held not in in_use), None)
        if is_full and leaving is None:
            return False
        found = self._read(key)
        old = self._held.pop(leaving) if is_full and leaving is not None else None
        if old is not None and old.lora == found.lora:
            # The next version of a job takes the place of one before it: no other one is touched.
            old.slab.load(found.factors.__getitem__, copier=_COPIER)
            self._held[key] = old
            self._bank.refresh(self._bank.adapters.index(old))
            return True
        slab = WeightsSlab(self._bank.slab_layout(found.lora), self._bank.device)
        slab.load(found.factors.__getitem__, copier=_COPIER)
        self._held[key] = Adapter(name=key.folder, lora=found.lora, slab=slab)
        # Those that stay keep their order, so that the bank need not copy the first ones again.
        held = list(self._held.values())
        stay = [one for one in self._bank.adapters if one in held]
        self._bank.install([*stay, *(one for one in held if one not in stay)])
        return True

    def slot(self, key: AdapterKey | None) -> int:
        """The slot of an adapter that was fetched; None = the base alone."""
        if key is None:
            return self.num_slots
        return self._bank.adapters.index(self._held[key])

    def _read(self, key: AdapterKey) -> AdapterFile:
        read = read_checkpoint if key.is_checkpoint else load_adapter
        try:
            found = read(Path(key.folder), model=self._spec)
        except (OSError, SafetensorError) as error:  # its owner may delete it at any time
            raise ValueError(f"adapter must still be there, got {key.folder}") from error
        self._bank.shape.check_holds(key.folder, found.lora)
        return found


def read_checkpoint(folder: Path, *, model: Backbone) -> AdapterFile:
    """Reads the adapter of a job's checkpoint, by way of what the job would export.

    Raises:
        ValueError: if the checkpoint cannot be read, or is of another base.
    """
    found = find_checkpoint(folder)
    if found is None:
        raise ValueError(f"adapter must be a checkpoint that is still there, got {folder}")
    saved = asdict(LoraSpec()) | found.state["job"]["lora"]
    lora = LoraSpec(**{**saved, "target_modules": tuple(saved["target_modules"])})
    with safe_open(found.path / "adapter.safetensors", "pt") as file:
        factors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    with tempfile.TemporaryDirectory() as exported:
        export_adapter(Path(exported), lora=lora, factors=factors, model=model, base_model="")
        return load_adapter(Path(exported), model=model)


class WeightsSlab(AdapterSlab):
    """The weights of an adapter that is not trained, in the host's memory; no gradient, no moments.

    What stands for the gradients is a row of zeros, however many rows they seem to have: nothing is
    added to it, but kernels look up where each row lies.
    """

    def __init__(self, layout: SlabLayout, device: torch.device) -> None:
        self.layout = layout
        self.placement = StatePlacement(on_cpu=True)
        self.held = slice(0, layout.numel)
        self.grad = torch.zeros(1, device=device).expand(layout.numel)
        self.master = torch.zeros(layout.numel)

    @cached_property
    def grad_views(self) -> dict[str, Tensor]:
        views = zip(self.layout.factors, self.layout.views(self.grad), strict=True)
        shapes = {factor.name: tuple(view.shape) for factor, view in views}
        shapes |= {factor.name: factor.spread_shape for factor in self.layout.spread}
        row = torch.zeros(
            max((shape[-1] for shape in shapes.values()), default=0), device=self.grad.device
        )
        return {name: row[: shape[-1]].expand(shape) for name, shape in shapes.items()}

    def buffers(self) -> dict[str, Tensor]:
        """The weights alone."""
        return {"master": self.master}

    def zero_grad(self) -> None:
        """Does nothing."""
