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
from tlora_megatron.training.data.rows import parse_row
from tlora_megatron.training.data.tokenize import load_tokenizer, tokenize_rows

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


def chat(*messages: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {"messages": list(messages), **keys}


PARTS = {"role": "user", "content": [{"type": "text", "text": "SF?"}]}
TURNS = [{"from": "human", "value": "SF?"}, {"from": "gpt", "value": "It is 20C."}]
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "calls": (chat(ASK, called(json.dumps(ARGUMENTS)), RESULT, TOLD, tools=[TOOL]),
     chat(ASK, called(ARGUMENTS, ""), RESULT, TOLD, tools=[TOOL])),
    "call at the end": (chat(SYSTEM, ASK, called(ARGUMENTS), tools=[LARGE]),
     chat(SYSTEM, ASK, called(ARGUMENTS, ""), tools=[LARGE])),
    "tools alone": (chat(ASK, TOLD, tools=[TOOL]), None),
    "several turns": (chat(SYSTEM, *MULTI), None),
    "reasoning": (chat(ASK, {**TOLD, "reasoning_content": "Hm."}), None),
    "parts": (chat(PARTS, TOLD), chat(ASK, TOLD)),
    "ShareGPT": ({"conversations": TURNS}, chat(ASK, TOLD)),
    "Alpaca": ({"instruction": "SF?", "output": "It is 20C."}, chat(ASK, TOLD)),
    "conversational completion": ({"prompt": MULTI[:3], "completion": MULTI[3:]}, None),
    "completion": ({"prompt": "a b", "completion": " c"}, None),
    "text": ({"text": "a b</s>"}, None),
}  # fmt: skip
"""Row -> as TRL has it where that differs."""


@pytest.mark.parametrize("name", PUBLIC)
def test_ids_masks_and_texts_are_those_of_trl(name: str, tmp_path: Path) -> None:
    template, tokenizer = shipped_templates()[name].read_text(), load_tokenizer(BASE)
    theirs = [other or row for row, other in ROWS.values()]
    asked = {"base": str(BASE), "template": template, "public": PUBLIC[name], "rows": theirs}
    expected = json.loads(run(tmp_path, REPO / "tests/helpers/trl_sft.py", said=json.dumps(asked)))
    rows = [parse_row(row, shape) for shape, (row, _) in ROWS.items()]
    found = tokenize_rows(rows, tokenizer, template)
    for row, sequence, told in zip(rows, found, expected, strict=True):
        assert sequence.tokens.tolist() == told["ids"], row.where
        learnt = [False, *told["learnt"][1:]]  # nothing comes before the first token
        assert sequence.is_target.tolist() == learnt, row.where
        assert told["text"] in (None, tokenizer.decode(sequence.tokens)), row.where


def run(folder: Path, *words: object, code: int = 0, said: str = "") -> str:
    """What a script says in TRL's interpreter."""
    env = {**os.environ, "PYTHONPATH": str(REPO), "HF_HOME": str(folder / "hub")}
    result = subprocess.run(
        [os.environ["TRL_PYTHON"], *map(str, words)],
        input=said, cwd=folder, env=env, capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert result.returncode == code, result.stdout + result.stderr[-5000:]
    return result.stdout or result.stderr


MAKE_TABLE = """
import json, sys
from pathlib import Path
from pyarrow import Table, parquet
Path("org/name").mkdir(parents=True)
parquet.write_table(Table.from_pylist(json.load(sys.stdin)), "org/name/train.parquet")
"""


def test_a_data_set_is_imported_once_and_its_table_means_the_same(tmp_path: Path) -> None:
    good = [chat(ASK, called(json.dumps(ARGUMENTS)), RESULT, TOLD), chat(ASK, TOLD)]
    rows = [{**row, "id": 7} for row in (*good, chat(ASK))]
    run(tmp_path, "-c", MAKE_TABLE, said=json.dumps(rows))
    fetch = ("-m", "tlora_megatron.cli", "data", "import", "org/name", "--out", "x.jsonl")
    error = "a chat must have an answer of weight 1 (role assistant), got none: org/name row 3"
    assert error in run(tmp_path, *fetch, code=2)
    assert not (tmp_path / "x.jsonl").exists()
    told = "x.jsonl: 2 rows of the form messages; columns left out: id; 1 rows left out, the first"
    assert told in run(tmp_path, *fetch, "--skip-bad")
    assert "columns are messages, id" in run(tmp_path, *fetch, "--format", "text", code=2)
    lines = (tmp_path / "x.jsonl").read_bytes().splitlines()
    assert [parse_row(line, "") for line in lines] == [parse_row(row, "") for row in good]
    table = MAKE_TABLE.replace("org/name", "t")
    run(tmp_path, "-c", table, said='[{"text": "a", "messages": null}, {"text": "b"}]')
    check = ("-m", "tlora_megatron.cli", "data", "check", "t/train.parquet", "--base", BASE)
    assert json.loads(run(tmp_path, *check, "--json"))["rows"] == 2
