"""Chats through templates with the habits of published ones, and the class of a tokenizer."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from tokenizers.pre_tokenizers import ByteLevel

from tests.helpers.tiny_tokenizer import (
    CALLS_ALONE_TEMPLATE,
    ENDLESS_TEMPLATE,
    EOS_ID,
    LAST_THINKS_TEMPLATE,
    MERGED_TEMPLATE,
    NO_CALLS_TEMPLATE,
    NO_DEVELOPER_TEMPLATE,
    ONE_CALL_TEMPLATE,
    TOOL,
    TOOLS_BLOCKS_TEMPLATE,
    TOOLS_TEMPLATE,
    VOCAB_SIZE,
    chat_template,
    save_tiny_tokenizer,
    tiny_tokenizer,
)
from tlora_megatron.config.job import DataSpec, JobSpec
from tlora_megatron.config.rules import shipped_templates
from tlora_megatron.training.data import tokenize
from tlora_megatron.training.data.job_data import load_job_data
from tlora_megatron.training.data.rows import learnt_parts, parse_row, read_messages
from tlora_megatron.training.data.tokenize import (
    TokenSequence,
    encode_prompt,
    load_tokenizer,
    stop_tokens,
    tokenize_rows,
)

ARGUMENTS = {"city": 'S\u00e3o "P"'}
BOTH = pytest.mark.parametrize("template", [TOOLS_TEMPLATE, TOOLS_BLOCKS_TEMPLATE])


def call(arguments: Any = None) -> dict[str, Any]:
    found = {"name": "get_weather", "arguments": ARGUMENTS if arguments is None else arguments}
    return {"id": "c1", "type": "function", "function": found}


def talk(arguments: Any = None, content: str | None = None) -> list[dict[str, Any]]:
    """A chat with a call, its result and two more answers."""
    return [
        {"role": "user", "content": "Warm?"},
        {"role": "assistant", "content": content, "tool_calls": [call(arguments)]},
        {"role": "tool", "tool_call_id": "c1", "name": "get_weather", "content": '{"C": 20}'},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "Bye"},
    ]


TOKENIZER = tiny_tokenizer()


def chat_of(messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {"messages": messages, "tools": [TOOL]}


def tokenized(template: str, messages: list[dict[str, Any]], **keys: Any) -> TokenSequence:
    line = json.dumps({"messages": messages, **keys}).encode()
    tokenizer = tiny_tokenizer(chat_template=template)
    return tokenize_rows([parse_row(line, "f line 1")], tokenizer)[0]


def learnt(sequence: TokenSequence) -> list[str]:
    """The text of each run of targets."""
    edges = np.flatnonzero(np.diff(sequence.is_target.astype(int), prepend=0, append=0))
    runs = edges.reshape(-1, 2)
    return [tiny_tokenizer().decode(sequence.tokens[begin:end]) for begin, end in runs]


@BOTH
@pytest.mark.parametrize("arguments", [ARGUMENTS, json.dumps(ARGUMENTS)], ids=["object", "text"])
def test_tools_and_calls_are_those_of_transformers(template: str, arguments: Any) -> None:
    found = tokenized(template, talk(arguments), tools=[TOOL])
    tokenizer = tiny_tokenizer(chat_template=TOOLS_BLOCKS_TEMPLATE)
    expected = tokenizer.apply_chat_template(
        talk(content=""), tools=[TOOL], return_dict=True, return_assistant_tokens_mask=True
    )
    assert found.tokens.tolist() == expected["input_ids"]
    assert found.is_target.tolist() == list(map(bool, expected["assistant_masks"]))
    called = json.dumps({"name": "get_weather", "arguments": ARGUMENTS}, ensure_ascii=False)
    assert learnt(found) == [called + "</s>", "Yes.</s>", "Bye</s>"]


@BOTH
@pytest.mark.parametrize("weights", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (0, 0, 1), (0, 1, None)])
def test_answers_of_weight_0_are_read_and_not_learnt(
    template: str, weights: tuple[int | None, ...]
) -> None:
    messages = talk()
    answers = [index for index, m in enumerate(messages) if m["role"] == "assistant"]
    for index, weight in zip(answers, weights, strict=True):
        messages[index]["weight"] = weight
    found = tokenized(template, messages, tools=[TOOL])
    whole = tokenized(template, talk(), tools=[TOOL])
    assert found.tokens.tolist() == whole.tokens.tolist()
    kept = [text for text, weight in zip(learnt(whole), weights, strict=True) if weight != 0]
    assert learnt(found) == kept


def test_an_answer_of_weight_0_need_not_be_told_apart() -> None:
    template = (
        "{% for m in messages %}{{ m.content | upper if m.role == 'assistant' and not loop.last "
        "else m.content }}{% endfor %}"
    )
    messages = [{"role": role, "content": role[0]} for role in ("user", "assistant") * 2]
    with pytest.raises(ValueError, match=r"messages\[1\] .*an answer of weight 0 is not looked f"):
        tokenized(template, messages)
    messages[1]["weight"] = 0
    assert learnt(tokenized(template, messages)) == ["a"]


def test_an_empty_answer_of_weight_0_is_told_apart_by_blocks() -> None:
    messages = talk()
    messages[3] |= {"content": "", "weight": 0}
    found = learnt(tokenized(TOOLS_BLOCKS_TEMPLATE, messages, tools=[TOOL]))
    assert len(found) == 2
    assert found[1] == "Bye</s>"


def test_weight_0_in_a_block_of_several_answers_is_refused() -> None:
    messages = [{"role": "assistant", "content": text} for text in "ab"]
    assert learnt(tokenized(MERGED_TEMPLATE, messages)) == ["b"]  # the first token is no target
    messages[0]["weight"] = 0
    with pytest.raises(ValueError, match=r"weight 0 must come with .* several: f line 1"):
        tokenized(MERGED_TEMPLATE, messages)


SAID = {"role": "assistant", "content": "Let me see.", "tool_calls": [call()]}
SHORT = [{"role": "system", "content": "s"}, {"role": "user", "content": " a "}]
RESULTS = [{"role": "tool", "tool_call_id": "c1", "content": "20"}] * 2
CHATS = {
    "answer": [*SHORT, {"role": "assistant", "content": "b"}],
    "reasoning": [*SHORT, {"role": "assistant", "content": "b", "thinking": "because"}],
    "call": [*SHORT, SAID],
    "after a call": [*SHORT, talk()[1], *RESULTS, {"role": "assistant", "content": "warm"}],
    "talk": talk(),
}


@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS.keys())
@pytest.mark.parametrize("name", shipped_templates())
def test_blocks_of_our_templates_begin_where_a_model_is_asked(
    name: str, messages: list[dict[str, Any]]
) -> None:
    blocks = shipped_templates()[name].read_text()
    (row,) = learnt_parts(parse_row(json.dumps(chat_of(messages)).encode(), ""), "last")
    plain = re.sub(r"\{%- (end)?generation %\}", "", blocks)
    found, expected = (tokenize_rows([row], TOKENIZER, each)[0] for each in (blocks, plain))
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.is_target.tolist() == expected.is_target.tolist()
    assert len(learnt(found)) == 1
    ids = TOKENIZER.apply_chat_template(
        read_messages(messages), tools=[TOOL], chat_template=blocks, return_dict=False
    )
    assert found.tokens.tolist() == ids


@BOTH
def test_variables_reach_the_template(template: str) -> None:
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    found = tokenized(template, asked, chat_template_kwargs={"no_think": True})
    tokenizer = tiny_tokenizer(chat_template=template)
    expected = tokenizer.apply_chat_template(asked, no_think=True, return_dict=False)
    assert found.tokens.tolist() == expected
    assert "<think></think>" in tokenizer.decode(expected)
    assert learnt(found) == ["b</s>"], "what is asked with is not learnt"
    for name, hint in (("no_thinking", "did you mean no_think?"), ("messages", "no_think")):
        with pytest.raises(ValueError, match=f"must be variables .*, got '{name}'; .*{hint}"):
            tokenized(template, asked, chat_template_kwargs={name: 1})


THOUGHT = {"role": "assistant", "content": "b", "reasoning_content": "because"}
TWICE = [{"role": "user", "content": "a"}, THOUGHT, {"role": "user", "content": "c"}, THOUGHT]
TWO_CALLS = [talk()[0], {**talk()[1], "tool_calls": [call(), call({"city": "Rome"})]}]
NAMED = [{"role": "user", "content": "bob", "name": "bob"}, {"role": "assistant", "content": "a"}]
DEVELOPER = [{"role": "developer", "content": "Be good"}, *NAMED[1:]]
LOST: dict[str, tuple[str, list[dict[str, Any]], str]] = {
    "calls": (NO_CALLS_TEMPLATE, talk(), r"messages\[1\].tool_calls\[0\].function.name"),
    "calls in blocks": (chat_template(calls="", blocks=True), talk(),
     r"messages\[1\].tool_calls\[0\].function.name"),
    "arguments": (
        chat_template(calls="{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}"),
        talk(),
        r"messages\[1\].tool_calls\[0\].function.arguments",
    ),
    "content": (CALLS_ALONE_TEMPLATE, talk(content="Let me see."), r"messages\[1\].content"),
    "second call": (ONE_CALL_TEMPLATE, TWO_CALLS, r"messages\[1\].tool_calls\[1\].function.name"),
    "tools": (chat_template(tools=""), talk(), r"tools\[0\].function.name"),
    "developer": (NO_DEVELOPER_TEMPLATE, DEVELOPER, r"messages\[0\].content"),
    "name": (TOOLS_TEMPLATE, NAMED, r"messages\[0\].name"),
    "reasoning": (chat_template(think=""), TWICE[:2], r"messages\[1\].reasoning_content"),
    "reasoning before": (LAST_THINKS_TEMPLATE, TWICE, r"messages\[1\].reasoning_content"),
}  # fmt: skip


@pytest.mark.parametrize(("template", "messages", "path"), LOST.values(), ids=LOST.keys())
def test_what_a_template_omits(template: str, messages: list[dict[str, Any]], path: str) -> None:
    rule = "must be written by the chat template, and this one passes over it"
    with pytest.raises(ValueError, match=f"^{path} {rule}: .*: f line 1$"):
        tokenized(template, messages, tools=[TOOL])


def test_templates_may_drop_reasoning_that_is_not_learnt() -> None:
    first = [TWICE[0], {**THOUGHT, "weight": 0}, *TWICE[2:]]
    found = tokenized(LAST_THINKS_TEMPLATE, first)
    assert learnt(found) == ["<think>because</think>b</s>"]
    tokenizer = tiny_tokenizer(chat_template=LAST_THINKS_TEMPLATE)
    asked = encode_prompt(tokenizer, TWICE[:3])
    assert found.tokens.tolist()[: len(asked)] == asked


@BOTH
def test_prompts_are_what_training_has_before_an_answer(template: str) -> None:
    tokenizer = tiny_tokenizer(chat_template=template)
    whole = tokenized(template, talk(json.dumps(ARGUMENTS)))
    for index in (1, 3, 5):
        asked = encode_prompt(tokenizer, talk(json.dumps(ARGUMENTS))[:index])
        assert whole.tokens.tolist()[: len(asked)] == asked
        assert whole.is_target[len(asked)]
        assert not whole.is_target[len(asked) - 1]
    with pytest.raises(ValueError, match=r"messages\[0\]'s keys must be .*did you mean name\?$"):
        encode_prompt(tokenizer, [{**talk()[0], "nmae": "bob"}])
    tokenizer = tiny_tokenizer(chat_template=NO_DEVELOPER_TEMPLATE)
    with pytest.raises(ValueError, match=r"^messages\[0\].content must be written"):
        encode_prompt(tokenizer, [DEVELOPER[0], talk()[0]])


def test_what_the_tokenizer_calls_a_tool_template_is_used_for_tools() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {"default": NO_CALLS_TEMPLATE, "tool_use": TOOLS_TEMPLATE}
    messages = read_messages(talk())
    fields = {"messages": messages, "tools": [TOOL]}
    row = parse_row(json.dumps(fields).encode(), "")
    (found,) = tokenize_rows([row], tokenizer)
    expected = tokenizer.apply_chat_template(messages, tools=[TOOL], return_dict=False)
    assert found.tokens.tolist() == expected
    (other,) = tokenize_rows([row], tokenizer, LAST_THINKS_TEMPLATE)
    assert (
        other.tokens.tolist() == tokenized(LAST_THINKS_TEMPLATE, talk(), tools=[TOOL])[0].tolist()
    )


def load(folder: Path, template: str, messages: list[dict[str, Any]], named: Any = None) -> None:
    """Loads two rows of a chat over a base with a template."""
    save_tiny_tokenizer(folder, chat_template=template)
    if named is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    train = folder / "train.jsonl"
    train.write_text(2 * (json.dumps({"messages": messages}) + "\n"))
    job = JobSpec(name="x", data=DataSpec(train=str(train)), max_steps=1)
    load_job_data(job, load_tokenizer(folder), VOCAB_SIZE)


STOPS = {
    "no end": (ENDLESS_TEMPLATE, None, 4),
    "EOS": (TOOLS_TEMPLATE, None, 0),
    "EOS and white space": (chat_template(end="</s>\n\n"), None, 0),
    "EOS in a block": (TOOLS_BLOCKS_TEMPLATE, None, 0),
    "another token": (chat_template(end="<|end|>"), None, 4),
    "a token that the base names": (chat_template(end="<|end|>\n"), [EOS_ID, 6], 0),
    "a token that the base names alone": (chat_template(end="<|end|>"), 6, 0),
    "one answer of two": (chat_template(end="{{ '</s>' if loop.last }}", blocks=True), None, 2),
}


@pytest.mark.parametrize(("template", "named", "count"), STOPS.values(), ids=STOPS.keys())
def test_answers_that_never_end_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, template: str, named: Any, count: int
) -> None:
    messages = [
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant") * 2, "abcd", strict=True)
    ]
    with caplog.at_level(logging.WARNING):
        load(tmp_path, template, messages, named)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == bool(count)
    if count:
        assert f"train.jsonl: the chat template ends {count} answers with no tok" in told[0]
        assert "does not stop" in told[0]


def test_stop_tokens_are_those_of_tokenizer_and_files(tmp_path: Path) -> None:
    save_tiny_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 6}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert stop_tokens(load_tokenizer(tmp_path)) == {EOS_ID, 5, 6}
    assert stop_tokens(tiny_tokenizer()) == {EOS_ID}
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"generation_config.json must be JSON of an object, got"):
        stop_tokens(load_tokenizer(tmp_path))


TEXTS = ["Hello  World's 12345 caf\u00e9 e\u0301\n\n x", "<|endoftext|></s> \u4f60\u597d\t!"]


def save_qwen(directory: Path) -> None:
    alphabet = sorted(ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(["<|endoftext|>", *alphabet, "He"])}
    transformers.Qwen2Tokenizer(vocab=vocab, merges=[("H", "e")]).save_pretrained(directory)


def set_value(file: Path, key: str, value: Any) -> None:
    document = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(document | {key: value}))


@pytest.mark.parametrize(
    ("model_type", "tokenizer_class"),
    [
        *tokenize._KNOWN_CLASSES,
        ("mistral", "PreTrainedTokenizerFast"),
        ("qwen2", "PreTrainedTokenizerFast"),
        ("llama", "LlamaTokenizer"),
    ],
)
def test_class_and_ids_are_auto_tokenizer_s(
    tmp_path: Path, model_type: str, tokenizer_class: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tokenizer_class.startswith("Qwen2"):
        save_qwen(tmp_path)
    else:
        save_tiny_tokenizer(tmp_path)
    set_value(tmp_path / "config.json", "model_type", model_type)
    set_value(tmp_path / "tokenizer_config.json", "tokenizer_class", tokenizer_class)
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    if (model_type, tokenizer_class) in tokenize._KNOWN_CLASSES:
        monkeypatch.setattr(transformers, "AutoTokenizer", None)
    found = load_tokenizer(tmp_path)
    assert type(found) is type(expected)
    assert found(TEXTS)["input_ids"] == expected(TEXTS)["input_ids"]
    assert found.special_tokens_map == expected.special_tokens_map
    assert found.chat_template == expected.chat_template


def test_code_that_comes_with_a_tokenizer_is_auto_tokenizer_s_to_refuse(tmp_path: Path) -> None:
    save_tiny_tokenizer(tmp_path)
    set_value(tmp_path / "config.json", "model_type", "llama")
    set_value(tmp_path / "tokenizer_config.json", "auto_map", {"AutoTokenizer": ["a.B", None]})
    assert tokenize._tokenizer_class(tmp_path) is None
