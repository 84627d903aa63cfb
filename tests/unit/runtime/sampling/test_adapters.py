"""Adapters that are deleted while somebody samples with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tlora_megatron.runtime.sampling import adapters
from tlora_megatron.runtime.sampling.values import AdapterKey


def test_a_checkpoint_that_goes_while_it_is_read_is_a_refusal_and_no_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(folder: Path, **_: Any) -> None:
        (folder / "adapter.safetensors").open()

    monkeypatch.setattr(adapters, "read_checkpoint", read)
    shelf = adapters.AdapterShelf(None, None, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must still be there"):
        shelf.fetch(AdapterKey(str(tmp_path), True, ()), ())
