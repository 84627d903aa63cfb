"""`scripts/verify_adapters.py` agrees with a true run and says no to a false one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from scripts import verify_adapters
from tests.helpers.tiny_models import make_tiny_model

TARGET_TOKENS = 6
NUM_ROWS, NUM_WRONG = 12, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A made-up output directory of `tlora train` with one job."""

    folder: Path
    base: Path

    def change_summary(self, **values: Any) -> None:
        path = self.folder / "summary.json"
        summary = json.loads(path.read_text())
        summary["jobs"]["made-up.1"].update(values)
        path.write_text(json.dumps(summary))


class Outcome(NamedTuple):
    returncode: int
    stdout: str


Verify = Callable[..., Outcome]


@pytest.fixture
def verify(run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verify:
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> Outcome:
        status = verify_adapters.main([str(run.folder), "--device", "cpu", *arguments])
        return Outcome(status, capsys.readouterr().out)

    return call


def _save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A word is a token: `w7` is token 7; decoding and encoding again gives the same ids."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 128)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)
    return fast


def _save_adapter(base: Path, folder: Path) -> PeftModel:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"])
    adapted = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    adapted.save_pretrained(folder)
    return adapted.eval()


def _greedy(model: PeftModel, ids: list[int], num_tokens: int) -> list[int]:
    """The likeliest token, one at a time, without a cache and without padding."""
    for _ in range(num_tokens):
        ids = [*ids, int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())]
    return ids[-num_tokens:]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Rows whose completions are what the adapter says, but for `NUM_WRONG` of them.

    `max_seq_len` ends the targets before the end token, which random weights rarely say; prompts
    to which they say a special token are drawn again, for text cannot hold it. Prompts differ in
    length, so that generation has to pad.
    """
    base, folder = make_tiny_model(tmp_path / "base", "llama"), tmp_path / "run"
    tokenizer = _save_tokenizer(base)
    adapted = _save_adapter(base, folder / "jobs" / "made-up.1" / "adapter")
    generator = torch.Generator().manual_seed(5)
    rows, longest = [], 10
    with torch.no_grad():
        while len(rows) < NUM_ROWS:
            length = 4 + len(rows) % (longest - 3)
            prompt = torch.randint(3, 128, (length,), generator=generator).tolist()
            said = _greedy(adapted, prompt, longest + TARGET_TOKENS - length)
            if min(said) < 3:
                continue
            if len(rows) < NUM_WRONG:
                said[1] = 3 + (said[1] - 2) % 125
            rows.append({"prompt": tokenizer.decode(prompt), "completion": tokenizer.decode(said)})
    data = tmp_path / "eval.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = {
        "name": "made-up.1",
        "data": {"train": str(data), "eval": str(data)},
        "max_seq_len": longest + TARGET_TOKENS,
    }
    config = {"base_model": {"path": str(base), "dtype": "float32"}, "jobs": [job]}
    (folder / "config.json").write_text(json.dumps(config))
    result = {
        "status": "finished",
        "reason": None,
        "adapter": "jobs/made-up.1/adapter",
        "exact_match_after": 1 - NUM_WRONG / NUM_ROWS,
    }
    (folder / "summary.json").write_text(json.dumps({"jobs": {"made-up.1": result}}))
    return Run(folder=folder, base=base)


def test_a_true_run_is_confirmed_with_examples(verify: Verify) -> None:
    result = verify("--batch-size", "5")
    assert result.returncode == 0, result.stdout
    assert "12 of 12" in result.stdout
    assert result.stdout.count("0.750") == 2
    assert result.stdout.count("yes") == 1
    for column in ("prompt", "expected", "base model says", "adapter says"):
        assert column in result.stdout


def test_an_exact_match_that_generation_does_not_give_is_denied(run: Run, verify: Verify) -> None:
    run.change_summary(exact_match_after=(NUM_ROWS - NUM_WRONG - 1) / NUM_ROWS)
    result = verify()
    assert result.returncode == 1
    assert "not what the run reported: made-up.1" in result.stdout


def test_some_of_the_rows_can_only_deny_what_they_cannot_belong_to(
    run: Run, verify: Verify
) -> None:
    # The first three rows are the wrong ones: no match among them fits 9 of 12, but not 12 of 12.
    assert verify("--rows", "3").returncode == 0
    run.change_summary(exact_match_after=1.0)
    assert verify("--rows", "3").returncode == 1


def test_a_job_without_an_adapter_is_named(run: Run, verify: Verify) -> None:
    run.change_summary(adapter=None, status="failed", reason="loss is NaN")
    result = verify()
    assert result.returncode == 1
    assert "job made-up.1 has no adapter: failed, loss is NaN" in result.stdout


def test_rows_that_cannot_be_generated_are_refused(run: Run, verify: Verify) -> None:
    data = Path(json.loads((run.folder / "config.json").read_text())["jobs"][0]["data"]["eval"])
    data.write_text('{"text": "w5 w6"}\n')
    result = verify()
    assert result.returncode == 1
    assert "eval.jsonl:1 must hold prompt and completion, got ['text']" in result.stdout


def test_random_weights_are_refused(run: Run, verify: Verify) -> None:
    path = run.folder / "config.json"
    config = json.loads(path.read_text())
    config["base_model"]["path"] = None
    path.write_text(json.dumps(config))
    result = verify()
    assert result.returncode == 1
    assert "base_model.path must be a Hugging Face directory" in result.stdout
