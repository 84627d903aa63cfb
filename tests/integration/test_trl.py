"""Rows by our parser and by TRL: ids and what is learnt, texts of templates, and data sets."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launch import HANG_S, REPO
from tests.helpers.tiny_tokenizer import TOOL
from tlora_megatron.config.rules import shipped_templates
from tlora_megatron.training.data.rows import learnt_parts, parse_row
from tlora_megatron.training.data.tokenize import TokenSequence, load_tokenizer, tokenize_rows

BASE = REPO / "configs" / "quickstart" / "base"
PUBLIC = {"qwen3": "qwen3", "qwen3_5": "qwen3_5_think", "gpt_oss": "gptoss"}
pytestmark = pytest.mark.trl


def message(role: str, content: str | None, **keys: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **keys}


def called(arguments: Any, content: str | None = None) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    call = {"id": "c1", "type": "function", "function": function}
    return message("assistant", content, tool_calls=[call])


ARGUMENTS = {"city": 'S\u00e3o "P"', "days": [1, 2], "near": True}
ASK, RESULT = message("user", "SF?"), message("tool", '{"C": 20}', tool_call_id="c1")
TOLD, SYSTEM = message("assistant", "It is 20C."), message("system", "Be brief.")
MULTI = [ASK, TOLD, message("user", "And \u00e9?"), message("assistant", "Bye")]
SPEC = {
    **{name: {"type": name} for name in ("string", "integer", "boolean", "array", "object")},
    "city": {"type": "string", "description": "Where.", "enum": ["a", "b"], "default": "a"},
    "days": {"type": "array", "items": {"type": "integer"}, "nullable": True},
    "near": {"oneOf": [{"type": "string", "default": "x", "description": "s"}, {"type": "null"}]},
    "at": {"type": "object", "properties": {"x": {"type": "number"}, "y": {}}, "required": ["x"]},
}
SCHEMA = {"type": "object", "properties": SPEC, "required": ["city"]}
LARGE = {"type": "function", "function": {**TOOL["function"], "parameters": SCHEMA}}
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "calls, content null": (
        {"messages": [ASK, called(json.dumps(ARGUMENTS)), RESULT, TOLD], "tools": [TOOL]},
        {"messages": [ASK, called(ARGUMENTS, ""), RESULT, TOLD], "tools": [TOOL]},
    ),
    "call at the end": (
        {"messages": [SYSTEM, ASK, called(ARGUMENTS)], "tools": [LARGE]},
        {"messages": [SYSTEM, ASK, called(ARGUMENTS, "")], "tools": [LARGE]},
    ),
    "tools alone": ({"messages": [ASK, TOLD], "tools": [TOOL]}, None),
    "several turns": ({"messages": [SYSTEM, *MULTI]}, None),
    "reasoning": ({"messages": [ASK, {**TOLD, "reasoning_content": "Hm."}]}, None),
    "parts": (
        {"messages": [{**ASK, "content": [{"type": "text", "text": "SF?"}]}, TOLD]},
        {"messages": [ASK, TOLD]},
    ),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "SF?"}, {"from": "gpt", "value": "Yes"}]},
        {"messages": [ASK, message("assistant", "Yes")]},
    ),
    "Alpaca": (
        {"instruction": "SF?", "output": "Yes"},
        {"messages": [ASK, message("assistant", "Yes")]},
    ),
    "conversational completion": ({"prompt": MULTI[:3], "completion": MULTI[3:]}, None),
    "completion": ({"prompt": "a b", "completion": " c"}, None),
    "text": ({"text": "a b</s>"}, None),
}
"""Row -> as TRL has it where that differs."""


def ours(row: dict[str, Any], template: str) -> TokenSequence:
    parsed = parse_row(json.dumps(row).encode(), "")
    (part,) = learnt_parts(parsed, "all")
    return tokenize_rows([part], load_tokenizer(BASE), template)[0]


@pytest.mark.parametrize("name", PUBLIC)
def test_ids_masks_and_texts_are_those_of_trl(name: str, tmp_path: Path) -> None:
    template = shipped_templates()[name].read_text()
    theirs = [other or row for row, other in ROWS.values()]
    asked = {"base": str(BASE), "template": template, "public": PUBLIC[name], "rows": theirs}
    result = subprocess.run(
        [os.environ["TRL_PYTHON"], str(REPO / "tests/helpers/trl_sft.py")],
        input=json.dumps(asked), cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-5000:]
    expected = json.loads(result.stdout)
    assert len(expected) == len(ROWS)
    for (shape, (row, _)), told in zip(ROWS.items(), expected, strict=True):
        found = ours(row, template)
        assert found.tokens.tolist() == told["ids"], shape
        learnt = [False, *told["learnt"][1:]]  # nothing comes before the first token
        assert found.is_target.tolist() == learnt, shape
        if "text" in told:
            assert load_tokenizer(BASE).decode(found.tokens) == told["text"], shape


MAKE_TABLE = """
import json, sys
from pathlib import Path
from pyarrow import Table, parquet
Path("org/name").mkdir(parents=True)
parquet.write_table(Table.from_pylist(json.load(sys.stdin)), "org/name/train.parquet")
"""


def test_a_data_set_is_imported_once_and_its_table_means_the_same(tmp_path: Path) -> None:
    def run(*words: object, code: int = 0, said: str = "") -> str:
        env = {**os.environ, "PYTHONPATH": str(REPO), "HF_HOME": str(tmp_path / "hub")}
        result = subprocess.run(
            [os.environ["TRL_PYTHON"], *map(str, words)],
            input=said, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=HANG_S,
        )  # fmt: skip
        assert result.returncode == code, result.stdout + result.stderr
        return result.stdout + result.stderr

    rows = [
        {"id": 1, "messages": [ASK, called(json.dumps(ARGUMENTS)), RESULT, TOLD]},
        {"id": 2, "messages": [ASK, TOLD]},
        {"id": 3, "messages": [ASK]},
    ]
    run("-c", MAKE_TABLE, said=json.dumps(rows))
    tlora = ("-m", "tlora_megatron.cli", "data")
    fetch = (*tlora, "import", "org/name", "--out", "x.jsonl")
    assert "a chat must have an answer of weight 1 (role assistant), got none: org/name row 3" in (
        run(*fetch, code=2)
    )
    assert not (tmp_path / "x.jsonl").exists()
    told = "x.jsonl: 2 rows of the form messages; columns left out: id; 1 rows left out, the first"
    assert told in run(*fetch, "--skip-bad")
    assert run(*fetch, "--format", "text", code=2).count("the columns are id, messages") == 1
    lines = (tmp_path / "x.jsonl").read_bytes().splitlines()
    assert [parse_row(line, "").fields["messages"] for line in lines] == [
        parse_row({"messages": row["messages"]}, "").fields["messages"] for row in rows[:2]
    ]
    run("-c", MAKE_TABLE.replace("org/name", "plain"), said=json.dumps([{"text": "a"}] * 2))
    check = (*tlora, "check", "plain/train.parquet", "--base", BASE, "--json")
    assert json.loads(run(*check))["rows"] == 2
