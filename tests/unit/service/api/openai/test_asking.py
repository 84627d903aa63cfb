"""A request asks for the entry of `jobs` that `tlora train` would read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tlora_megatron.config.job import JobSpec, LoraSpec
from tlora_megatron.config.reader import ConfigError
from tlora_megatron.config.sections import read_job
from tlora_megatron.service.api.errors import ApiError
from tlora_megatron.service.api.openai.objects import (
    adapter_name,
    checkpoint_name,
    job_of_results,
    results_id,
    split_model,
)
from tlora_megatron.service.api.openai.submitting import Asked, check_request, job_entry, numbers_of


def spec_of(**body: Any) -> JobSpec:
    asked = Asked(model="base", training_file="file-a", **body)
    check_request(asked)
    numbers = numbers_of(asked)
    return read_job(job_entry(asked, numbers, name="a", train="t", validation=None), None)


def supervised(**numbers: Any) -> dict[str, Any]:
    return {"type": "supervised", "supervised": {"hyperparameters": numbers}}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"hyperparameters": {"n_epochs": "auto", "batch_size": "auto"}},
        {"method": supervised(learning_rate_multiplier="auto")},
        {"method": {"type": "supervised"}, "seed": None, "metadata": None, "integrations": []},
    ],
)
def test_auto_is_a_job_s_default(body: dict[str, Any]) -> None:
    spec = spec_of(**body)
    defaults = read_job({"name": "a", "data": {"train": "t"}, "epochs": 3}, None)
    assert spec == defaults


@pytest.mark.parametrize("place", ["hyperparameters", "method", "both"])
def test_numbers_from_either_place(place: str) -> None:
    numbers = {"n_epochs": 2, "batch_size": 5, "learning_rate_multiplier": 0.5}
    body: dict[str, Any] = {}
    if place != "method":
        body["hyperparameters"] = numbers
    if place != "hyperparameters":
        body["method"] = supervised(**numbers)
    spec = spec_of(**body, seed=7)
    assert (spec.epochs, spec.batch_size, spec.optimizer.lr, spec.seed) == (2, 5, 1e-4, 7)


def test_metadata_set_what_the_api_has_no_field_for() -> None:
    metadata = {
        "tlora.lora.rank": "4",
        "tlora.lora.alpha": "8",
        "tlora.lora.target_modules": "q_proj, v_proj",
        "tlora.lora.use_rslora": "true",
        "tlora.lora.expert_rank": "2",
        "tlora.lora.expert_sharing": "outer",
        "tlora.optimizer.lr": "1e-3",
        "tlora.schedule.name": "cosine",
        "tlora.max_steps": "12",
        "tlora.max_seq_len": "64",
        "tlora.max_slowdown": "2.5",
        "tlora.gpus": "2",
        "team": "a",
    }
    spec = spec_of(metadata=metadata, hyperparameters={"learning_rate_multiplier": 2})
    targets = ("q_proj", "v_proj")
    on_experts = {"expert_rank": 2, "expert_sharing": "outer"}
    assert spec.lora == LoraSpec(
        rank=4, alpha=8.0, target_modules=targets, use_rslora=True, **on_experts
    )
    assert (spec.optimizer.lr, spec.schedule.name) == (2e-3, "cosine")
    assert (spec.max_steps, spec.epochs, spec.max_seq_len) == (12, None, 64)
    assert (spec.service.max_slowdown, spec.service.gpus) == (2.5, 2)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"method": {"type": "dpo", "dpo": {}}}, "method.type must be supervised, got 'dpo'"),
        ({"method": {"type": "reinforcement"}}, "method.type must be supervised"),
        ({"method": {}}, "method.type must be supervised, got null"),
        ({"method": {"type": "supervised", "dpo": {"a": 1}}}, "method.dpo must be left out"),
        (
            {"method": supervised(beta=1)},
            "method.supervised.hyperparameters must hold n_epochs, batch_size",
        ),
        (
            {"method": supervised(n_epochs=1), "hyperparameters": {"n_epochs": 2}},
            "hyperparameters must be left out, or equal those of method.supervised",
        ),
        ({"integrations": [{"type": "wandb"}]}, "integrations must be left out"),
        ({"hyperparameters": {"n_epochs": 0}}, "hyperparameters.n_epochs must be auto, or an"),
        ({"method": supervised(batch_size=-1)}, "supervised.hyperparameters.batch_size must be"),
        (
            {"hyperparameters": {"learning_rate_multiplier": float("nan")}},
            "learning_rate_multiplier must be auto, or a number above 0",
        ),
        ({"suffix": "a:b"}, "suffix must be at most 64 letters"),
        ({"suffix": "../a"}, "suffix must be at most 64 letters"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"metadata": {"tlora.lora.rnak": "4"}}, "did you mean lora.rank"),
        ({"metadata": {"tlora.name": "x"}}, "metadata.tlora.name is not a known key"),
        ({"metadata": {"tlora.lora.rank": "0"}}, "metadata.tlora.lora.rank must be at least 1"),
        ({"metadata": {"tlora.gpus": "two"}}, "metadata.tlora.service.gpus must be an integer"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata must have at most 16 keys"),
        ({"metadata": {"k" * 65: ""}}, "must have a key of at most 64 characters"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k must have at most 512 characters"),
    ],
)
def test_refusals(body: dict[str, Any], told: str) -> None:
    with pytest.raises((ApiError, ConfigError), match=told):
        spec_of(**body)


def test_names_of_models() -> None:
    name = adapter_name("meta/Llama-3", "ann", "my.suffix", "j12abcd")
    assert name == "ft:meta/Llama-3:ann:my.suffix:j12abcd"
    assert split_model(name) == (None, "j12abcd", None)
    assert split_model(checkpoint_name(name, 8)) == (None, "j12abcd", 8)
    assert split_model("meta/Llama-3") == ("meta/Llama-3", None, None)
    assert split_model("ft:a:b") == ("ft:a:b", None, None)
    assert job_of_results(results_id("j12abcd")) == "j12abcd"
    assert job_of_results(f"file-results-{Path('..')}") is None
