"""Real gangs of the local engine whose jobs are driven, from a process that has all imported.

forked("-m", "tests.helpers.driven_worker", CASE, ROOT, ...)    prints a line of JSON
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from tests.helpers.gang_driver import GangDriver, quickstart_base, quickstart_jobs
from tests.helpers.gang_worker import pids, run_case
from tlora_megatron.service.engines.local import LocalEngine
from tlora_megatron.service.request_log import RequestLog
from tlora_megatron.training.driven_requests import Answer, Request
from tlora_megatron.training.saving.writer import SAMPLED

VOCABULARY = 100
"""Tokens below which the quickstart's base has all."""


class Client:
    def __init__(self, driver: GangDriver, job: str) -> None:
        self.driver, self.job = driver, job
        self.log = RequestLog(driver.home.job(job))
        self.number = 0

    def ask(self, op: str, arrays: dict[str, np.ndarray] | None = None, **params: Any) -> int:
        self.number += 1
        request = Request(op=op, params=params, arrays=arrays or {})  # type: ignore[arg-type]
        assert self.log.write_request(self.number, request)
        return self.number

    def answer(self, number: int) -> Answer:
        self.driver.run_until(lambda: self.log.has_answer(number))
        found = self.log.read_answer(number)
        assert found is not None
        return found

    def good(self, number: int) -> Answer:
        found = self.answer(number)
        assert found.error is None, found.error
        return found


def batch(seed: int, lengths: tuple[int, ...] = (7, 23, 12), **arrays: Any) -> dict[str, Any]:
    """Random tokens, targets that are the input shifted, and weights, some of them 0."""
    generator = np.random.default_rng(seed)
    total = sum(lengths)
    rows = [generator.integers(0, VOCABULARY, n + 1).astype(np.int32) for n in lengths]
    weights = (generator.random(total) < 0.7).astype(np.float32) / total
    found = {
        "lengths": np.array(lengths, np.int32),
        "tokens": np.concatenate([row[:-1] for row in rows]),
        "targets": np.concatenate([row[1:] for row in rows]).astype(np.int64),
        "weights": weights,
    }
    return found | arrays


RUN = {"micro_batch_tokens": 512}
LORA = {"rank": 4, "alpha": 8.0}
ADAM = {"learning_rate": 5e-3, "beta2": 0.999, "eps": 1e-5, "weight_decay": 0.01}
"""With 1e-8 a gradient that is rounding alone would move its element by a whole learning rate, here
as with PEFT, but not the same way."""
CLIP, BETA = 0.5, 0.1
LOSSES = ("importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce")
RUNS = 2
"""Targets of a token under stable_reinforce."""
STEPS = 4


def document(rank: int = 4, **more: Any) -> dict[str, Any]:
    lora = LORA | {"rank": rank} | more.pop("lora", {})
    own = {"name": "t", "driven": True, "lora": lora, "max_seq_len": 256, "portion_tokens": 64}
    return own | more


def make_driver(root: Path, ranks: int, parallel: dict[str, Any], **more: Any) -> GangDriver:
    on_gpu = torch.cuda.is_available()
    # On CPUs the pre-forked worker is a fork, and so are the ranks.
    engine = LocalEngine(root, ranks if on_gpu else 0, slots=ranks, preforked=0 if on_gpu else 1)
    base = quickstart_base() | {"dtype": "float32"}
    return GangDriver(
        engine,
        root,
        ranks,
        **{"base_model": base, "parallel": parallel, "run": RUN, "lease_s": 120, **more},
    )


def sampled(seed: int, loss: str) -> dict[str, Any]:
    arrays = batch(seed)
    del arrays["weights"]
    generator = np.random.default_rng(seed)
    count = len(arrays["tokens"])
    arrays["advantages"] = generator.standard_normal(count).astype(np.float32) * 1e-3
    if loss == "gspo":
        arrays["sequence_ratio_mask"] = (generator.random(count) < 0.5).astype(np.float32)
    if loss == "stable_reinforce":
        ends = np.cumsum(arrays["lengths"])
        rows = np.concatenate([np.tile(one, RUNS) for one in np.split(np.arange(count), ends[:-1])])
        lengths = np.repeat(arrays.pop("lengths"), RUNS)
        arrays = {name: array[rows] for name, array in arrays.items()} | {"lengths": lengths}
        arrays["targets"] = generator.integers(0, VOCABULARY, len(rows))
    count = len(arrays["tokens"])
    return arrays | {"logprobs": -1 - 19 * generator.random(count).astype(np.float32)}


def step(
    client: Client, number: int, *, disturbed: bool = False, moves: bool = False
) -> list[float]:
    """Two requests and a step; returns the norm, and losses and log-probabilities of both.

    Args:
        disturbed: between them comes a request that must fail and change nothing.
        moves: between them the job leaves its gang and comes back.
    """
    loss = LOSSES[number % len(LOSSES)]
    config = {"beta": BETA} if loss == "dro" else {}
    more = {"runs": [RUNS] * 3} if loss == "stable_reinforce" else {}
    first = client.ask("forward_backward", batch(number))
    if moves:
        client.good(first)
        move(client.driver, client.job)
    failing = wrong(client, number) if disturbed else None
    second = client.ask(
        "forward_backward", sampled(number, loss), loss_fn=loss, loss_fn_config=config, **more
    )
    moved = client.ask("optim_step", grad_clip_norm=CLIP, **ADAM)
    row = [client.good(moved).metrics["grad_norm"], *values(client, first)]
    if failing is not None:
        error = client.answer(failing[0])
        assert failing[1] in (error.error or ""), error
        assert error.category == "user"
    return row + values(client, second)


def move(driver: GangDriver, job: str) -> None:
    before = len(driver.events)
    driver.post("leave", job, {"save": True})
    driver.run_until(lambda: any((e.kind, e.job) == ("left", job) for e in driver.events[before:]))
    driver.submit(job, driver.jobs[job].order.document)


def wrong(client: Client, number: int) -> tuple[int, str]:
    """Asks for what cannot be done; returns the number, and what the sentence must say."""
    good, too_far = batch(number), sampled(number, "importance_sampling")
    too_far["logprobs"][5] = -1e4
    cases: list[tuple[dict[str, Any], str, str]] = [
        (too_far, "importance_sampling", "the loss must be finite, got"),
        (good | {"tokens": good["tokens"] + 10**6}, "cross_entropy", "the vocabulary"),
        (batch(1, (300,)), "cross_entropy", "at most 256 tokens"),
    ]
    arrays, loss, sentence = cases[number % len(cases)]
    return client.ask("forward_backward", arrays, loss_fn=loss), sentence


def values(client: Client, number: int) -> list[float]:
    answer = client.good(number)
    assert answer.logprobs is not None
    return [*answer.metrics.values(), *answer.logprobs.tolist()]


def oracle(root: Path, steps: str) -> dict[str, Any]:
    driver = make_driver(root, 1, {})
    driver.submit("j1", document())
    driver.start()
    client = Client(driver, "j1")
    client.good(client.ask("save_for_sampler", name="first"))
    rows = [step(client, number) for number in range(int(steps))]
    client.good(client.ask("leave"))
    driver.run_to_end()
    driver.stop()
    return {"rows": rows, "ended": driver.jobs["j1"].ended, "scores": base_scores(root)}


def base_scores(root: Path) -> dict[str, list[float]]:
    """What the first gang has left of its base; nothing of one without a tokenizer."""
    files = list((root / "cache" / "base_scores").glob("*"))
    assert len(files) <= 1, "gangs of one base score it once"
    return dict(json.loads(files[0].read_text())) if files else {}


def over_experts(root: Path, steps: str, base: str, ranks: str, parallel: str) -> dict[str, Any]:
    """The loop of `oracle` over a base with routed experts, beside another client's."""
    on_experts = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
    outer = {"target_modules": ["gate_proj", "up_proj", "down_proj"], "expert_sharing": "outer"}
    place = {"path": base, "dtype": "float32"}
    driver = make_driver(root, int(ranks), json.loads(parallel), base_model=place)
    driver.submit("j1", document(portion_tokens=None, lora=on_experts))
    driver.submit("j2", document(portion_tokens=None, lora=outer, name="other"))
    driver.start()
    client, other = Client(driver, "j1"), Client(driver, "j2")
    client.good(client.ask("save_for_sampler", name="first"))
    rows = []
    for number in range(int(steps)):
        ahead = other.ask("forward_backward", batch(90 + number, (200, 3, 60, 17)))
        rows.append(step(client, number, disturbed=True, moves=number == 2))
        other.good(ahead)
        other.good(other.ask("optim_step", learning_rate=1e-2))
    for leaving in (client, other):
        leaving.good(leaving.ask("leave"))
    driver.run_to_end()
    driver.stop()
    return {"rows": rows, "ended": driver.jobs["j1"].ended}


def layout(root: Path, ranks: str, parallel: str, more: str = "{}") -> dict[str, Any]:
    """Loops in one layout: alone, beside other jobs, with errors, and from a saved state.

    Args:
        more: further fields of the gang's spec; with another base there is no job with own data.
    """
    fields = json.loads(more)
    driver = make_driver(root, int(ranks), json.loads(parallel), **fields)
    driver.submit("j1", document())
    driver.start()
    alone = Client(driver, "j1")
    found: dict[str, Any] = {"alone": [step(alone, n) for n in range(STEPS)]}
    found["state"] = alone.good(alone.ask("save_state", name="four")).values["path"]
    found["later"] = step(alone, STEPS)
    alone.good(alone.ask("leave"))
    if "base_model" not in fields:
        found["ordinary_alone"] = ordinary(driver, "j2")
    driver.submit("j3", document(name="again"))
    driver.submit("j4", document(16, name="other", lora={"target_modules": ["q_proj", "up_proj"]}))
    ordinary_beside = None if "base_model" in fields else ordinary_job(driver, "j5")
    again, other = Client(driver, "j3"), Client(driver, "j4")
    found["beside"] = []
    for n in range(STEPS):
        ahead = other.ask("forward_backward", batch(90 + n, (200, 3, 60, 17)))
        found["beside"].append(step(again, n, disturbed=True, moves=n == 2))
        other.good(ahead)
        other.good(other.ask("optim_step", learning_rate=1e-2))
    found["forward"] = values(again, again.ask("forward", batch(STEPS)))
    loaded = other.answer(other.ask("load_state", path=found["state"]))
    found["load_refused"] = loaded.error
    found["overflows"] = overflows(other)
    again.good(again.ask("optim_step", learning_rate=1.0))
    again.good(again.ask("load_state", path=found["state"]))
    found["reloaded"] = step(again, STEPS)
    for client in (again, other):
        client.good(client.ask("leave"))
    driver.run_to_end()
    if ordinary_beside is not None:
        found["ordinary_beside"] = sorted(ordinary_beside.losses.items())
    found["digests"] = driver.adapter_digests()
    found["scores"] = base_scores(root)
    driver.stop()
    return found


def ordinary_job(driver: GangDriver, job: str) -> Any:
    (own,) = quickstart_jobs(["mirror"], portion_tokens=256, max_steps=8, schedule={}).values()
    del own["data"]["eval"]
    own.pop("eval_every_steps", None)
    return driver.submit(job, own)


def ordinary(driver: GangDriver, job: str) -> list[tuple[int, float]]:
    own = ordinary_job(driver, job)
    driver.run_until(lambda: own.ended is not None)
    assert own.ended is not None
    assert own.ended.get("status") == "finished", own.ended
    return sorted(own.losses.items())


def overflows(client: Client) -> list[str | None]:
    """A gradient that is not finite: its step says so, and the next one is as good as any."""
    huge = batch(1) | {"weights": np.full(42, 1e37, np.float32)}
    asked = [client.ask("forward_backward", huge), client.ask("optim_step")]
    asked += [client.ask("forward_backward", batch(2)), client.ask("optim_step")]
    return [client.answer(number).error for number in asked]


def killed(root: Path, kills: str) -> dict[str, Any]:
    """Loops of two clients; a rank is SIGKILLed with requests under way, and when all is quiet."""
    base = quickstart_base() | {"dtype": "bfloat16"}
    driver = make_driver(root, 2, {"tp_size": 2}, base_model=base)
    for job, rank in (("j1", 4), ("j2", 8)):
        driver.submit(job, document(rank), checkpoint_every_steps=2)
    driver.start()
    clients = [Client(driver, job) for job in ("j1", "j2")]
    rows, moments = [], json.loads(kills)
    for number in range(6):
        saves = [
            client.ask("save_for_sampler", name="latest", only_sampled=client is clients[1])
            for client in clients
        ]
        if number in moments:
            clients[1].ask("forward", batch(3, (250, 250, 250)))
            clients[0].ask("forward", batch(3))
            os.kill(pids(driver)[number % 2], signal.SIGKILL)
        else:
            for client in clients:
                client.good(client.ask("forward", batch(3)))
        rows.append([step(client, number) for client in clients])
        for client, save in zip(clients, saves, strict=True):
            client.good(save)
        if -number in moments:
            lose_newest(root)
            os.kill(pids(driver)[1], signal.SIGKILL)
    for client in clients:
        client.good(client.ask("leave"))
    driver.run_to_end()
    driver.stop()
    kept = sorted(path.name for path in (driver.home.job("j1") / "requests").glob("*.safetensors"))
    return {
        "rows": rows, "deaths": len(driver.deaths), "digests": driver.adapter_digests(),
        "versions": published(root), "kept": kept,
    }  # fmt: skip


def lose_newest(root: Path) -> None:
    """Leaves of newest versions what a fall of the machine leaves that comes before `settle`."""
    for folder in root.glob("jobs/*/sampler"):
        newest = max(folder.glob(".versions/*"))
        for file in newest.rglob("adapter_model.safetensors"):
            file.write_bytes(b"")
        (folder / ".durable").write_text(str(int(newest.name) - 1))


def published(root: Path) -> dict[str, str]:
    """Hashes of all weights, where those for samplers are the others in bf16."""
    found = {}
    for file in sorted(root.glob("jobs/*/sampler/.versions/**/adapter_model.safetensors")):
        place = str(file.parent.relative_to(root))
        if file.parent.name == SAMPLED:
            whole = load_file(file.parents[1] / file.name)
            assert all(torch.equal(t, whole[n].bfloat16()) for n, t in load_file(file).items())
            assert next(iter(whole.values())).dtype == torch.float32
        found[place] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found | {
        str(p.relative_to(root)): os.readlink(p) for p in root.glob("jobs/*/sampler/[!.]*")
    }


CASES = {
    "oracle": oracle,
    "over experts": over_experts,
    "layout": layout,
    "killed": killed,
}


if __name__ == "__main__":
    run_case(CASES, forks=not torch.cuda.is_available())
