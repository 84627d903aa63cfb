"""The files of the quickstart are small, whole and consistent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tlora_megatron.training.data.rows import Row
from tlora_megatron.training.data.tokenize import tokenize_rows

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
BASE = CONFIGS / "quickstart" / "base"
CONFIG = yaml.safe_load((CONFIGS / "quickstart.yaml").read_text(encoding="utf-8"))


def rows_of(name: str, part: str) -> list[dict[str, str]]:
    (job,) = (job for job in CONFIG["jobs"] if job["name"] == name)
    lines = (CONFIGS / job["data"][part]).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def input_of(prompt: str) -> tuple[str, ...]:
    """The operands of a sum, else the whole prompt."""
    return tuple(part for part in prompt.split() if part[0].isdigit()) or (prompt,)


@pytest.fixture(scope="module")
def tokenizer():
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(BASE)


def test_sizes_are_small_enough_to_ship():
    assert sum(file.stat().st_size for file in BASE.iterdir()) <= 4_000_000
    assert sum(file.stat().st_size for file in (CONFIGS / "quickstart/data").iterdir()) <= 600_000


def test_config_points_at_what_is_there_and_jobs_differ():
    assert (CONFIGS / CONFIG["base_model"]["path"]).resolve() == BASE
    jobs = CONFIG["jobs"]
    assert len({job["name"] for job in jobs}) == len(jobs) == 4
    for key in ("batch_size", "max_steps"):
        assert len({job[key] for job in jobs}) == 4
    assert len({job["lora"]["rank"] for job in jobs}) == 4
    assert {job["schedule"]["name"] for job in jobs} == {"constant", "linear", "cosine"}
    assert any(job["lora"].get("dropout", 0) > 0 for job in jobs)


def test_a_chat_has_the_tokens_of_a_prompt_and_its_completion(tokenizer):
    row = rows_of("mirror", "train")[0]
    asked = {"role": "user", "content": row["prompt"].removesuffix("\n")}
    told = {"role": "assistant", "content": row["completion"]}
    rows = [Row("completion", row, ""), Row("messages", {"messages": [asked, told]}, "")]
    apart, chat = tokenize_rows(rows, tokenizer)
    assert chat.tokens.tolist() == apart.tokens.tolist()
    assert chat.is_target.tolist() == apart.is_target.tolist()


@pytest.mark.parametrize("name", [job["name"] for job in CONFIG["jobs"]])
def test_eval_inputs_are_not_in_the_training_data(name):
    train = {input_of(row["prompt"]) for row in rows_of(name, "train")}
    evaluation = {input_of(row["prompt"]) for row in rows_of(name, "eval")}
    assert len(evaluation) == len(rows_of(name, "eval"))
    assert not train & evaluation
