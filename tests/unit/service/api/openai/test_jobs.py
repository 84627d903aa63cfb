"""`/v1/fine_tuning/jobs` with the unmodified client, over a store whose jobs a test moves."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.helpers.http_service import BASE, Api, bearer
from tests.helpers.stored_jobs import finish, serve_gang, start, write_steps
from tests.unit.service.api.openai.conftest import Still
from tlora_megatron.config.sections import plain
from tlora_megatron.files import write_json
from tlora_megatron.service.api.openai import submitting
from tlora_megatron.service.home import JOB_NAME, make_folder
from tlora_megatron.service.store import JobState

STEPS = [
    {"step": 0, "eval_loss": 3.0, "eval_exact_match": 0.5},
    {"step": 1, "loss": 2.0, "lr": 0.1, "grad_norm": 1.0, "tokens": 1200},
    {"step": 2, "loss": 1.25, "lr": 0.1, "grad_norm": 1.0, "tokens": 1200},
]


def create(client: OpenAI, file: str, **options: Any) -> Any:
    return client.fine_tuning.jobs.create(model=BASE, training_file=file, **options)


def train(api: Api, job: str) -> None:
    """Lets a job take two steps and save the second."""
    serve_gang(api.store, api.home)
    start(api.store, job)
    write_steps(api.home, job, *STEPS)
    api.store.events.add("saved", job=job, body={"step": 2})


def test_a_job_is_created_and_looked_at(client: OpenAI, file: str, api: Api) -> None:
    numbers = {"n_epochs": 2, "batch_size": 4}
    job = create(
        client,
        file,
        validation_file=file,
        suffix="mine",
        seed=3,
        method={"type": "supervised", "supervised": {"hyperparameters": numbers}},
        metadata={"tlora.lora.rank": "4", "team": "a"},
    )
    assert job.status == "validating_files"
    assert (job.model, job.training_file, job.validation_file) == (BASE, file, file)
    assert (job.seed, job.metadata) == (3, {"tlora.lora.rank": "4", "team": "a"})
    expected = {**numbers, "learning_rate_multiplier": 1.0}
    assert job.hyperparameters.to_dict() == expected
    assert job.method is not None
    assert job.method.supervised.hyperparameters.to_dict() == expected
    assert (job.fine_tuned_model, job.finished_at, job.trained_tokens) == (None, None, None)
    assert (job.error, job.result_files) == (None, [])
    assert client.fine_tuning.jobs.retrieve(job.id) == job
    document = api.store.jobs.document(job.id)["document"]
    assert document["lora"]["rank"] == 4
    assert document["data"]["train"] == str(api.home.upload("ann", file))


def test_retries_make_no_second_job(client: OpenAI, file: str, api: Api) -> None:
    body = {"model": BASE, "training_file": file}
    first = create(client, file)

    def send(count: str, tenant: str = "ann", **more: Any) -> dict[str, Any]:
        headers = {**bearer(api.token(tenant)), "x-stainless-retry-count": count}
        answer = api.client(None).post("/v1/fine_tuning/jobs", json=body | more, headers=headers)
        return dict(answer.json())

    assert send("1")["id"] == send("2")["id"] == first.id
    second = send("0")["id"]
    assert second != first.id, "its client has sent it twice on purpose"
    assert send("1")["id"] == second, "the newest is the one that it retries"
    assert send("1", seed=1)["id"] not in (first.id, second)
    assert send("1", "bob")["error"]["param"] == "training_file", "a file of its own"


def test_a_client_that_lost_the_answer_retries_by_itself(
    client_of: Callable[..., OpenAI], file: str, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client_of(max_retries=2) as client:
        # The library below the client, whichever its version takes.
        transport = sys.modules[type(client._client._transport).__module__.partition(".")[0]]
        send, answers = client._client.send, []

        def cut(*args: Any, **kwargs: Any) -> Any:
            answers.append(send(*args, **kwargs))
            if len(answers) == 1:
                raise transport.ReadError("the connection was cut")
            return answers[-1]

        monkeypatch.setattr(client._client, "send", cut)
        job = create(client, file)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert [one.id for one in api.store.jobs.page(tenant="ann")] == [job.id]


def test_lists_have_pages_and_filters(client: OpenAI, file: str, api: Api) -> None:
    ids = [create(client, file, metadata={"n": str(n % 2)}).id for n in range(3)]
    assert [job.id for job in client.fine_tuning.jobs.list(limit=2)] == ids[::-1]
    page = client.fine_tuning.jobs.list(limit=2)
    assert ([job.id for job in page.data], page.has_more) == ([ids[2], ids[1]], True)
    odd = client.fine_tuning.jobs.list(extra_query={"metadata[n]": "1"})
    assert [job.id for job in odd.data] == [ids[1]]


def test_a_job_s_life(
    client: OpenAI, client_of: Callable[..., OpenAI], file: str, api: Api
) -> None:
    job = create(client, file, suffix="s")
    train(api, job.id)
    jobs = client.fine_tuning.jobs
    assert jobs.retrieve(job.id).status == "running"
    assert jobs.retrieve(job.id).fine_tuned_model is None
    finish(api.store, job.id)
    ended = jobs.retrieve(job.id)
    name = f"ft:{BASE}:ann:s:{job.id}"
    assert (ended.status, ended.fine_tuned_model) == ("succeeded", name)
    assert ended.finished_at is not None
    assert ended.trained_tokens == api.store.jobs.get(job.id).tokens

    events = list(jobs.list_events(job.id, limit=3))
    told = [(event.type, event.message) for event in events[::-1]]
    assert told == [
        ("message", "Created fine-tuning job"),
        ("message", "Files validated, the job waits for its turn"),
        ("message", "Fine-tuning job started"),
        ("metrics", "Step 0: full validation loss=3.0000"),
        ("metrics", "Step 1: training loss=2.0000"),
        ("metrics", "Step 2: training loss=1.2500"),
        ("message", "Checkpoint created at step 2"),
        ("message", "The job has successfully completed"),
    ]
    assert events[2].data == {"step": 2, "train_loss": 1.25, "learning_rate": 0.1, "tokens": 1200}
    assert len({event.id for event in events}) == len(events)
    for unknown in ("nothing", f"ftevent-{job.id}-step-3", f"ftevent-{job.id}-event-999"):
        with pytest.raises(openai.NotFoundError, match=unknown):
            jobs.list_events(job.id, after=unknown)
    assert all(event.created_at for event in events)

    (checkpoint,) = jobs.checkpoints.list(job.id).data
    assert checkpoint.fine_tuned_model_checkpoint == f"{name}:ckpt-step-2"
    assert (checkpoint.step_number, checkpoint.metrics.train_loss) == (2, 1.25)

    (results,) = ended.result_files
    assert client.files.retrieve(results).purpose == "fine-tune-results"
    content = client.files.content(results).read()
    assert client.files.retrieve(results).bytes == len(content)
    lines = content.decode().splitlines()
    assert lines[0].startswith("step,train_loss,train_accuracy,valid_loss,")
    assert lines[1:] == ["0,,,3.0,,,,,0.5", "1,2.0,,,,0.1,1.0,1200,", "2,1.25,,,,0.1,1.0,1200,"]

    assert [model.id for model in client.models.list()] == [BASE, name]
    assert client.models.retrieve(name).owned_by == "ann"
    assert client.models.retrieve(f"{name}:ckpt-step-2").id == f"{name}:ckpt-step-2"
    assert client.models.retrieve(BASE).object == "model"
    other = client_of("bob")
    assert [model.id for model in other.models.list()] == [BASE]
    with pytest.raises(openai.NotFoundError, match="model must be one of yours") as caught:
        other.models.retrieve(name)
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        other.fine_tuning.jobs.list(after=job.id)


def test_a_model_that_was_trained_is_continued(
    client: OpenAI, client_of: Callable[..., OpenAI], file: str, api: Api
) -> None:
    metadata = {"tlora.lora.rank": "4", "tlora.lora.target_modules": "q_proj,v_proj"}
    first = create(client, file, suffix="s", metadata=metadata)
    name = f"ft:{BASE}:ann:s:{first.id}"

    def go_on(client: OpenAI, model: str = name, **options: Any) -> Any:
        return client.fine_tuning.jobs.create(model=model, training_file=file, **options)

    with pytest.raises(openai.BadRequestError, match="model must be of a job that has finished"):
        go_on(client)
    train(api, first.id)
    finish(api.store, first.id)
    make_folder(api.home.job(first.id) / "adapter")
    base = plain(asdict(api.service.bases()[BASE]))
    write_json(api.home.job(first.id) / JOB_NAME, {"base_model": base})
    second = go_on(client, suffix="t", metadata={"tlora.lora.dropout": "0.5"})
    document = api.store.jobs.document(second.id)["document"]
    assert document["init_from"] == str(api.home.job(first.id) / "adapter")
    assert (document["lora"]["rank"], document["lora"]["dropout"]) == (4, 0.5)
    assert document["lora"]["target_modules"] == ["q_proj", "v_proj"]
    assert second.model == name
    with pytest.raises(openai.BadRequestError, match="rank must be the model's 4, got 8"):
        go_on(client, metadata={"tlora.lora.rank": "8"})
    with pytest.raises(openai.BadRequestError, match="checkpoint that is there"):
        go_on(client, f"{name}:ckpt-step-2")
    with pytest.raises(openai.BadRequestError, match="model must be one of yours"):
        go_on(client_of("bob"))
    with pytest.raises(openai.BadRequestError, match=f"the unfinished job {second.id} names"):
        client.models.delete(name)
    start(api.store, second.id)
    finish(api.store, second.id)
    trained = f"ft:{BASE}:ann:t:{second.id}"
    assert client.fine_tuning.jobs.retrieve(second.id).fine_tuned_model == trained
    assert [model.id for model in client.models.list()] == [BASE, trained, name]
    assert client.models.retrieve(trained).id == trained
    with pytest.raises(openai.NotFoundError):
        client_of("bob").models.delete(name)
    for other in (BASE, f"{name}:ckpt-step-2"):
        with pytest.raises(openai.BadRequestError, match="must be the name of a fine-tuned model"):
            client.models.delete(other)
    assert client.models.delete(name).deleted
    assert [model.id for model in client.models.list()] == [BASE, trained]
    assert not api.home.job(first.id).exists()


def test_checkpoints_have_pages(client: OpenAI, file: str, api: Api) -> None:
    job = create(client, file, suffix="s")
    train(api, job.id)
    for step in (1, 3, 1):  # the last one is written again
        api.store.events.add("saved", job=job.id, body={"step": step})
    found = client.fine_tuning.jobs.checkpoints
    page = found.list(job.id, limit=2)
    assert ([one.step_number for one in page.data], page.has_more) == ([3, 1], True)
    assert [one.metrics.train_loss for one in page.data] == [None, 2.0]
    rest = found.list(job.id, after=page.data[1].id)
    assert [(one.step_number, one.metrics.train_loss) for one in rest.data] == [(2, 1.25)]
    assert not rest.has_more
    with pytest.raises(openai.NotFoundError, match="ftckpt-x"):
        found.list(job.id, after="ftckpt-x")


def test_why_a_job_failed(client: OpenAI, file: str, api: Api) -> None:
    job = create(client, file)
    path = api.home.upload("ann", file)
    sentence = f"a line must be JSON, got x: job 'a', {path} line 3"
    api.store.jobs.change(job.id, JobState.FAILED, why=sentence, error=sentence)
    error = client.fine_tuning.jobs.retrieve(job.id).error
    assert error is not None
    assert (error.code, error.param) == ("invalid_training_file", "training_file")
    assert error.message == f"a line must be JSON, got x: job 'a', {file} line 3"
    newest = client.fine_tuning.jobs.list_events(job.id).data[0]
    assert newest.level == "error"
    assert newest.message.endswith(f"{file} line 3")


def test_actions_are_asked(client: OpenAI, file: str, api: Api) -> None:
    jobs, job = client.fine_tuning.jobs, create(client, file)
    assert jobs.pause(job.id).status == "validating_files", "nobody serves"
    assert api.store.jobs.get(job.id).wish == "pause"
    jobs.resume(job.id)
    jobs.cancel(job.id)
    assert api.store.jobs.get(job.id).wish == "cancel"
    api.store.jobs.change(job.id, JobState.CANCELLED)
    with pytest.raises(openai.BadRequestError, match="must be unfinished to cancel"):
        jobs.cancel(job.id)


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({"model": "gpt-4o"}, "model", "model must be a base of the service, got 'gpt-4o'"),
        ({"model": "ft:quickstart:ann::j1aaaa"}, "model", "model must be one of yours"),
        ({"training_file": "file-x"}, "training_file", "training_file must be one of yours"),
        ({"validation_file": "../x"}, "validation_file", "validation_file must be one of yours"),
        ({"method": {"type": "grpo"}}, "method.type", "method.type must be supervised or dpo"),
        ({"n_epochs": 3}, "n_epochs", "Extra inputs are not permitted"),
        ({"training_file": 3}, "training_file", "training_file is refused"),
        ({"metadata": {"tlora.lora.target_modules": "x"}}, None, "target_modules"),
        ({"metadata": {"tlora.schedule.warmup_steps": "-1"}}, None, "warmup_steps must be at"),
    ],
)
def test_refusals(still: Still, body: dict[str, Any], param: str | None, told: str) -> None:
    whole = {"model": BASE, "training_file": still.file, **body}
    with pytest.raises(openai.BadRequestError, match=told) as caught:
        still.client.post("/fine_tuning/jobs", body=whole, cast_to=object)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.param == param
    assert str(still.api.home.root) not in str(caught.value)
    assert still.api.store.jobs.page() == []


@pytest.mark.anyio
async def test_a_retry_waits_for_the_request_that_it_repeats(
    api: Api, client: OpenAI, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": BASE, "training_file": file}
    begun, goes_on = asyncio.Event(), asyncio.Event()
    submit = submitting.submit

    async def slow(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        await goes_on.wait()
        return await submit(*args, **kwargs)

    monkeypatch.setattr(submitting, "submit", slow)
    async with api.async_client("ann") as calls:
        first = asyncio.create_task(calls.post("/v1/fine_tuning/jobs", json=body))
        await begun.wait()
        headers = {"x-stainless-retry-count": "1"}
        retry = asyncio.create_task(calls.post("/v1/fine_tuning/jobs", json=body, headers=headers))
        await asyncio.sleep(0.05)
        goes_on.set()
        assert (await first).json()["id"] == (await retry).json()["id"]
    assert len(api.store.jobs.page()) == 1
