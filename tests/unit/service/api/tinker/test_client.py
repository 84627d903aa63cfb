"""The unmodified `tinker` client; its models are played, and learn nothing."""

from __future__ import annotations

import io
import json
import logging
import tarfile
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from tests.helpers.http_service import BASE
from tests.helpers.launch import wait_until
from tests.helpers.played_models import set_state
from tests.unit.service.api.tinker.conftest import Played
from tlora_megatron.service.store import JobState

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def batch(*rows: list[int]) -> list[types.Datum]:
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)},
        )
        for row in rows
    ]


def model_of(played: Played, tenant: str = "ann", **settings: Any) -> tinker.TrainingClient:
    client = played.client(tenant)
    return client.create_lora_training_client(base_model=BASE, **{"rank": 4, **settings}).result()


def job_document(played: Played) -> dict[str, Any]:
    (job,) = played.api.store.jobs.page()
    found: dict[str, Any] = played.api.store.jobs.document(job.id)
    return found


def test_a_loop_of_the_client_runs(played: Played) -> None:
    model = model_of(played, seed=5)
    passed = model.forward_backward(batch([5, 6, 7], [8, 9]), "cross_entropy")
    stepped = model.optim_step(types.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0))
    rows = [out["logprobs"].to_numpy() for out in passed.result().loss_fn_outputs]
    np.testing.assert_allclose(np.concatenate(rows), [-0.6, -0.7, -0.9], rtol=1e-6)
    assert [len(row) for row in rows] == [2, 1]
    assert passed.result().metrics["loss:sum"] == pytest.approx(2.2)
    assert stepped.result().metrics == {"grad_norm": 0.5}
    assert played.models.ops() == ["forward_backward", "optim_step"]
    step = played.models.done[1][1].params
    assert (step["learning_rate"], step["grad_clip_norm"], step["beta2"]) == (1e-3, 1.0, 0.95)
    document = job_document(played)["document"]
    assert (document["seed"], document["driven"]) == (5, True)
    assert (document["lora"]["rank"], document["lora"]["alpha"]) == (4, 32.0)
    config = played.api.service.bases()[BASE].config_file
    assert document["max_seq_len"] == json.loads(config.read_text())["max_position_embeddings"]


def test_its_info_leads_to_the_tokenizer(played: Played) -> None:
    """Which integration tests load."""
    model = model_of(played, train_mlp=False)
    info = model.get_info()
    assert (info.model_data.arch, info.model_data.model_name, info.lora_rank) == ("llama", BASE, 4)
    assert Path(str(info.model_data.tokenizer_id), "tokenizer.json").is_file()
    targets = job_document(played)["document"]["lora"]["target_modules"]
    assert targets == ["q_proj", "k_proj", "v_proj", "o_proj"]


def test_metadata_sets_what_the_protocol_cannot(played: Played) -> None:
    model_of(played, user_metadata={"tlora.lora.alpha": "16", "note": "mine"})
    assert job_document(played)["document"]["lora"]["alpha"] == 16.0


def test_a_batch_of_many_chunks_keeps_its_order(played: Played) -> None:
    model = model_of(played)
    rows = [[1, number % 250] for number in range(2500)]
    found = model.forward(batch(*rows), "cross_entropy").result()
    assert len(played.models.done) == 3
    told = [float(out["logprobs"].to_numpy()[0]) for out in found.loss_fn_outputs]
    np.testing.assert_allclose(told, [-0.1 * row[1] for row in rows], rtol=1e-6)


def test_a_loss_of_the_client_s_own_runs(played: Played) -> None:
    model = model_of(played)

    def squares(data: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        return sum((row**2).sum() for row in logprobs), {"rows": float(len(data))}

    found = model.forward_backward_custom(batch([5, 6]), squares).result()
    assert found.metrics["rows"] == 1.0
    sent = played.models.done[1][1]
    assert (sent.op, sent.arrays["weights"].tolist()) == ("forward_backward", [pytest.approx(1.2)])


def test_states_are_saved_listed_loaded_and_deleted(played: Played) -> None:
    model = model_of(played)
    saved = model.save_state("first", user_metadata={"epoch": "1"}, ttl_seconds=7200).result()
    assert saved.path == f"tinker://{model.model_id}/weights/first"
    model.save_weights_for_sampler("ours").result()
    rest = played.rest()
    found = rest.list_checkpoints(model.model_id).result().checkpoints
    assert [(c.checkpoint_id, c.checkpoint_type) for c in found] == [
        ("weights/first", "training"),
        ("sampler_weights/ours", "sampler"),
    ]
    assert found[0].user_metadata == {"epoch": "1"}
    assert found[0].expires_at is not None
    info = rest.get_weights_info_by_tinker_path(saved.path).result()
    assert (info.base_model, info.lora_rank, info.train_mlp) == (BASE, 4, True)
    (run,) = rest.list_training_runs().result().training_runs
    assert run.last_checkpoint is not None
    assert (run.training_run_id, run.last_checkpoint.tinker_path) == (model.model_id, saved.path)
    rest.set_checkpoint_ttl_from_tinker_path(saved.path, None).result()
    assert rest.list_user_checkpoints().result().checkpoints[-1].expires_at is None
    rest.delete_checkpoint_from_tinker_path(saved.path).result()
    left = rest.list_checkpoints(model.model_id).result().checkpoints
    assert [c.checkpoint_id for c in left] == ["sampler_weights/ours"]


def test_what_was_saved_can_be_taken_away(played: Played) -> None:
    model, rest = model_of(played), played.rest()
    path = model.save_weights_external("ours").result().path
    assert path == f"tinker://{model.model_id}/external_weights/ours"
    (checkpoint,) = rest.list_checkpoints(model.model_id).result().checkpoints
    assert (checkpoint.checkpoint_type, checkpoint.tinker_path) == ("external", path)
    (url,) = rest.get_external_weights_urls(path).result().urls.values()
    assert "job" in httpx.get(url).json()
    spoilt = httpx.get(url.replace("/downloads/", "/downloads/x"))
    assert (spoilt.status_code, "must hold a token" in spoilt.text) == (401, True)
    archive = f"/api/v1/training_runs/{model.model_id}/checkpoints/external_weights/ours/archive"
    told = played.api.client().get(archive).json()
    address = played.address + httpx.URL(told["url"]).path
    with tarfile.open(fileobj=io.BytesIO(httpx.get(address).content)) as found:
        assert found.getnames() == ["state.json", "checkpoint_complete"]
        assert found.extractfile("state.json").read() == httpx.get(url).content  # type: ignore[union-attr]
    assert played.api.client("bob").get(archive).status_code == 404
    with pytest.raises(tinker.UnprocessableEntityError, match="nothing is encrypted here"):
        model.save_weights_external("more", age_encryption_recipients=["age1x"]).result()


def test_a_model_is_made_from_a_state(played: Played) -> None:
    client = played.client()
    first = client.create_lora_training_client(base_model=BASE, rank=8, train_mlp=False).result()
    path = first.save_state("kept").result().path
    again = played.client().create_training_client_from_state_with_optimizer(path).result()
    assert again.get_info().lora_rank == 8
    again.optim_step(types.AdamParams()).result()
    job, load = played.models.done[1]
    assert (load.op, load.params["optimizer"]) == ("load_state", True)
    assert played.models.ops() == ["save_state", "load_state", "optim_step"]
    lora = played.api.store.jobs.document(job)["document"]["lora"]
    assert (lora["rank"], lora["target_modules"][0], len(lora["target_modules"])) == (
        8,
        "q_proj",
        4,
    )
    loaded = first.load_state(path).result()
    assert loaded.path is None or loaded.path == path
    assert played.models.done[-1][1].params["optimizer"] is False


def test_a_model_waits_for_a_place(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlora_megatron.service.api.tinker.training.POLL_S", 0.2)
    monkeypatch.setattr(played.models, "step", lambda: None)
    states: list[str] = []

    def note(self: Any, state: Any, reason: Any) -> None:
        states.append(f"{state.value}: {reason}")

    logger = "tinker.lib.queue_state_logger.QueueStateLogger.on_queue_state_change"
    monkeypatch.setattr(logger, note)
    waiting = played.client().create_lora_training_client(base_model=BASE, rank=4)
    wait_until(lambda: bool(states), "a word on the state")
    assert states[0] == "paused_capacity: the service looks at the model's settings"
    monkeypatch.undo()
    assert waiting.result().get_info().lora_rank == 4


def test_a_failed_job_fails_its_requests(played: Played) -> None:
    model = model_of(played)
    (job,) = played.api.store.jobs.page()
    set_state(played.api.store, job.id, JobState.FAILED, f"bad {played.api.home.root}/x")
    played.models.step = lambda: None  # type: ignore[method-assign]
    with pytest.raises(tinker.RequestFailedError, match="Request failed: bad x for"):
        model.optim_step(types.AdamParams()).result()


def test_a_client_is_told_how_this_service_differs(
    played: Played, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="tinker")
    played.client().holder  # noqa: B018
    assert "the unembedding has no adapter" in caplog.text
    assert "must be of version" not in caplog.text
    monkeypatch.setattr("tinker.lib.internal_client_holder.tinker_sdk_version", "9.1.0")
    played.client().holder  # noqa: B018
    assert "the tinker SDK must be of version 0.25 to 0.38 to be tested here, got 9.1.0" in (
        caplog.text
    )
