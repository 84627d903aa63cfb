"""What a line may hold, by every API: shapes that people have, and mistakes by their paths."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.tiny_tokenizer import TOOL
from tlora_megatron.service.api.openai.uploads import LineCheck
from tlora_megatron.training.data.rows import learnt_parts, parse_row, read_messages

CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "SF"}'},
}
ASK, TOLD = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "20C"}
HUMAN, BOT = {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "c"}]
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


def chat(*messages: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {"messages": list(messages), **keys}


SHAPES: dict[str, tuple[dict[str, Any], str | None]] = {
    "calls, content null": (chat(ASK, CALLED, RESULT, TOLD, tools=[TOOL]), None),
    "calls, no content": (chat(ASK, {"role": "assistant", "tool_calls": [CALL]}, tools=[TOOL]),
     None),
    "calls, content empty": (chat(ASK, {**CALLED, "content": ""}, RESULT, TOLD, tools=[TOOL]),
     None),
    "tools alone": (chat(ASK, TOLD, tools=[TOOL], parallel_tool_calls=False), None),
    "weight 0": (chat(ASK, {**TOLD, "weight": 0}, ASK, {**TOLD, "weight": 1}), None),
    "content parts": (chat({"role": "user", "content": PARTS}, TOLD), None),
    "an image": (chat({"role": "user", "content": [*PARTS, IMAGE]}, TOLD),
     r"^messages\[0\].content\[2\] must be a part of type text, got \{'type': 'image_url'"),
    "a part without text": (chat({"role": "user", "content": [{"type": "text"}]}, TOLD),
     r"^messages\[0\].content\[0\] must be a part of type text, got \{'type': 'text'\}"),
    "reasoning": (chat(ASK, {**TOLD, "reasoning_content": "because"}), None),
    "ShareGPT": ({"conversations": [HUMAN, BOT], "system": "s"}, None),
    "ShareGPT with roles": ({"conversations": [ASK, TOLD], "tools": [TOOL]}, None),
    "ShareGPT's calls": ({"conversations": [HUMAN, {"from": "function_call", "value": "{}"}]},
     r"^messages\[1\].role must be one of system, .*, got 'function_call'"),
    "ShareGPT's weight": ({"conversations": [HUMAN, {**BOT, "weight": 1}]}, None),
    "ShareGPT, no answer": ({"conversations": [HUMAN]}, "a chat must have an answer of weight 1"),
    "ShareGPT, no list": ({"conversations": "a"}, "conversations must be a list, got 'a"),
    "Alpaca": ({"instruction": "hi", "input": "", "output": "x"}, None),
    "Alpaca's numbers": ({"instruction": "hi", "output": 3}, "^output must be a string, got 3"),
    "Alpaca's text": ({"instruction": "hi", "output": "x", "text": "hi x"}, "^a line must hold"),
    "unpaired preferences": ({"prompt": "a", "completion": "b", "label": False},
     "^label must be left out: it is unpaired preference data, which is not trained here: f l"),
    "conversational completion": ({"prompt": [ASK], "completion": [TOLD], "tools": [TOOL]}, None),
    "half a conversation": ({"prompt": [ASK], "completion": "b"}, "^completion must be a non-emp"),
    "the other half": ({"prompt": "a", "completion": [TOLD]}, "^completion must be a string, got"),
    "prompt that is answered": ({"prompt": [ASK, TOLD], "completion": [TOLD]},
     "^prompt must end with a message that is answered, got an answer"),
    "misspelt in a completion": ({"prompt": [ASK], "completion": [{**TOLD, "wieght": 1}]},
     r"^completion\[0\]'s keys must be"),
    "variables of the template": (chat(ASK, TOLD, chat_template_kwargs={"enable_thinking": False}),
     None),
    "misspelt": ({"prompt": "a", "completion": "b", "wieght": 3},
     "^a line's keys must be prompt, completion, got 'wieght'; remove it: training would"),
    "metadata": ({"text": "a", "id": 7}, "^a line's keys must be text, got 'id'; remove it"),
    "misspelt beside messages": (chat(ASK, TOLD, tool=[TOOL]), "got 'tool'; did you mean tools?"),
    "older tools": (chat(ASK, TOLD, functions=[TOOL]), "^functions must be left out"),
    "nulls": (chat(ASK, {**TOLD, "refusal": None}, tools=None, source=None), None),
}  # fmt: skip


@pytest.mark.parametrize(("row", "error"), SHAPES.values(), ids=SHAPES.keys())
def test_both_readers_take_and_refuse_the_same_shapes(
    row: dict[str, Any], error: str | None
) -> None:
    def by_openai(line: bytes) -> None:
        check = LineCheck("f")
        check.feed(line)
        check.end()

    line = json.dumps(row).encode()
    for reader in (by_openai, lambda line: parse_row(line, "f line 1")):
        if error is None:
            reader(line)
            continue
        with pytest.raises(ValueError, match=error) as caught:
            reader(line)
        assert "f line 1" in str(caught.value)


def call(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", **function}}]}


ARGUMENTS = r"messages\[1\].tool_calls\[0\].function.arguments must be"
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt": (chat(ASK, {**TOLD, "wieght": 0}),
     r"messages\[1\]'s keys must be role, .*, got 'wieght'; did you mean weight\?"),
    "refusal": (chat(ASK, {**TOLD, "refusal": "no"}),
     r"messages\[1\]'s keys .*, got 'refusal'; rem"),
    "older call": (chat(ASK, {**TOLD, "function_call": {}}), r"messages\[1\]'s keys must"),
    "weight 2": (chat(ASK, {**TOLD, "weight": 2}), r"messages\[1\].weight must be 0 or 1, got 2"),
    "weight true": (chat(ASK, {**TOLD, "weight": True}), r"weight must be 0 or 1, got True"),
    "weight of a question": (chat({**ASK, "weight": 0}, TOLD),
     r"messages\[0\].weight must be of role assistant, got user"),
    "calls of a question": (chat({**CALLED, "role": "user"}, TOLD), "must be of role assistant"),
    "all of weight 0": (chat(ASK, {**TOLD, "weight": 0}),
     r"a chat must have an answer of weight 1 \(role assistant\), got none"),
    "null and no calls": (chat(ASK, {**TOLD, "content": None}),
     r"content must be a string, got No"),
    "cut arguments": (chat(ASK, call(arguments="{'city")),
     ARGUMENTS + r""" JSON of an object, got "{'city\""""),
    "list of arguments": (chat(ASK, call(arguments="[1]")), ARGUMENTS + " JSON of an object"),
    "no arguments": (chat(ASK, call()), ARGUMENTS + " an object, got None"),
    "deep arguments": (chat(ASK, call(arguments="[" * 100_000)), ARGUMENTS + " JSON of an object"),
    "more in a function": (chat(ASK, call(arguments={}, argument={})), "did you mean arguments?"),
    "calls no list": (chat(ASK, {**CALLED, "tool_calls": {"a": 1}}), "tool_calls must be a list"),
    "call without a function": (chat(ASK, {**CALLED, "tool_calls": [{"type": "custom"}]}),
     r"messages\[1\].tool_calls\[0\] must be an object whose function has a name"),
    "tools as text": (chat(ASK, TOLD, tools="[{]"), r"tools must be a list, got '\[\{\]'"),
    "flat tool": (chat(ASK, TOLD, tools=[{"name": "f"}]), r"tools\[0\] must be an object whose"),
    "name no string": (chat({**ASK, "name": 1}, TOLD), r"messages\[0\].name must be a string"),
    "variables no object": (chat(ASK, TOLD, chat_template_kwargs=[1]), "must be an object, got"),
    "half a character": (chat(ASK, TOLD,
      tools=[{"function": {"name": "f", "description": "\ud800"}}]), "tools must be Unicode text"),
}  # fmt: skip


@pytest.mark.parametrize(("row", "error"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_in_chats_are_told_by_path_and_line(row: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=f"{error}.*: f line 1$"):
        parse_row(json.dumps(row).encode(), "f line 1")


def test_templates_get_objects_and_no_nulls() -> None:
    given = [
        {**ASK, "name": None},
        {**CALLED, "weight": 0, "refusal": None},
        {**TOLD, "tool_calls": []},
    ]
    arguments = {"function": {"name": "get_weather", "arguments": {"city": "SF"}}}
    assert read_messages(given) == [
        ASK,
        {"role": "assistant", "content": "", "weight": 0, "tool_calls": [{**CALL, **arguments}]},
        TOLD,
    ]
    assert given[1]["tool_calls"] == [CALL], "the caller's messages stay"


SYSTEM, AGAIN = {"role": "system", "content": "s"}, {"role": "assistant", "content": "d"}
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ShareGPT": ({"conversations": [HUMAN, BOT], "system": "s"}, chat(SYSTEM, ASK, TOLD)),
    "Alpaca": ({"instruction": "a", "input": "c", "output": "b", "system": "s"},
     chat(SYSTEM, {"role": "user", "content": "a\nc"}, TOLD)),
    "parts": (chat({"role": "user", "content": PARTS}, TOLD),
     chat({"role": "user", "content": "ac"}, TOLD)),
    "completion": ({"prompt": [SYSTEM, ASK, AGAIN, ASK], "completion": [TOLD]},
     chat(SYSTEM, ASK, {**AGAIN, "weight": 0}, ASK, TOLD)),
    "tools as text": (chat(ASK, TOLD, tools=json.dumps([TOOL])), chat(ASK, TOLD, tools=[TOOL])),
}  # fmt: skip


@pytest.mark.parametrize(("row", "fields"), SAME.values(), ids=SAME.keys())
def test_other_forms_are_chats(row: dict[str, Any], fields: dict[str, Any]) -> None:
    assert parse_row(json.dumps(row).encode(), "")[:2] == ("messages", fields)


def test_each_answer_or_the_last_one_is_a_row() -> None:
    silent = {**AGAIN, "weight": 0}
    row = parse_row(json.dumps(chat(ASK, TOLD, ASK, silent, ASK, AGAIN, ASK)).encode(), "f line 1")
    first, last = [ASK, TOLD], [ASK, {**TOLD, "weight": 0}, ASK, silent, ASK, AGAIN]
    parts = {learn: learnt_parts(row, learn) for learn in ("all", "last", "each")}
    assert parts["all"] == [row]
    assert [part.fields["messages"] for part in parts["last"]] == [last]
    assert [part.fields["messages"] for part in parts["each"]] == [first, last]
    assert {part.where for part in parts["each"]} == {"f line 1"}
    text = parse_row(b'{"text": "a"}', "")
    assert learnt_parts(text, "each") == [text]
