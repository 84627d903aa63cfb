"""Text to tokens and targets, refusals by line, and the order of batches."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.tiny_tokenizer import (
    ASSISTANT_ID,
    BOS_ID,
    END_ID,
    EOS_ID,
    GENERATION_CHAT_TEMPLATE,
    SYSTEM_ID,
    THINKING_CHAT_TEMPLATE,
    USER_ID,
    VOCAB_SIZE,
    byte_ids,
    save_tiny_tokenizer,
    tiny_tokenizer,
)
from tlora_megatron.config.job import DataSpec, JobSpec
from tlora_megatron.training.data.job_data import BatchPlan, JobData, load_job_data
from tlora_megatron.training.data.tokenize import load_tokenizer

TOKENIZER = tiny_tokenizer()


def write(path: Path, rows: list[Any]) -> Path:
    """Writes rows as JSON lines; a bytes row is a line as it is."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def load(
    tmp_path: Path,
    rows: list[Any],
    tokenizer: Any = TOKENIZER,
    *,
    eval_rows: Any = None,
    **job: Any,
) -> JobData:
    train = write(tmp_path / "train.jsonl", rows)
    evaluation = write(tmp_path / "eval.jsonl", eval_rows) if eval_rows is not None else None
    given = {key: job.pop(key) for key in ("overlong", "learn", "chat_template") if key in job}
    data = DataSpec(train=str(train), eval=str(evaluation) if evaluation else None, **given)
    spec = JobSpec(name="x", data=data, max_steps=1, **job)
    return load_job_data(spec, tokenizer, VOCAB_SIZE)


def only(data: JobData) -> tuple[list[int], list[int]]:
    (sequence,) = data.train
    assert sequence.tokens.dtype == np.int32
    assert sequence.is_target.dtype == bool
    assert sequence.tokens.shape == sequence.is_target.shape
    return sequence.tokens.tolist(), np.flatnonzero(sequence.is_target).tolist()


def chat(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


WITH_EOS_INSIDE = [BOS_ID, *byte_ids("a"), EOS_ID, *byte_ids("c"), EOS_ID]


@pytest.mark.parametrize(
    ("options", "row", "tokens", "targets"),
    [
        ({}, ("ab", "c\u00e9"), [BOS_ID, *byte_ids("abc\u00e9"), EOS_ID], [3, 4, 5, 6]),
        ({"add_bos": False}, ("ab", "c"), [*byte_ids("abc"), EOS_ID], [2, 3]),
        # An appended EOS does not end the prompt, one that is written there stays.
        ({"add_eos": True}, ("ab", "c"), [BOS_ID, *byte_ids("abc"), EOS_ID], [3, 4]),
        ({"add_eos": True}, ("a</s>", "c"), WITH_EOS_INSIDE, [3, 4]),
        ({}, ("a</s>", "c"), WITH_EOS_INSIDE, [3, 4]),
        ({}, ("a", ""), [BOS_ID, *byte_ids("a"), EOS_ID], [2]),
        # The first token is predicted from nothing.
        ({"add_bos": False}, ("", "c"), [*byte_ids("c"), EOS_ID], [1]),
        ({}, "abc", [BOS_ID, *byte_ids("abc")], [1, 2, 3]),
        ({"add_bos": False, "add_eos": True}, "ab", [*byte_ids("ab"), EOS_ID], [1, 2]),
    ],
)
def test_tokens_and_targets_of_completions_and_texts(tmp_path, options, row, tokens, targets):
    row = {"text": row} if isinstance(row, str) else {"prompt": row[0], "completion": row[1]}
    assert only(load(tmp_path, [row], tiny_tokenizer(**options))) == (tokens, targets)


class TestMessages:
    ROW = chat(
        ("system", "s"), ("user", "a"), ("assistant", "bc"), ("user", "d"), ("assistant", "e")
    )
    TOKENS = (
        *(BOS_ID, SYSTEM_ID, *byte_ids("s"), END_ID, USER_ID, *byte_ids("a"), END_ID),
        *(ASSISTANT_ID, *byte_ids("bc"), END_ID, USER_ID, *byte_ids("d"), END_ID),
        *(ASSISTANT_ID, *byte_ids("e"), END_ID),
    )

    @pytest.mark.parametrize("trim_offsets", [False, True])
    @pytest.mark.parametrize("template", [None, GENERATION_CHAT_TEMPLATE])
    def test_targets_are_assistant_turns_with_their_end(self, tmp_path, template, trim_offsets):
        options = {"chat_template": template} if template else {}
        tokenizer = tiny_tokenizer(trim_offsets=trim_offsets, **options)
        tokens, targets = only(load(tmp_path, [self.ROW], tokenizer))
        assert tokens == list(self.TOKENS)
        assert tokens == tokenizer.apply_chat_template(self.ROW["messages"], return_dict=False)
        assert targets == [8, 9, 10, 15, 16]

    @pytest.mark.parametrize(
        "template",
        [
            "{% for m in messages %}{{ m.role[0] + ': ' + m.content + '; ' }}{% endfor %}"
            "{{ 'a: ' if add_generation_prompt }}",
            "{% for m in messages %}{{ m.role[0] + ': ' }}{% if m.role == 'assistant' %}"
            "{% generation %}{{ m.content + '; ' }}{% endgeneration %}{% else %}"
            "{{ m.content + '; ' }}{% endif %}{% endfor %}",
        ],
        ids=["prefixes", "generation blocks"],
    )
    @pytest.mark.parametrize("trim_offsets", [False, True])
    def test_white_space_at_the_edges_of_a_turn(self, tmp_path, template, trim_offsets):
        tokenizer = tiny_tokenizer(trim_offsets=trim_offsets, chat_template=template)
        row = chat(("user", "a "), ("assistant", " b"), ("user", " c"), ("assistant", "d "))
        tokens, targets = only(load(tmp_path, [row], tokenizer))
        assert tokens == byte_ids("u: a ; a:  b; u:  c; a: d ; ")
        assert targets == [*range(10, 14), *range(24, 28)]

    def test_a_think_block_in_the_last_turn_only(self, tmp_path):
        tokenizer = tiny_tokenizer(chat_template=THINKING_CHAT_TEMPLATE)
        row = chat(("user", "a"), ("assistant", "n"), ("user", "c"), ("assistant", "d"))
        tokens, targets = only(load(tmp_path, [row], tokenizer))
        learned = [*byte_ids("n"), END_ID, *byte_ids("<think></think>d"), END_ID]
        assert [tokens[i] for i in targets] == learned
        assert tokens == tokenizer.apply_chat_template(row["messages"], return_dict=False)


class TestFile:
    def test_kinds_mix_in_order_and_other_keys_are_null(self, tmp_path):
        rows = [
            {"text": "a"},
            {"prompt": "b", "completion": "c", "source": None, "label": None},
            chat(("user", "d"), ("assistant", "e")),
            {"text": "f"},
        ]
        data = load(tmp_path, rows)
        seconds = [sequence.tokens.tolist()[1] for sequence in data.train]
        assert seconds == [*byte_ids("a"), *byte_ids("b"), USER_ID, *byte_ids("f")]

    def test_more_rows_than_one_tokenizer_call(self, tmp_path):
        data = load(tmp_path, [{"text": f"{i}"} for i in range(2500)])
        assert [TOKENIZER.decode(s.tokens[1:]) for s in data.train] == [str(i) for i in range(2500)]

    def test_blank_lines_bom_crlf_and_unicode_line_breaks(self, tmp_path):
        lines = [b'\xef\xbb\xbf{"text": "a"}\r', b"", b"  \r", '{"text": "b\u2028c"}'.encode()]
        data = load(tmp_path, lines)
        assert [s.tokens[1:].tolist() for s in data.train] == [byte_ids("a"), byte_ids("b\u2028c")]

    def test_eval_file_is_apart_and_optional(self, tmp_path):
        data = load(tmp_path, [{"text": "a"}], eval_rows=[{"text": "b"}, {"text": "c"}])
        assert [s.tokens.tolist() for s in data.eval] == [[BOS_ID, *byte_ids(c)] for c in "bc"]
        assert load(tmp_path, [{"text": "a"}]).eval == ()

    def test_truncate_cuts_drops_counts_and_logs(self, tmp_path, caplog):
        rows = [
            {"text": "abcdef"},
            {"prompt": "abcdef", "completion": "g"},
            {"text": "abc"},
            {"prompt": "ab", "completion": "cd"},
        ]
        with caplog.at_level(logging.WARNING):
            data = load(tmp_path, rows, max_seq_len=4, eval_rows=[{"text": "abcd"}])
        assert [TOKENIZER.decode(s.tokens[1:]) for s in data.train] == ["abc", "abc", "abc"]
        assert data.train[2].is_target.tolist() == [False, False, False, True]
        assert (data.num_truncated, data.num_dropped) == (3, 1)
        assert "2 of 4 sequences cut to max_seq_len 4, 1 more dropped" in caplog.text
        assert "job 'x'" in caplog.text

    @pytest.mark.parametrize("length", range(1, 9))
    def test_split_text_learns_each_token_once_after_the_one_before_it(self, tmp_path, length):
        text = "abcdefgh"[:length]
        rows = [{"text": text}, {"prompt": "a", "completion": "b"}]
        data = load(tmp_path, rows, max_seq_len=4, overlong="split")
        *parts, last = data.train
        assert last.tokens.tolist() == [BOS_ID, *byte_ids("ab"), EOS_ID]
        learnt, before = [], BOS_ID
        for part in parts:
            assert 1 < len(part.tokens) <= 4
            assert part.tokens[0] == before
            assert part.is_target.tolist() == [False] + [True] * (len(part.tokens) - 1)
            learnt += part.tokens[1:].tolist()
            before = learnt[-1]
        assert learnt == byte_ids(text)
        assert (data.num_truncated, data.num_dropped) == (0, 0)

    def test_split_is_for_text_alone(self, tmp_path):
        rule = r"at most max_seq_len 3 tokens, got 4: .* line 1; .*, split is for text alone"
        with pytest.raises(ValueError, match=rule):
            load(tmp_path, [{"prompt": "a", "completion": "b"}], max_seq_len=3, overlong="split")

    def test_the_last_answer_or_each_as_if_it_were_the_last(self, tmp_path):
        tokenizer = tiny_tokenizer(chat_template=THINKING_CHAT_TEMPLATE)
        turns = (("user", "a"), ("assistant", "n"), ("user", "c"), ("assistant", "d"))
        alone = [load(tmp_path, [chat(*turns[:n])], tokenizer).train[0] for n in (2, 4)]
        first = [BOS_ID, USER_ID, *byte_ids("a"), END_ID, ASSISTANT_ID]
        for learn, expected in (("each", alone), ("last", alone[1:])):
            data = load(tmp_path, [chat(*turns)], tokenizer, learn=learn)
            assert [s.tokens.tolist() for s in data.train] == [s.tokens.tolist() for s in expected]
            last = data.train[-1]
            thought = byte_ids("<think></think>d")
            assert last.tokens[last.is_target].tolist() == [*thought, END_ID]
        assert data.train[0].tokens.tolist()[: len(first)] == first

    def test_a_template_of_the_job_s_own(self, tmp_path):
        row = chat(("user", "a"), ("assistant", "b"))
        file = tmp_path / "own.jinja"
        file.write_text("{% for m in messages %}{{ m.content + '!' }}{% endfor %}")
        assert only(load(tmp_path, [row], chat_template=str(file))) == (byte_ids("a!b!"), [2, 3])
        tokens, targets = only(load(tmp_path, [row], chat_template="qwen3"))
        assert TOKENIZER.decode(tokens).endswith("a<|im_end|>\n<|im_start|>assistant\n<think>\n\n"
        "</think>\n\nb<|im_end|>\n")  # fmt: skip
        assert TOKENIZER.decode([tokens[i] for i in targets]).startswith("<think>")
        file.write_bytes(b"\xff")
        with pytest.raises(ValueError, match=r"data.chat_template must be UTF-8, got .*own.jinja$"):
            load(tmp_path, [row], chat_template=str(file))
        with pytest.raises(ValueError, match=r"data.chat_template must be a readable file, got No"):
            load(tmp_path, [row], chat_template="qwen9")

    def test_a_sequence_of_just_max_seq_len_is_whole(self, tmp_path):
        data = load(tmp_path, [{"text": "abc"}], max_seq_len=4, overlong="error")
        assert only(data) == ([BOS_ID, *byte_ids("abc")], [1, 2, 3])
        assert (data.num_truncated, data.num_dropped) == (0, 0)


ROWS = [{"text": "a"}, {"prompt": "b\u2028", "completion": "c"}]
AS_LINES = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode()
AS_ARRAY = b"\xef\xbb\xbf\n" + json.dumps(ROWS, indent=1).encode()


@pytest.mark.parametrize("content", [AS_LINES, AS_ARRAY], ids=["lines", "array"])
def test_files_are_told_apart_by_their_bytes_and_follow_each_other(tmp_path, content):
    paths = (tmp_path / "a", tmp_path / "b.gz")
    paths[0].write_bytes(content)
    paths[1].write_bytes(gzip.compress(content))
    data = DataSpec(train=tuple(map(str, paths)), eval=str(paths[1]))
    spec = JobSpec(name="x", data=data, max_steps=1)
    found = load_job_data(spec, TOKENIZER, VOCAB_SIZE)
    expected = [s.tokens.tolist() for s in load(tmp_path, ROWS).train]
    assert [s.tokens.tolist() for s in found.train] == 2 * expected
    assert [s.tokens.tolist() for s in found.eval] == expected


BAD_FILES = {
    "cut gzip": (gzip.compress(AS_LINES)[:-9], "a gzipped file must be whole, got .*'x', .*b$"),
    "no array": (b"[1]\n[2]", r"begins with \[ must be one JSON array, got Extra data.*, .*b$"),
    "row of an array": (b'[{"text": "a"}, {"text": 1}]', "text must be a string, .*b row 2$"),
    "empty array": (b"[]", "data.train must hold at least one line, got none: job 'x', .*b$"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "message"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_files_of_several_are_named(tmp_path, content, message):
    (tmp_path / "a").write_bytes(AS_LINES)
    (tmp_path / "b").write_bytes(content)
    data = DataSpec(train=(str(tmp_path / "a"), str(tmp_path / "b")))
    with pytest.raises(ValueError, match=message):
        load_job_data(JobSpec(name="x", data=data, max_steps=1), TOKENIZER, VOCAB_SIZE)


GOOD = {"text": "abc"}
NO_JSON = "a line must be JSON, got"
BAD_KEYS = "a line must hold prompt and completion, or messages, or text, or .*, got the keys"
NO_TARGET = "a line must give at least one token to learn after its first"
BAD_LINES = {
    "not json": (b"{'text': 1}", NO_JSON),
    "cut json": (b'{"text": "a', NO_JSON),
    "deep json": (b"[" * 100_000, NO_JSON),
    "long number": (b'{"text": ' + b"1" * 5000 + b"}", NO_JSON),
    "not utf-8": (b'{"text": "\xff"}', "a line must be UTF-8, got .*0xff"),
    "list": ([1], "a line must be a JSON object, got list"),
    "no keys": ({}, BAD_KEYS + r" \[\]"),
    "no completion": ({"prompt": "a"}, BAD_KEYS + r" \['prompt'\]"),
    "no prompt": ({"completion": "a"}, BAD_KEYS + r" \['completion'\]"),
    "two kinds": ({"text": "a", "messages": []}, BAD_KEYS + r" \['messages', 'text'\]"),
    "number for text": ({"text": 5}, "text must be a string, got 5"),
    "null completion": ({"prompt": "a", "completion": None},
     "completion must be a string, got None"),
    "surrogate": (b'{"text": "\\ud800"}', "text must be Unicode text, got"),
    "empty text": ({"text": ""}, NO_TARGET + ", got 1 tokens and no target"),
    "messages no list": ({"messages": "a"}, "messages must be a non-empty list, got 'a'"),
    "messages empty": ({"messages": []}, r"messages must be a non-empty list, got \[\]"),
    "message no object": ({"messages": ["a"]},
     r"messages\[0\] must hold role and content, got 'a'"),
    "message no content": ({"messages": [{"role": "user"}]},
     r"messages\[0\] must hold role and content, got \{'role'"),
    "unknown role": (chat(("asistant", "a")),
     r"messages\[0\].role must be one of .*, got 'asistant'"),
    "no assistant": (chat(("user", "a")), "a chat must have an answer of weight 1"),
    "assistant first": (chat(("assistant", "a")), r"messages\[0\] must not be an answer"),
    "too long": ({"text": "a" * 30}, "must have at most max_seq_len 20 tokens, got 31"),
}  # fmt: skip


@pytest.mark.parametrize(("line", "message"), BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_bad_line_is_refused_with_job_file_and_number(tmp_path, line, message):
    with pytest.raises(ValueError, match=f"(?s){message}.*: job 'x', .*train.jsonl line 3"):
        load(tmp_path, [GOOD, b"", line, GOOD], max_seq_len=20, overlong="error")


def test_a_bad_line_of_the_eval_file_names_that_file(tmp_path):
    with pytest.raises(ValueError, match=r"text must be a string.*eval\.jsonl line 1$"):
        load(tmp_path, [GOOD], eval_rows=[{"text": 1}])


def test_token_ids_beyond_the_vocabulary_are_refused(tmp_path):
    spec = JobSpec(name="x", data=DataSpec(train=str(write(tmp_path / "t", [GOOD]))), max_steps=1)
    largest = byte_ids("c")[0]
    assert load_job_data(spec, TOKENIZER, largest + 1).train
    with pytest.raises(
        ValueError,
        match=f"token id must be below the model's vocabulary {largest}, got {largest}: "
        "job 'x', .*t line 1; the tokenizer does not fit the base model",
    ):
        load_job_data(spec, TOKENIZER, largest)


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_empty_file_is_refused(tmp_path, content):
    rule = r"data.train must hold at least one line.*'x', .*train.jsonl"
    with pytest.raises(ValueError, match=rule):
        load(tmp_path, [content])
    rule = r"data.eval must hold at least one line.*'x', .*eval.jsonl"
    with pytest.raises(ValueError, match=rule):
        load(tmp_path, [GOOD], eval_rows=[content])


@pytest.mark.parametrize("name", ["absent.jsonl", "."])
def test_a_missing_file_or_a_directory_is_refused(tmp_path, name):
    spec = JobSpec(name="x", data=DataSpec(train=str(tmp_path / name)), max_steps=1)
    with pytest.raises(ValueError, match=r"data.train must be a readable file, got .*: job 'x', "):
        load_job_data(spec, TOKENIZER, VOCAB_SIZE)


def test_a_file_whose_sequences_are_all_cut_before_their_targets_is_refused(tmp_path):
    rule = r"data.train must hold .*max_seq_len 4 tokens, got 2 without"
    with pytest.raises(ValueError, match=rule):
        load(tmp_path, [{"prompt": "abcdef", "completion": ""}] * 2, max_seq_len=4)


RAISES = "{{ raise_exception('roles must alternate') }}"
RAISED = "chat template, got .*roles must alternate.*train.jsonl line 2"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"has_eos": False}, "the tokenizer must have an EOS token, got none: job 'x'"),
        ({"chat_template": None}, r"messages must .* chat template, got none: job 'x', .* line 2"),
        ({"chat_template": RAISES}, RAISED),
        ({"chat_template": "{% generation %}{% endgeneration %}" + RAISES}, RAISED),
    ],
)
def test_a_tokenizer_that_does_not_do_is_refused(tmp_path, options, message):
    rows = [GOOD, chat(("user", "a"), ("assistant", "b"))]
    with pytest.raises(ValueError, match=message):
        load(tmp_path, rows, tiny_tokenizer(**options))


def test_messages_without_offsets_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(type(TOKENIZER), "is_fast", False)
    rule = "messages must come with a tokenizer that reports offsets"
    with pytest.raises(ValueError, match=rule):
        load(tmp_path, [chat(("user", "a"), ("assistant", "b"))])


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ loop.revindex0 }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ '?' if add_generation_prompt }}",
        "{% for m in messages %}{{ m.content if loop.last else m.content | upper }}{% endfor %}",
    ],
    ids=["rewrites what came before", "other generation prompt", "rewrites the turn later"],
)
def test_a_template_that_does_not_extend_is_refused(tmp_path, template):
    row = chat(("user", "1"), ("assistant", "b"), ("user", "1"), ("assistant", "d"))
    with pytest.raises(ValueError, match=r"must extend .* at messages\[1\] .*: job 'x', .* line 2"):
        load(tmp_path, [GOOD, row], tiny_tokenizer(chat_template=template))


class TestLoadTokenizer:
    @pytest.mark.parametrize("name", ["", "absent"])
    def test_refuses_a_directory_without_a_tokenizer(self, tmp_path, name):
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        (tmp_path / "vocab.json").write_text("{}")
        rule = r"base_model must hold a tokenizer \(tokenizer.json or .*"
        with pytest.raises(ValueError, match=rule):
            load_tokenizer(tmp_path / name)

    def test_refuses_a_corrupt_tokenizer(self, tmp_path):
        save_tiny_tokenizer(tmp_path)
        file = tmp_path / "tokenizer.json"
        file.write_text(file.read_text()[:200])
        with pytest.raises(ValueError, match="base_model must hold a readable tokenizer, got"):
            load_tokenizer(tmp_path)


class TestBatchPlan:
    def test_order_of_a_seed_is_pinned(self):
        # A change here breaks the resumption of runs that were started before it.
        plan = BatchPlan(num_sequences=6, batch_size=4, seed=0, max_steps=3)
        assert [plan.indices(step) for step in range(3)] == [
            (3, 2, 5, 4),
            (0, 1, 1, 4),
            (3, 0, 2, 5),
        ]

    @pytest.mark.parametrize(("seed", "other"), [(0, 1), (1, 2**40)])
    def test_epochs_and_seeds_give_other_orders(self, seed, other):
        plan = BatchPlan(num_sequences=50, batch_size=50, seed=seed, max_steps=2)
        assert plan.indices(0) != plan.indices(1)
        assert plan.indices(0) != BatchPlan(50, 50, other, max_steps=1).indices(0)

    @pytest.mark.parametrize("step", [-1, 4])
    def test_refuses_a_step_outside_the_plan(self, step):
        with pytest.raises(IndexError, match=rf"step must be in \[0, 4\), got {step}"):
            BatchPlan(num_sequences=5, batch_size=3, seed=0, max_steps=4).indices(step)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_steps": None}, "exactly one of max_steps and epochs must be set, got"),
            ({"epochs": 1}, "exactly one of max_steps and epochs must be set, got"),
            ({"num_sequences": 0}, "num_sequences must be at least 1, got 0"),
            ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
            ({"max_steps": 0}, "max_steps must be at least 1, got 0"),
        ],
    )
    def test_refuses_none_or_two_ends_and_nothing_to_take(self, options, message):
        given = {"num_sequences": 5, "batch_size": 3, "seed": 0, "max_steps": 4}
        with pytest.raises(ValueError, match=message):
            BatchPlan(**(given | options))


@given(
    num_sequences=st.integers(1, 40),
    batch_size=st.integers(1, 50),
    seed=st.integers(0, 2**64),
    epochs=st.integers(1, 4),
)
def test_each_epoch_covers_each_sequence_once(num_sequences, batch_size, seed, epochs):
    plan = BatchPlan(num_sequences, batch_size, seed, epochs=epochs)
    stream = [index for step in range(plan.num_steps) for index in plan.indices(step)]
    assert len(stream) == epochs * num_sequences
    for begin in range(0, len(stream), num_sequences):
        assert sorted(stream[begin : begin + num_sequences]) == list(range(num_sequences))


@given(
    num_sequences=st.integers(1, 40),
    batch_size=st.integers(1, 50),
    steps=st.lists(st.integers(0, 19), min_size=1, max_size=8),
)
def test_a_step_does_not_depend_on_the_steps_asked_before(num_sequences, batch_size, steps):
    plan = BatchPlan(num_sequences, batch_size, 3, max_steps=20)
    for step in steps:
        fresh = BatchPlan(num_sequences, batch_size, 3, max_steps=20)
        assert plan.indices(step) == fresh.indices(step)
        assert len(plan.indices(step)) == batch_size
