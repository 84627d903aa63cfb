"""Attacks `tlora serve --http` while it trains on this machine's CPU, and says what it found.

    python -m scripts.chaos connections    # 500 at once
    python -m scripts.chaos generated      # 1,000 requests from the OpenAPI page, by schemathesis
    python -m scripts.chaos broken         # 1,000 connections that speak no HTTP, stop or crawl
    python -m scripts.chaos disk           # a full one, on a tmpfs; needs root
    python -m scripts.chaos queue          # 5,000 jobs at once; says how long that takes

Nothing may be lost, no process end, nobody get a 5xx that does not say when to come back, no trace
be logged, and adapters must have the bits of an undisturbed job. The first deviation is raised.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil

from tests.helpers.gang_driver import digest
from tests.helpers.http_service import bearer
from tests.helpers.launch import HANG_S, REPO
from tests.helpers.served_http import ServedHttp, serving_http, serving_quickstart
from tests.helpers.tinker import client_loop
from tests.helpers.tinker.clients import closing_clients
from tlora_megatron.service.store import Job, TenantLimits, open_store

QUICKSTART = REPO / "configs" / "quickstart"
SAMPLE = {"model": "base", "prompt": "planet", "max_tokens": 1}
ASKED = {"/v1/jobs": None, "/v1/groups": None, "/v1/models": None, "/v1/completions": SAMPLE}
"""What many ask at once: paths and bodies."""
REACHED = {"tlora_megatron.service.api", "tlora_megatron.service.sampling.process"}


def document(name: str, steps: int) -> dict[str, Any]:
    job = {"name": name, "data": {"train": "rows.jsonl"}, "batch_size": 4, "max_seq_len": 64}
    lora = {"rank": 4, "dropout": 0.1, "target_modules": ["q_proj", "down_proj"]}
    return {"base_model": "base", "jobs": [{**job, "lora": lora, "max_steps": steps, "seed": 0}]}


class Client:
    """A tenant of a service, which may ask as often as it likes and has trained a job."""

    def __init__(self, served: ServedHttp) -> None:
        self.served, self.token = served, served.token("ann")
        with open_store(served.home.store) as store:
            store.tenants.set_limits("ann", TenantLimits(requests_per_s=1e6))
        rows = served.home.tenant("ann") / "rows.jsonl"
        rows.parent.mkdir(parents=True)
        rows.write_bytes((QUICKSTART / "data" / "ordered_train.jsonl").read_bytes())
        self.headers = bearer(self.token)
        self.http = httpx.Client(base_url=served.address, headers=self.headers, timeout=HANG_S)
        assert self.submit("alone", 300).status_code == 201
        self.wait_for("alone")
        assert self.http.post("/v1/completions", json=SAMPLE).status_code == 200

    def submit(self, name: str, steps: int) -> httpx.Response:
        return self.http.post("/v1/jobs", json=document(name, steps))

    def upload(self, rows: bytes) -> httpx.Response:
        form: Any = {"data": {"purpose": "fine-tune"}, "files": {"file": ("a.jsonl", rows)}}
        return self.http.post("/v1/files", **form)

    def jobs(self) -> dict[str, Job]:
        with open_store(self.served.home.store) as store:
            return {job.name: job for job in store.jobs.each()}

    def wait_for(self, *names: str, step: int = 10**9) -> None:
        """Waits for a step of jobs, or for their ends."""

        def are_there() -> bool:
            jobs = map(self.jobs().__getitem__, names)
            return all(job.state.is_over or job.step >= step for job in jobs)

        self.served.wait_until(are_there, f"{names}, {step}")

    def check(self, name: str) -> None:
        """The job has the bits of the undisturbed one, and no log of any process has a trace."""
        folders = [self.served.home.job(self.jobs()[of].id) / "adapter" for of in ("alone", name)]
        first, second = (digest(folder / "adapter_model.safetensors") for folder in folders)
        assert first == second
        for log in (self.served.log, *self.served.home.root.rglob("*.log")):
            before, trace, behind = log.read_text().partition("Traceback")
            # The thread that writes for TensorBoard says its own.
            assert not trace or "tensorboard" in behind[:1000], (
                f"{log}: {before[-500:]}{trace}{behind[:3000]}"
            )

    def processes(self) -> set[int]:
        """Those that clients reach, and the ranks."""
        children = psutil.Process(self.served.process.pid).children(recursive=True)
        reached = {child.pid for child in children if REACHED & {*child.cmdline()}}
        return reached | {rank.pid for rank in self.served.ranks()}


@contextmanager
def attacked(folder: Path) -> Iterator[Client]:
    """A service that trains a job meanwhile, which is not harmed; no process ends."""
    with serving_quickstart(folder, "float32") as served:
        client = Client(served)
        assert client.submit("beside", 300).status_code == 201
        client.wait_for("beside", step=1)
        before = client.processes()
        yield client
        client.wait_for(*client.jobs())
        client.check("beside")
        assert client.processes() >= before


def connections(folder: Path) -> None:
    counts: Counter[tuple[str, int]] = Counter()

    async def ask(client: Client, number: int, begin: asyncio.Event) -> None:
        where: Any = {"base_url": client.served.address, "headers": client.headers}
        async with httpx.AsyncClient(timeout=HANG_S, **where) as http:
            await begin.wait()
            for path, body in ASKED.items():
                method = "GET" if body is None else "POST"
                note(path, await http.request(method, path, json=body))
            if number < 100:
                note("submit", await http.post("/v1/jobs", json=document(f"of-{number}", 3)))

    def note(what: str, answer: httpx.Response) -> None:
        counts[what, answer.status_code] += 1
        assert answer.status_code < 400 or "Retry-After" in answer.headers, answer.text

    async def ask_all(client: Client) -> None:
        begin = asyncio.Event()
        asking = [asyncio.create_task(ask(client, number, begin)) for number in range(500)]
        await asyncio.sleep(1)
        begin.set()
        await asyncio.gather(*asking)

    with attacked(folder) as client:
        begin_s = time.monotonic()
        asyncio.run(ask_all(client))
        print(f"{counts.total()} requests in {time.monotonic() - begin_s:.1f} s: {dict(counts)}")
    assert {status for _, status in counts} <= {200, 201, 429, 503}
    ended = Counter(str(job.state) for job in client.jobs().values() if job.name[:3] == "of-")
    assert ended == {"finished": counts["submit", 201]}


def generated(folder: Path) -> None:
    if importlib.util.find_spec("schemathesis") is None:
        print("skipped: needs pip install schemathesis")
        return
    rules = ["--checks=not_a_server_error", "--max-examples=20", "--seed=1", "--phases=fuzzing"]
    rules += ["--exclude-path-regex=stream", "--suppress-health-check=all"]  # streams do not end
    with attacked(folder) as client:
        words = [f"{client.served.address}/openapi.json", f"--header=X-API-Key: {client.token}"]
        command = [sys.executable, "-m", "schemathesis.cli", "run", *words, *rules, "--no-color"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, cwd=folder)
    print(done.stdout[-1000:])
    assert done.returncode == 0, done.stdout + done.stderr


def _broken(random: Random, token: str) -> bytes:
    """A request that is none, or that is cut, or that lies about its length."""
    body = json.dumps(document("never", 0)).encode()
    length = random.choice([b"%d" % len(body), b"1", b"-1", b"9" * 30, b"x", b"99", b"1, 2"])
    said = random.choice([b"Content-Length: " + length, b"Transfer-Encoding: chunked", b"A:"])
    head = b"POST /v1/jobs HTTP/1.1", b"Host: localhost", f"X-API-Key: {token}".encode(), said
    whole = bytearray(random.choice([b"\r\n", b"\n", b"\r\n "]).join(head) + b"\r\n\r\n" + body)
    for _ in range(random.randrange(4)):
        whole[random.randrange(len(whole))] = random.randrange(256)
    return bytes(whole[: random.randrange(len(whole))] if random.random() < 0.5 else whole)


def broken(folder: Path) -> None:
    random, answers, slow = Random(0), Counter[bytes](), []
    with attacked(folder) as client:
        port = int(client.served.address.rpartition(":")[2])
        for number in range(1000):
            stranger = socket.create_connection(("127.0.0.1", port))
            stranger.sendall(_broken(random, client.token))
            if number % 10 == 0:
                slow.append(stranger)
                continue
            stranger.settimeout(0.05)
            with suppress(OSError):
                answers[stranger.recv(12)[9:]] += 1
            if number % 2:  # gone with a reset
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            stranger.close()
        for stranger in slow:
            stranger.close()
    print(dict(answers))
    assert b"400" in answers
    assert not [status for status in answers if status.startswith(b"5")]


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk of 64 MB."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    subprocess.run(words, check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _fill(path: Path) -> None:
    with path.open("ab", buffering=0) as ballast:
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while True:
                    ballast.write(bytes(size))


def disk(folder: Path) -> None:
    """Store, uploads, requests, checkpoints, metrics and logs are refused by turns."""
    if os.geteuid():
        print("skipped: needs root, to mount a tmpfs")
        return
    os.environ["TINKER_TELEMETRY"] = "0"
    base, rows = folder / "base.json", client_loop.data(QUICKSTART / "data/mirror_eval.jsonl")
    section = {"path": str(QUICKSTART / "base"), "dtype": "float32"}
    base.write_text(json.dumps({"base_model": section}))
    words = (f"--base=base={base}", "--sampler=own", "--checkpoint-every=1")
    with (
        small_disk(folder / "disk") as small,
        serving_http(small / "service", folder / "log", *words) as served,
        closing_clients(),
        ThreadPoolExecutor() as pool,
    ):
        client, filled = Client(served), small / "ballast"
        models = [client_loop.create(served.address, client.token, 4) for _ in range(2)]
        losses = client_loop.train(models[0], rows, 30)
        client.submit("beside", 300)
        client.submit("ends", 50)
        client.wait_for("beside", "ends", step=20)
        client.submit("late", 50)
        driven = pool.submit(client_loop.train, models[1], rows, 30)
        end_s = time.monotonic() + 8
        accepted, refusals = list[str](), 0  # the store may have room of its own for some
        try:
            while time.monotonic() < end_s:
                _fill(filled)
                name, line = f"at-{time.monotonic():.3f}", b'{"text": "a"}\n'
                for answer in (client.submit(name, 1), client.upload(line * 10_000)):
                    if answer.status_code == 201:
                        accepted.append(name)
                        continue
                    refusals += 1
                    told = answer.status_code, answer.headers.get("Retry-After"), answer.text
                    assert told[:2] == (507, "5"), told
                    assert "the service's disk must have room" in answer.text, told
                assert client.http.get("/v1/jobs").status_code == 200
        finally:
            filled.unlink()  # or the client above would wait for ever
        assert refusals
        assert not list(served.home.tenants.rglob(".partial-*"))
        said = "gangs train on, nothing new starts until it is back"
        assert served.log.read_text().count(said) == 1
        served.wait_until(lambda: client.submit("after", 5).status_code == 201, "the store")
        assert client.upload(b'{"text": "a"}\n').status_code == 200
        client.wait_for("beside", "ends", "late", "after", *accepted)
        assert driven.result() == losses
        client.check("beside")
        for name in ("alone", "beside", "ends", "late", "after", *accepted):
            job = client.jobs()[name]
            assert job.state == "finished"
            lines = (served.home.job(job.id) / "metrics.jsonl").read_text().splitlines()
            steps = [row["step"] for row in map(json.loads, lines) if "loss" in row]
            assert steps == list(range(1, job.step + 1))


def queue(folder: Path) -> None:
    def tlora(*words: str) -> float:
        command = (sys.executable, "-m", "tlora_megatron.cli", *words)
        begin_s = time.perf_counter()
        where = f"--service={client.served.home.root}"
        # Jobs that end just then make `cancel` return 2.
        subprocess.run((*command, where), check=words == ("jobs",), stdout=subprocess.DEVNULL)
        return time.perf_counter() - begin_s

    with attacked(folder) as client:
        with open_store(client.served.home.store) as store:
            store.tenants.set_limits("ann", TenantLimits(requests_per_s=1e6, jobs=10**5))
        batches = []
        for batch in range(50):
            body = document("", 5)
            body["jobs"] = [body["jobs"][0] | {"name": f"x-{batch}-{n}"} for n in range(100)]
            batches.append(body)
        begin_s = time.perf_counter()
        for body in batches:
            assert client.http.post("/v1/jobs", json=body).status_code == 201
        print(f"{5000 / (time.perf_counter() - begin_s):.0f} submits a second, by 100")
        print(f"tlora jobs: {min(tlora('jobs') for _ in range(3)):.2f} s, the best of three")
        begin_s = time.perf_counter()
        print(f"tlora cancel of all: {tlora('cancel', '--name', 'x-*', '--yes'):.2f} s")
        with open_store(client.served.home.store) as store:
            while sum(n for state, n in store.jobs.counts().items() if not state.is_over) > 1:
                time.sleep(0.1)  # one is beside
        print(f"all are over after {time.perf_counter() - begin_s:.2f} s")
        ended = Counter(str(job.state) for name, job in client.jobs().items() if name[:2] == "x-")
        assert ended.total() == 5000, ended
        assert {*ended} <= {"finished", "cancelled"}, ended


def main() -> None:
    parser = argparse.ArgumentParser(description="Attacks a service that trains.")
    attacks = {attack.__name__: attack for attack in (connections, generated, broken, disk, queue)}
    parser.add_argument("attack", choices=attacks)
    with tempfile.TemporaryDirectory() as folder:
        begin_s = time.monotonic()
        attacks[parser.parse_args().attack](Path(folder))
        print(f"{time.monotonic() - begin_s:.0f} s with the service's start")


if __name__ == "__main__":
    main()
