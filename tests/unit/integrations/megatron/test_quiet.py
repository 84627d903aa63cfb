"""Megatron's messages to nobody are silent; every other one is heard."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator

import pytest

from tlora_megatron.integrations.megatron import imports

GPT_MODEL = "megatron.core.models.gpt.gpt_model"


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """The filters of this process, as they were before."""
    logger = logging.getLogger(GPT_MODEL)
    filters = list(logger.filters)
    with warnings.catch_warnings():
        yield
    logger.filters[:] = filters


def _heard(message: str, category: type[Warning], module: str) -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        imports.quieten()
        warnings.warn_explicit(message, category, "somewhere.py", 1, module=module)
    return bool(caught)


@pytest.mark.parametrize(
    ("message", "category", "module", "heard"),
    [
        (
            "Transformer Engine and Apex are not installed. Falling back to Torch optimizers.",
            UserWarning,
            "megatron.core.optimizer",
            False,
        ),
        (
            "Apex is not installed. Falling back to Torch Norm",
            UserWarning,
            "megatron.core.models.backends",
            False,
        ),
        (
            "full scope is deprecated. Use empty cuda_graph_modules to capture the whole layer.",
            UserWarning,
            "megatron.core.transformer.transformer_config",
            False,
        ),
        (
            "`torch.distributed.reduce_scatter_tensor` is deprecated. Please use "
            "`torch.distributed.reduce_scatter_single` instead.",
            FutureWarning,
            "torch.distributed.c10d_logger",
            False,
        ),
        ("Apex is not installed. Falling back", UserWarning, "another.package", True),
        ("Apex is too old", UserWarning, "megatron.core.models.backends", True),
        ("Apex is not installed.", DeprecationWarning, "megatron.core.models.backends", True),
        (
            "`torch.distributed.all_to_all` is deprecated",
            FutureWarning,
            "torch.distributed.c10d_logger",
            True,
        ),
    ],
)
def test_only_the_known_warnings_are_silent(
    message: str, category: type[Warning], module: str, heard: bool
) -> None:
    assert _heard(message, category, module) is heard


def test_only_the_known_log_record_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    imports.quieten()
    imports.quieten()
    logger = logging.getLogger(GPT_MODEL)
    logger.warning("GPTModel IS DEPRECATED. GPTModel is only accepting %s.", "fixes")
    logger.warning("GPTModel has no layers")
    assert [record.getMessage() for record in caplog.records] == ["GPTModel has no layers"]
    assert len(logger.filters) == 1
