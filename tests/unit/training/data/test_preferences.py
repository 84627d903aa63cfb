"""Lines of pairs: what both sides become, and what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer
from tlora_megatron.config.job import DataSpec, JobSpec, PreferenceSpec
from tlora_megatron.service.api.openai.uploads import LineCheck
from tlora_megatron.training.data.job_data import BatchPlan, JobData, load_job_data

TOKENIZER = tiny_tokenizer()
ASK, ANSWERED = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("good", "bad"))
TEXTS = {"prompt": "ab ", "chosen": "cd", "rejected": "ef"}
CHATS = {"prompt": [ASK, ANSWERED, ASK], "chosen": [GOOD], "rejected": [BAD]}


def load(tmp_path: Path, *rows: Any, pairs: bool = True, **job: Any) -> JobData:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    preference = PreferenceSpec() if pairs else None
    data = DataSpec(train=str(path))
    spec = JobSpec(name="x", data=data, epochs=1, preference=preference, **job)
    return load_job_data(spec, TOKENIZER, VOCAB_SIZE)


@pytest.mark.parametrize(
    "row",
    [
        TEXTS,
        CHATS,
        {"chosen": "ab cd", "rejected": "ab ef"},
        {"chosen": [*CHATS["prompt"], GOOD], "rejected": [*CHATS["prompt"], BAD], "tools": None},
        {
            "input": {"messages": CHATS["prompt"], "tools": None, "parallel_tool_calls": True},
            "preferred_output": [GOOD],
            "non_preferred_output": [BAD],
        },
    ],
)
def test_sides_are_supervised_rows_of_which_the_answer_is_learnt(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    if isinstance(row.get("chosen"), str):
        common = row.get("prompt", "ab")
        rows = [
            {"prompt": common, "completion": (row.get("prompt", "") + row[side])[len(common) :]}
            for side in ("chosen", "rejected")
        ]
    else:
        silent = [ASK, {**ANSWERED, "weight": 0}, ASK]
        rows = [{"messages": [*silent, answer]} for answer in (GOOD, BAD)]
    check = LineCheck("f")
    check.feed(json.dumps(row).encode() + b"\n")
    assert check.kinds == {"pairs": 1}
    expected, found = load(tmp_path, *rows, pairs=False).train, load(tmp_path, row).train
    assert len(found) == 2
    for own, plain in zip(found, expected, strict=True):
        assert np.array_equal(own.tokens, plain.tokens)
        assert np.array_equal(own.is_target, plain.is_target)


def test_a_pair_of_which_a_side_has_no_target_left_goes_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = {"prompt": "long" * 8, "chosen": "c", "rejected": "r"}
    cut = {**TEXTS, "rejected": "r" * 40}
    with caplog.at_level(logging.WARNING):
        data = load(tmp_path, long, TEXTS, cut, max_seq_len=16)
    assert (len(data.train), data.num_truncated, data.num_dropped) == (4, 1, 1)
    assert "1 of 3 pairs cut to max_seq_len 16, 1 more dropped" in caplog.text
    plan = BatchPlan.for_job(
        JobSpec(name="x", data=DataSpec(train="t"), preference=PreferenceSpec(), epochs=1), 4
    )
    assert plan.num_sequences == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**TEXTS, "rejected": "cd"}, "chosen and rejected must differ, got the same: job 'x'"),
        ({"prompt": "a", "completion": "b"}, "a job with preference must hold prompt, chosen and"),
        ({**TEXTS, "label": False}, r"unpaired preference data \(KTO\), which is not trained"),
        ({**TEXTS, "chosn": "x"}, "got 'chosn'; did you mean chosen?"),
        ({**TEXTS, "prompt": [ASK]}, "must all be texts, or lists of messages"),
        ({**CHATS, "chosen": [ASK]}, r"an answer of weight 1 .*line 1 \(chosen\)"),
        ({**CHATS, "rejected": []}, r"not empty"),
        ([[TEXTS]], "a line must be a JSON object, got list"),
    ],
)
def test_a_bad_pair_is_refused(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(tmp_path, row)


def test_pairs_need_the_section(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"chosen must be left out: .* section preference"):
        load(tmp_path, TEXTS, pairs=False)
