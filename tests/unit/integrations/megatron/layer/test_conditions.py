"""The table of settings under which built layers and heads run by our kernels."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
from pathlib import Path
from types import SimpleNamespace

import megatron.core
import pytest
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from tlora_megatron.integrations.megatron.layer.conditions import (
    FP8,
    HEAD,
    LAYER,
    Condition,
    why_not_config,
)

ALL = (*LAYER, *FP8, *HEAD)
SAYS = {
    "tp_comm_overlap": (
        True,
        "tp_comm_overlap is True: it overlaps inside Transformer Engine's linears",
    ),
    "activation_func": (F.gelu, "activation_func is gelu: our kernels compute something else"),
    "qk_l2_norm": (True, "qk_l2_norm is True: our kernels do not compute it yet"),
}


def is_expected(condition: Condition, version: str) -> bool:
    found = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    return found >= condition.since


def test_every_field_is_one_of_the_installed_version() -> None:
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    for condition in ALL:
        expected = is_expected(condition, megatron.core.__version__)
        assert (condition.field in fields) == expected, condition


@pytest.mark.megatron_lm
def test_every_field_is_one_of_the_checkout() -> None:
    core = Path(os.environ["MEGATRON_LM_PATH"]) / "megatron" / "core"
    sources = (core / "transformer/transformer_config.py", core / "model_parallel_config.py")
    fields = {
        item.target.id
        for source in sources
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.ClassDef)
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    info = (core / "package_info.py").read_text()
    version = ".".join(re.findall(r"^(?:MAJOR|MINOR) = (\d+)", info, re.MULTILINE))
    for condition in ALL:
        expected = is_expected(condition, version)
        assert (condition.field in fields) == expected, condition


def test_fields_that_a_version_lacks_hold() -> None:
    assert why_not_config(SimpleNamespace(), ALL) is None


@pytest.mark.parametrize("condition", ALL, ids=lambda c: c.field)
def test_each_condition_alone_is_the_reason(condition: Condition) -> None:
    table = next(table for table in (LAYER, FP8, HEAD) if condition in table)
    config = SimpleNamespace(**{c.field: c.allowed[0] for c in table})
    assert why_not_config(config, table) is None
    value, sentence = SAYS.get(condition.field, ("another", None))
    setattr(config, condition.field, value)
    reason = why_not_config(config, table)
    assert reason == (sentence or f"{condition.field} is another: {condition.why}")
    for half in ("attention", "mlp"):
        applies = condition.half in (None, half)
        assert why_not_config(config, table, half) == (reason if applies else None)
