"""Calls of tools, read as the chat templates of known models write them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.helpers.tiny_tokenizer import TOOL
from tlora_megatron.service.api.sampling.calls import form_of

NAME = "get_weather"
ROME = {"city": "Rome"}
_OBJECT = '{"name": "tlora_name", "arguments": {"tlora_key": "tlora_value"}}'
_TAGGED = "<function=tlora_name>\n<parameter=tlora_key>\ntlora_value\n</parameter>\n</function>"
WRITTEN = {
    "hermes": f"<tool_call>\n{_OBJECT}\n</tool_call><|im_end|>\n<|im_start|>assistant\n",
    "qwen3": f"<think>\n\n</think>\n\n<tool_call>\n{_OBJECT}\n</tool_call><|im_end|>\n",
    "qwen3.5": f"\n</think>\n\n<tool_call>\n{_TAGGED}\n</tool_call><|im_end|>\n",
    "tags alone": f"{_TAGGED}<|im_end|>",
    "llama 3.1": _OBJECT.replace("arguments", "parameters") + "<|eot_id|><|start_header_id|>",
    "mistral": f'[TOOL_CALLS] [{_OBJECT[:-1]}, "id": "tloracall"}}]</s>',
    "mistral 13": '[TOOL_CALLS]tlora_name[ARGS]{"tlora_key": "tlora_value"}</s>',
    "deepseek": '<|call_begin|>function<|sep|>tlora_name\n```json\n{"tlora_key": "tlora_value"}\n'
    "```<|call_end|><|end|>",
    "gpt-oss": " to=functions.tlora_name<|channel|>commentary json<|message|>"
    '{"tlora_key": "tlora_value"}<|call|><|start|>assistant',
}  # fmt: skip
"""Behind the generation prompt: what the templates of these models write for the known call."""
TOOLS = [
    TOOL,
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
        "n": {"type": "integer"}, "is_all": {"type": "boolean"}, "tags": {"type": "array"},
        "zip": {"type": "string"}, "when": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    }}}},
]  # fmt: skip


def tool(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


THOUGHT = "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant"
TO = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
ANSWERS: dict[str, tuple[str, str, str | None, list[Any]]] = {
    # form, answer, content (None: it is a text), calls
    "hermes": ("hermes", f"<tool_call>\n{tool(NAME, **ROME)}\n</tool_call><|im_end|>", "", [ROME]),
    "other spaces and order": (
        "hermes", 'I look.\n<tool_call>{"arguments":{"city":"Rome"},\n"name":"get_weather"}',
        "I look.", [ROME],
    ),
    "two": (
        "hermes", 2 * f"<tool_call>\n{tool(NAME, **ROME)}\n</tool_call>\n", "", [ROME, ROME],
    ),
    "text behind": ("hermes", f"<tool_call>{tool(NAME)}</tool_call> Done.", None, []),
    "cut off": ("hermes", '<tool_call>\n{"name": "get_weather", "argum', None, []),
    "no arguments": ("hermes", '<tool_call>\n{"name": "get_weather"}\n</tool_call>', None, []),
    "arguments in text": (
        "hermes", '<tool_call>{"name": "f", "arguments": "{\\"n\\": 1}"}</tool_call>', "",
        [{"n": 1}],
    ),
    "after a thought": (
        "qwen3", f"<think>\nRome!\n</think>\n\n<tool_call>\n{tool(NAME, **ROME)}\n</tool_call>",
        "<think>\nRome!\n</think>", [ROME],
    ),
    "tags": (
        "qwen3.5", "Rome!\n</think>\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nRome"
        "\n</parameter>\n</function>\n</tool_call><|im_end|>", "Rome!\n</think>", [ROME],
    ),
    "types of tags": (
        "qwen3.5", "<tool_call>\n<function=f>\n<parameter=n>\n12\n</parameter>\n<parameter=is_all>"
        "True</parameter><parameter=tags>[1, \"a\"]</parameter><parameter=zip>\n012\n</parameter>"
        "<parameter=when>None</parameter><parameter=more>\n1\n2\n</parameter></function>", "",
        [{"n": 12, "is_all": True, "tags": [1, "a"], "zip": "012", "when": None, "more": "1\n2"}],
    ),
    "tags alone": ("tags alone", "<function=f></function><function=f></function>", "", [{}, {}]),
    "a tag left open": ("qwen3.5", "<tool_call><function=f><parameter=n>1</function>", None, []),
    "llama": (
        "llama 3.1", '{"name": "get_weather", "parameters": {"city": "Rome"}}<|eot_id|>', "",
        [ROME],
    ),
    "llama, two": (
        "llama 3.1", '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "f", "parameters": '
        '{"n": 1}}', "", [{}, {"n": 1}],
    ),
    "llama, JSON of no call": ("llama 3.1", '{"name": "Rome"}', None, []),
    "mistral": (
        "mistral", f'[TOOL_CALLS] [{tool(NAME, **ROME)[:-1]}, "id": "abcdefghi"}}, {tool("f")}]',
        "", [ROME, {}],
    ),
    "mistral, no list": ("mistral", f"[TOOL_CALLS]{tool(NAME, **ROME)}</s>", "", [ROME]),
    "mistral 13": (
        "mistral 13", 'See[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[ARGS]{"n": 1}</s>', "See",
        [{}, {"n": 1}],
    ),
    "deepseek": (
        "deepseek", '<|call_begin|>function<|sep|>get_weather\n```json\n{"city": "Rome"}\n```'
        "<|call_end|>", "", [ROME],
    ),
    "gpt-oss": ("gpt-oss", f'{THOUGHT}{TO}{{"city": "Rome"}}<|call|>', "", [ROME]),
    "gpt-oss, as the template writes it": (
        "gpt-oss", ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Rome"}'
        "<|call|>", "", [ROME],
    ),
    "gpt-oss, preamble": (
        "gpt-oss", f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{TO}{{}}",
        "I look.", [{}],
    ),
    "gpt-oss, no call": (
        "gpt-oss", f"{THOUGHT}<|channel|>final<|message|>Sunny.<|return|>", "Sunny.", [],
    ),
    "gpt-oss, broken": ("gpt-oss", f"{TO}{{<|call|>", None, []),
}  # fmt: skip


@pytest.mark.parametrize("case", ANSWERS)
def test_answers_are_read_by_what_the_template_writes(case: str) -> None:
    form, answer, content, calls = ANSWERS[case]
    reader = form_of(WRITTEN[form], TOOLS)
    assert reader is not None
    said = reader.read(answer)
    if content is None:
        assert said is None
        return
    assert said is not None
    assert (said.content, said.reasoning) == (content, "Look." if THOUGHT in answer else "")
    assert [json.loads(call.arguments) for call in said.calls] == calls
    assert {call.name for call in said.calls} <= {NAME, "f"}
    assert [call.id for call in said.calls][:1] == (
        ["abcdefghi"] if case == "mistral" else [""] * bool(calls)
    )
    told = held = ""
    for token in re.findall(r"<\|\w+\|>|.", answer, re.DOTALL):  # as a stream comes
        held += token
        if not reader.may_begin(held):
            told, held = told + held, ""
    last = reader.read(held)
    assert last is not None
    assert (told + last.content, last.calls) == (content, said.calls)


@pytest.mark.parametrize(
    "written",
    ["[tlora_name(tlora_key='tlora_value')]<|im_end|>", "call:tlora_name{tlora_key:1}", ""],
)
def test_other_forms_are_not_known(written: str) -> None:
    assert form_of(written, TOOLS) is None
