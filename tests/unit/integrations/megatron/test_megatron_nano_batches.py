"""Which models' micro-batches are cut, and what the log says where they are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tlora_megatron.integrations.megatron.nano_batches import NanoBatches
from tlora_megatron.layers.multi_adapter import BlackBoxMixin, MegatronLinearMixin

pytestmark = pytest.mark.usefixtures("world_of_one")


class _Megatrons(MegatronLinearMixin, nn.Linear):
    pass


class _Foreign(BlackBoxMixin, nn.Linear):
    pass


def _nano_batches(linear_class: Any, sharding: str, **config: Any) -> NanoBatches:
    linear = linear_class(2, 2)
    adapters = SimpleNamespace(site=SimpleNamespace(lora_sharding=sharding))
    object.__setattr__(linear, "tlora_adapters", adapters)
    model: Any = nn.Module()
    model.config = SimpleNamespace(**config)
    model.decoder = nn.Module()
    model.decoder.layers = nn.ModuleList([linear])
    layout = SimpleNamespace(cp_size=1, pp_size=1)
    groups: Any = SimpleNamespace(layout=layout, pp_rank=0, device=torch.device("cpu"))
    return NanoBatches([model], groups)


@pytest.mark.parametrize(
    ("linear_class", "sharding", "reason"),
    [
        (_Megatrons, "s_lora", "parallel.lora_sharding must be fold or auto for it, got s_lora"),
        (_Megatrons, "rank_exchange",
         "parallel.lora_sharding must be fold or auto for it, got rank_exchange"),
        (_Foreign, "rank_exchange",
         "decoder.layers.0 is a _Foreign, which does its own communication"),
        (_Megatrons, "fold", "the decoder is a Module"),
    ],
)  # fmt: skip
def test_the_log_names_what_keeps_micro_batches_whole(
    linear_class: Any, sharding: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The setting where one is to blame, else the module."""
    nano_batches = _nano_batches(linear_class, sharding)
    nano_batches.set_count(1)
    assert not caplog.records, "nothing was asked for"
    nano_batches.set_count(2)
    nano_batches.set_count(3)
    assert nano_batches.count == 1
    assert [record.message for record in caplog.records] == [
        f"run.nano_batches has no effect, micro-batches run whole: {reason}"
    ]


def test_userbuffers_stay_on_where_both_are_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    """They were set up with the model, and nano-batches come later."""
    nano_batches = _nano_batches(_Foreign, "fold", tp_comm_overlap=True)
    nano_batches.set_count(2)
    assert nano_batches.count == 1
    (record,) = caplog.records
    assert "micro-batches run whole: --tp-comm-overlap is on" in record.message
    assert "leave it out to have nano-batches" in record.message
