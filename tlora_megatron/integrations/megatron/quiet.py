"""Silences what Megatron-core says to every user and what no user of this package can act on.

Only the messages below, each by its beginning and the module it comes from; all others are shown.
The command line calls `install` before it imports Megatron. This module itself imports neither
Megatron nor torch.
"""

from __future__ import annotations

import logging
import warnings

_MEGATRON = r"megatron\.core\."
_WARNINGS = (
    # Kernels of Transformer Engine and Apex: the backbone is built from the local layer spec, with
    # this package's norm and attention; Megatron's optimizers are not used.
    ("Transformer Engine and Apex are not installed", UserWarning, _MEGATRON),
    ("Apex is not installed", UserWarning, _MEGATRON),
    # It warns of its own default value.
    ("full scope is deprecated", UserWarning, _MEGATRON),
    # Megatron's sequence and context parallelism calls torch 2.13's collectives by their old names.
    (r"`torch\.distributed\.all_gather_into_tensor` is dep", FutureWarning, r"torch\.distributed"),
    (r"`torch\.distributed\.reduce_scatter_tensor` is dep", FutureWarning, r"torch\.distributed"),
)
_RECORDS = {
    # From 0.19 on; its successor, HybridModel, is not in 0.16.
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
}


def install() -> None:
    """Silences the messages in this process; a second call changes nothing."""
    for message, category, module in _WARNINGS:
        warnings.filterwarnings("ignore", message, category, module)
    for name, beginning in _RECORDS.items():
        logger = logging.getLogger(name)
        if not any(isinstance(known, _Without) for known in logger.filters):
            logger.addFilter(_Without(beginning))


class _Without(logging.Filter):
    """Lets every record through but those with a certain beginning."""

    def __init__(self, beginning: str) -> None:
        super().__init__()
        self.beginning = beginning

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self.beginning)
