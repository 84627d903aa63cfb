"""The unmodified `tinker` client trains and samples on the CPU, by `tlora serve --http`."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tinker
from tinker import types

from tests.helpers.launch import HANG_S, REPO
from tests.helpers.served_http import ServedHttp, as_chats, serving_quickstart
from tests.helpers.tinker import client_loop
from tests.helpers.tinker.clients import closing_clients
from tlora_megatron.service.sampling.vllm_probe import read_scores
from tlora_megatron.service.settings import base_section
from tlora_megatron.training.saving.writer import SAMPLED

QUICKSTART = REPO / "configs" / "quickstart"
STEPS = 6
RANKS = (4, 16)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lines = (QUICKSTART / "data" / "mirror_train.jsonl").read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:32]))
    return path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHttp]:
    with (
        pytest.MonkeyPatch.context() as patch,
        serving_quickstart(tmp_path_factory.mktemp("tinker")) as found,
        closing_clients(),
    ):
        patch.setenv("TINKER_TELEMETRY", "0")
        yield found


@pytest.fixture(scope="module")
def undisturbed(served: ServedHttp, rows: Path) -> dict[int, list[float]]:
    """Losses of two tenants who train at once, with a job of the `openai` client beside them."""
    client = openai.OpenAI(
        base_url=f"{served.address}/v1", api_key=served.token("carol"), max_retries=0
    )
    text = as_chats(rows.read_text().splitlines()).encode()
    file = client.files.create(file=("rows.jsonl", text), purpose="fine-tune")
    numbers: Any = {"n_epochs": 1, "batch_size": 8}
    jobs = client.fine_tuning.jobs
    job = jobs.create(
        training_file=file.id,
        model=client_loop.BASE,
        method={"type": "supervised", "supervised": {"hyperparameters": numbers}},
    ).id
    data = client_loop.data(str(rows))

    def tenant(rank: int) -> list[float]:
        model = client_loop.create(served.address, served.token(f"tenant-{rank}"), rank)
        return client_loop.train(model, data, STEPS)

    with ThreadPoolExecutor() as pool:
        losses = dict(zip(RANKS, pool.map(tenant, RANKS), strict=True))
    assert jobs.retrieve(job).status in ("running", "succeeded", "queued")
    served.wait_until(lambda: jobs.retrieve(job).status == "succeeded", "openai's job")
    return losses


def test_two_tenants_and_a_job_of_openai_train_at_once(undisturbed: dict[int, list[float]]) -> None:
    for losses in undisturbed.values():
        assert losses[-1] < losses[0] / 2
    assert undisturbed[4] != undisturbed[16]


def test_kills_of_http_and_of_the_gang_change_no_bit(
    served: ServedHttp, rows: Path, undisturbed: dict[int, list[float]]
) -> None:
    kills = {1: served.kill_http, 3: served.kill_ranks}
    model = client_loop.create(served.address, served.token("dora"), 4)
    losses = client_loop.train(
        model, client_loop.data(str(rows)), STEPS, lambda step: kills.get(step, lambda: None)()
    )
    assert losses == undisturbed[4]


def test_a_state_is_taken_up_again(
    served: ServedHttp, rows: Path, undisturbed: dict[int, list[float]]
) -> None:
    data, token = client_loop.data(str(rows)), served.token("erin")
    with tinker.ServiceClient(base_url=served.address, api_key=token) as client:
        model = client.create_lora_training_client(base_model="base", rank=4, seed=0).result()
        first = client_loop.train(model, data, 3)
        model_id = model.model_id
    rest = tinker.RestClient(base_url=served.address, api_key=token)
    served.wait_until(lambda: bool(rest.list_checkpoints(model_id).result().checkpoints), "state")
    (left,) = rest.list_checkpoints(model_id).result().checkpoints
    again = tinker.ServiceClient(base_url=served.address, api_key=token)
    resumed = again.create_training_client_from_state_with_optimizer(left.tinker_path).result()
    rest_of_them = client_loop.train(resumed, data[24:] + data[:24], STEPS - 3)
    assert first + rest_of_them == undisturbed[4]


def test_what_was_learnt_can_be_sampled(served: ServedHttp, rows: Path) -> None:
    model = client_loop.create(served.address, served.token("finn"), 4)
    data = client_loop.data(str(rows))
    client_loop.train(model, data, 2)
    passed = model.forward(data[:1], "cross_entropy").result()
    sampler = model.save_weights_and_get_sampling_client().result()
    assert list(served.home.jobs.glob(f"*/sampler/.versions/*/{SAMPLED}"))
    tokens = [*data[0].model_input.to_ints(), 2]
    prompt = types.ModelInput.from_ints(tokens)
    scored = sampler.compute_logprobs(prompt).result()
    forward = passed.loss_fn_outputs[0]["logprobs"].to_numpy()
    np.testing.assert_allclose(np.array(scored[1:], float), forward, rtol=1e-4, atol=1e-4)
    question = types.ModelInput.from_ints(tokens[:30])
    params = types.SamplingParams(max_tokens=8, temperature=1.0, seed=3, stop=["q"])
    drawn = [sampler.sample(question, num_samples=2, sampling_params=params) for _ in range(2)]
    first, second = (future.result().sequences for future in drawn)
    assert [s.tokens for s in first] == [s.tokens for s in second]
    assert len({s.sequence_id for s in (*first, *second)}) == 4
    for sequence in first:
        assert len(sequence.logprobs) == len(sequence.tokens) <= 8
    tokenizer = model.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("tea", add_special_tokens=False)) == "tea"


def test_the_gang_s_scores_of_the_base_are_the_sampler_s(served: ServedHttp) -> None:
    scores = read_scores(served.home, base_section(served.home, "base"))
    assert scores is not None
    client = tinker.ServiceClient(base_url=served.address, api_key=served.token("hugo"))
    sampler = client.create_sampling_client(base_model="base").result()
    told = sampler.compute_logprobs(types.ModelInput.from_ints(list(scores.tokens))).result()
    mean, most = scores.gap(tuple(told))
    # The gang's are of its whole forward in bf16, whose logits have 8 bits: 0.03 near 8.
    assert mean < 0.005
    assert most < 0.05


@pytest.mark.old_tinker
def test_an_older_client_has_the_same_losses(
    served: ServedHttp, rows: Path, undisturbed: dict[int, list[float]]
) -> None:
    python = os.environ["TINKER_OLD_PYTHON"]
    command = [python, client_loop.__file__, served.address, str(rows), "4", str(STEPS)]
    env = {**os.environ, "TINKER_API_KEY": served.token("gina")}
    env.pop("PYTHONPATH", None)
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG_S)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["losses"] == undisturbed[4]
    assert (told["text"], told["rank"]) == ("tea", 4)
    assert told["version"] != tinker.__version__
