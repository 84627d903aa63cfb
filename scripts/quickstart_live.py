#!/usr/bin/env python
"""Two clients train on one base at once: OpenAI's and Tinker's, both as PyPI has them.

    python scripts/quickstart_live.py [--steps N] [--port P] [--stay]

Serves the quickstart's base with its page, lets the `openai` client fine-tune one adapter by
`/v1/fine_tuning` while the `tinker` client drives another one step by step, and asks both adapters
what they have learnt. `scripts/quickstart.sh --live` installs what this needs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier, Event
from typing import Any

from rich.console import Console
from rich.table import Table

os.environ.setdefault("TINKER_TELEMETRY", "0")
warnings.simplefilter("ignore", FutureWarning)

import openai  # noqa: E402
import tinker  # noqa: E402
from tinker import types  # noqa: E402

QUICKSTART = Path(__file__).resolve().parents[1] / "configs" / "quickstart"
OUTPUT = Path("runs/quickstart-live")
BASE = "quickstart"
BATCH = 8
RATE = 5e-3
WARMUP = 10
ASKED = 16
"""Held-out questions for each adapter."""
SHOWN = 3
_MEETING_S = 300.0
_PAGE = re.compile(r"page: ((http://[^/\s]+)/#token=\S+)")

Row = dict[str, str]
console = Console(emoji=False)


@dataclass(frozen=True, slots=True)
class Served:
    """A service that listens."""

    folder: Path
    address: str

    def token(self, tenant: str) -> str:
        """A new token of a tenant."""
        command = [*_tlora("token"), "create", tenant, "--service", str(self.folder)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@dataclass(frozen=True, slots=True)
class Meeting:
    """Lets two clients begin at once, and says how long they trained beside each other."""

    begin: Barrier
    openai_trains: Event


@dataclass(frozen=True, slots=True)
class Learnt:
    """An adapter's answers to questions that it was not trained on."""

    client: str
    model: str
    steps: int
    answers: list[str]
    rows: list[Row]

    @property
    def share(self) -> float:
        """Share of answers that are right."""
        right = sum(a == row["completion"] for a, row in zip(self.answers, self.rows, strict=True))
        return right / len(self.rows)


def main() -> int:
    """Serves, trains, asks; returns the exit code."""
    args = _arguments()
    with _serving(args.port) as served, ThreadPoolExecutor() as pool:
        console.print("two clients train on one base, beside each other:")
        meeting = Meeting(Barrier(2, timeout=_MEETING_S), Event())
        clients = [
            pool.submit(client, served, args.steps, meeting) for client in (by_openai, by_tinker)
        ]
        for client in clients:
            client.add_done_callback(lambda done: done.exception() and meeting.begin.abort())
        learnt = [client.result() for client in clients]
        _show(learnt)
        console.print(f"\n+ tlora jobs --all --service {served.folder}")
        subprocess.run([*_tlora("jobs"), "--all", "--service", str(served.folder)], check=True)
        if args.stay:
            console.print("the service stays until Ctrl-C")
            signal.pause()
    return 0


def by_openai(served: Served, steps: int, meeting: Meeting) -> Learnt:
    """Reversing words, as a fine-tuning job of chats."""
    client = openai.OpenAI(base_url=f"{served.address}/v1", api_key=served.token("olga"))
    chats = "".join(json.dumps(_chat(row)) + "\n" for row in _rows("mirror", "train"))
    file = client.files.create(file=("chats.jsonl", chats.encode()), purpose="fine-tune")
    meeting.begin.wait()
    jobs = client.fine_tuning.jobs
    job = jobs.create(
        model=BASE,
        training_file=file.id,
        suffix="mirror",
        hyperparameters={"batch_size": BATCH},
        metadata={
            "tlora.lora.rank": "4",
            "tlora.optimizer.lr": str(RATE),
            "tlora.schedule.warmup_steps": str(min(WARMUP, steps // 2)),
            "tlora.max_seq_len": "64",
            "tlora.max_steps": str(steps),
        },
    )
    _say("openai", f"job {job.id}")
    seen = ""
    while job.status not in ("succeeded", "failed", "cancelled"):
        time.sleep(2)
        job = jobs.retrieve(job.id)
        if job.status == "running":
            meeting.openai_trains.set()
        newest = jobs.list_events(job.id, limit=1).data[0].message
        if newest != seen:
            _say("openai", seen := newest)
    meeting.openai_trains.clear()
    if job.status != "succeeded" or job.fine_tuned_model is None:
        raise RuntimeError(f"the job of the openai client must succeed, got {job.error}")
    rows = _rows("mirror", "eval")[:ASKED]

    def ask(row: Row) -> str:
        answer = client.chat.completions.create(
            model=str(job.fine_tuned_model),
            messages=_chat(row)["messages"][:1],
            temperature=0,
            max_tokens=32,
        )
        return answer.choices[0].message.content or ""

    return Learnt("openai", job.fine_tuned_model, steps, _answers("openai", rows, ask), rows)


def by_tinker(served: Served, steps: int, meeting: Meeting) -> Learnt:
    """Sorting letters, by a loop of the client's own."""
    service = tinker.ServiceClient(base_url=served.address, api_key=served.token("tim"))
    model = service.create_lora_training_client(base_model=BASE, rank=8).result()
    tokenizer = model.get_tokenizer()
    data = [_datum(row, tokenizer) for row in _rows("ordered", "train")]
    _say("tinker", f"model {model.model_id}")
    meeting.begin.wait()
    together = 0
    for step in range(steps):
        together += meeting.openai_trains.is_set()
        rate = RATE * min(1.0, (step + 1) / WARMUP)
        first = step * BATCH % len(data)
        passed = model.forward_backward(data[first : first + BATCH], "cross_entropy")
        stepped = model.optim_step(types.AdamParams(learning_rate=rate, beta2=0.999, eps=1e-8))
        loss = passed.result().metrics["loss:sum"]
        stepped.result()
        if step % 20 == 0 or step == steps - 1:
            _say("tinker", f"step {step + 1}: loss {loss:.4f}")
    _say("tinker", f"{together} of {steps} steps while the openai client's job trained")
    sampler = model.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=32, temperature=0.0)
    rows = _rows("ordered", "eval")[:ASKED]

    def ask(row: Row) -> str:
        prompt = types.ModelInput.from_ints(tokenizer.encode(row["prompt"]))
        found = sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).result()
        return str(tokenizer.decode(found.sequences[0].tokens, skip_special_tokens=True))

    return Learnt("tinker", model.model_id, steps, _answers("tinker", rows, ask), rows)


def _answers(client: str, rows: list[Row], ask: Callable[[Row], str]) -> list[str]:
    _say(client, f"asks the adapter {len(rows)} questions")
    return [ask(row) for row in rows]


def _chat(row: Row) -> Any:
    asked = {"role": "user", "content": row["prompt"].removesuffix("\n")}
    return {"messages": [asked, {"role": "assistant", "content": row["completion"]}]}


def _datum(row: Row, tokenizer: Any) -> types.Datum:
    """A row whose loss is the mean over its answer, shared by the batch."""
    prompt = tokenizer.encode(row["prompt"])
    answer = [
        *tokenizer.encode(row["completion"], add_special_tokens=False),
        tokenizer.eos_token_id,
    ]
    tokens = [*prompt, *answer]
    weights = [0.0] * (len(prompt) - 1) + [1.0 / (BATCH * len(answer))] * len(answer)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


def _rows(name: str, part: str) -> list[Row]:
    lines = (QUICKSTART / "data" / f"{name}_{part}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _say(client: str, words: str) -> None:
    console.print(f"{client:>8}  {words}", markup=False, highlight=False)


def _show(learnt: list[Learnt]) -> None:
    """Some questions with the adapters' answers, and how many were right."""
    table = Table(title="questions that the adapters were not trained on", title_justify="left")
    for column in ("client", "question", "answer", "right"):
        table.add_column(column)
    for one in learnt:
        for row, answer in list(zip(one.rows, one.answers, strict=True))[:SHOWN]:
            words = (one.client, row["prompt"].strip(), answer, row["completion"])
            table.add_row(*words)
    console.print(table)
    for one in learnt:
        console.print(
            f"{one.client}: {one.share:.0%} of {len(one.rows)} right after {one.steps} steps; "
            f"{one.model}",
            markup=False,
        )


@contextmanager
def _serving(port: int) -> Iterator[Served]:
    """`tlora serve` with the quickstart's base, HTTP and a sampler, until the block ends."""
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir(parents=True)
    folder, log = (OUTPUT / "service").resolve(), OUTPUT / "serve.log"
    command = [*_tlora("serve"), f"--service={folder}", f"--http={port}", "--sampler=own"]
    command += ["--gpus=1", "--policy=mlora", f"--base={BASE}={QUICKSTART / 'base'}"]
    console.print(f"+ tlora {' '.join(command[3:])}", soft_wrap=True, highlight=False)
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        while (found := _PAGE.search(log.read_text())) is None:
            if process.poll() is not None:
                raise RuntimeError(f"the service must listen, got:\n{log.read_text()}")
            time.sleep(0.1)
        console.print(f"the service's page: {found[1]}", soft_wrap=True)
        yield Served(folder, found[2])
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def _tlora(command: str) -> list[str]:
    return [sys.executable, "-m", "tlora_megatron.cli", command]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--steps", type=int, default=160, help="of each adapter (default: 160)")
    parser.add_argument("--port", type=int, default=0, help="of the service (default: a free one)")
    parser.add_argument("--stay", action="store_true", help="serve on until Ctrl-C")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
