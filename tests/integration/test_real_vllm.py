"""The real vLLM, with room for two adapters: `./scripts/test.sh vllm`."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from tests.helpers.launch import HANG_S
from tests.helpers.sampling_case import LORAS, Reference, greedy, write_adapters
from tests.helpers.tiny_models import random_factors
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.runtime.sampling.values import Prompt, SamplingParams
from tlora_megatron.service.home import held, remove_unheld
from tlora_megatron.service.sampling.sampler import SamplingRefused
from tlora_megatron.service.sampling.vllm_sampler import VllmSampler
from tlora_megatron.service.sampling.vllm_server import GUARD, Server, VllmSettings, _free_port
from tlora_megatron.service.supervisor import Child
from tlora_megatron.training.formats.peft import export_adapter

pytestmark = [pytest.mark.vllm, pytest.mark.anyio]

TOKENS = tuple(range(1, 40, 3))
COMMAND = (os.environ.get("VLLM_COMMAND", "vllm"), "serve")


class Case:
    """A base, samplers over a server that the first of them has started, and adapters."""

    def __init__(self, base: Path, folder: Path) -> None:
        self.base, self._folder = base, folder
        self._spec = read_model_spec(base / "config.json")

    def sampler(self, *running: Server) -> VllmSampler:
        section = {"path": str(self.base), "dtype": "float32"}
        settings = VllmSettings(adapters=2, most_rank=None if running else 16, command=COMMAND)
        return VllmSampler(self._folder, {"base": section}.__getitem__, settings, running)

    def write(self, folder: Path, seed: int, rank: int = 4) -> str:
        """A version of an adapter."""
        lora = replace(LORAS["attention"], rank=rank)
        factors = random_factors(self._spec, lora, seed=seed, b_std=0.1)
        export_adapter(folder, lora=lora, factors=factors, model=self._spec, base_model="")
        return str(folder)

    async def check(self, sampler: VllmSampler, *adapters: str | None) -> None:
        """All at once: PEFT's likeliest tokens, with its log-probabilities within 1e-4."""
        asked = [Prompt(tokens=TOKENS, adapter=folder, num_samples=2) for folder in adapters]
        prompts = [greedy(prompt, 12) for prompt in asked]
        for prompt, answer in zip(prompts, await sampler.generate("base", prompts), strict=True):
            found, other = answer.sequences
            assert found == other
            tokens = torch.tensor([[*TOKENS, *found.tokens]])
            with torch.no_grad():
                logits = Reference(self.base, prompt.adapter).model(input_ids=tokens).logits
            rows = torch.log_softmax(logits[0, len(TOKENS) - 1 : -1], dim=-1)
            likeliest = rows.max(dim=-1).values.tolist()
            assert list(found.logprobs) == pytest.approx(likeliest, abs=1e-4), prompt.adapter


@pytest.fixture
def case(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    return Case(repo / "configs/quickstart/base", tmp_path / "sampler")


async def test_versions_deaths_and_restarts(case: Case, tmp_path: Path) -> None:
    versions = [case.write(tmp_path / str(seed), seed) for seed in range(10)]
    ours = case.sampler()
    await case.check(ours, None)  # alone: on CPUs the last slot's adapter is added beside others
    await case.check(ours, *write_adapters(case.base, tmp_path / "adapters").values())
    await case.check(ours, *versions, *versions[:3])
    # A process of HTTP in the former one's place.
    first = (await ours._own("base")).server
    theirs = case.sampler(Server(first.address, first.key))
    await case.check(theirs, *versions[4:])
    high = case.write(tmp_path / "high", 0, rank=32)
    for sampler, sentence in (
        (ours, r"most rank 16, .* got rank 32"),
        (theirs, "got rank 32 on q"),
    ):
        with pytest.raises(SamplingRefused, match=sentence):
            await sampler.generate("base", [Prompt(tokens=TOKENS, adapter=high)])
    # A folder that is deleted while it is sampled from.
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    long = Prompt(tokens=TOKENS, adapter=versions[0], num_samples=8, params=params)
    asked = asyncio.create_task(theirs.generate("base", [long]))
    await asyncio.sleep(0.5)
    shutil.rmtree(versions[0])
    await case.check(theirs, *versions[1:4])
    assert [len(one.tokens) for one in (await asked)[0].sequences] == [150] * 8
    with pytest.raises(SamplingRefused, match="adapter must be a folder with"):
        await theirs.generate("base", [long])
    # A death under requests.
    asked = asyncio.create_task(ours.generate("base", [replace(long, adapter=versions[1])] * 4))
    await asyncio.sleep(0.5)
    assert first.child is not None
    psutil.Process(first.child.pid).children()[0].kill()
    assert [len(answer.sequences) for answer in await asked] == [8] * 4
    await case.check(ours, *versions[1:4])
    assert (await ours._own("base")).server != first
    await ours.close()
    await theirs.close()


KILLS, SAMPLES, CLIENTS, NAMES = 20, 10_000, 16, 5


class Storm:
    """Two servers of somebody's with two slots each, and versions under names; all of it goes."""

    def __init__(self, case: Case, folder: Path) -> None:
        self._folder, self._case = folder, case
        self._pool = [case.write(folder / "pool" / str(seed), seed) for seed in range(10)]
        self.prompts = [TOKENS[:length] for length in (5, 9, 13)]
        self._wanted = [self._references(adapter) for adapter in self._pool]
        seen = {tuple(round(x, 2) for x in one[1]) for rows in self._wanted for one in rows}
        assert len(seen) == len(self._pool) * len(self.prompts), "versions can be told apart"
        self.ports = [_free_port() for _ in range(2)]
        self._servers: dict[int, Child] = {}
        self._live: dict[int, tuple[int, Path]] = {}
        self.counts = Counter[str]()
        self.is_over = False

    def _references(self, adapter: str) -> list[tuple[list[int], list[float]]]:
        """PEFT's likeliest tokens behind each prompt, and their log-probabilities."""
        model, found = Reference(self._case.base, adapter), []
        for prompt in self.prompts:
            tokens = model.generate(prompt, 12)
            found.append((tokens, model.logprobs([*prompt, *tokens])[len(prompt) - 1 :].tolist()))
        return found

    def start(self, port: int) -> None:
        words = ("--served-model-name", "base", "--dtype", "float32", "--port", str(port))
        more = ("--enable-lora", "--max-lora-rank", "16", "--max-loras", "2")
        lock = self._folder / f"{port}.lock"
        command = (*GUARD, str(lock), *COMMAND, str(self._case.base), *words, *more)
        added = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_API_KEY": "key"}
        log = self._folder / f"{port}.log"
        self._servers[port] = Child(command, environment=os.environ | added, log=log, wire="stdin")

    async def kill(self, port: int) -> None:
        server = self._servers[port]
        psutil.Process(server.pid).children()[0].kill()
        await server.ended()
        server.close()
        self.counts["kills"] += 1
        self.start(port)

    async def up(self, port: int) -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            while True:
                with suppress(httpx.TransportError):
                    if (await client.get("/health")).is_success:
                        return
                await asyncio.sleep(0.2)

    def publish(self, name: int) -> None:
        self.counts["versions"] += 1
        number = random.randrange(len(self._pool))
        folder = self._folder / "versions" / str(self.counts["versions"])
        shutil.copytree(self._pool[number], folder)
        before = self._live.get(name)
        self._live[name] = number, folder
        if before is not None:
            self.counts["removed"] += remove_unheld(before[1])

    async def republish(self) -> None:
        while not self.is_over:
            self.publish(random.randrange(NAMES))
            await asyncio.sleep(1.0)

    async def sample(self, sampler: VllmSampler) -> None:
        """A client: fails on the first answer that is not the version's, or on any error."""
        while not self.is_over:
            number, folder = random.choice([*self._live.values()])
            place = random.randrange(len(self.prompts))
            with held(folder):
                if not folder.is_dir():
                    continue
                asked = Prompt(tokens=self.prompts[place], adapter=str(folder), num_samples=2)
                (answer,) = await sampler.generate("base", [greedy(asked, 12)])
            tokens, logprobs = self._wanted[number][place]
            for found in answer.sequences:
                count = len(found.tokens)
                assert count > 0
                assert list(found.tokens) == tokens[:count]
                assert list(found.logprobs) == pytest.approx(logprobs[:count], abs=1e-3)
            self.counts["samples"] += len(answer.sequences)

    async def rage(self) -> None:
        """Kills servers, each when it is up, until there were enough kills and samples."""
        while self.counts["kills"] < KILLS or self.counts["samples"] < SAMPLES:
            port = random.choice(self.ports)
            await self.up(port)
            await asyncio.sleep(random.uniform(1, 8))
            if self.counts["kills"] < KILLS:
                await self.kill(port)
                print(dict(self.counts), flush=True)
        self.is_over = True

    async def close(self) -> None:
        for server in self._servers.values():
            server.handle.send(signal.SIGTERM)
            await server.ended()
            server.close()


async def test_no_sample_is_of_another_version(case: Case, tmp_path: Path) -> None:
    """Two servers are killed 20 times under 16 clients, while versions come, leave and are removed.

    No client sees an error, and none anything but its version's tokens and log-probabilities.
    """
    storm = Storm(case, tmp_path)
    for name in range(NAMES):
        storm.publish(name)
    for port in storm.ports:
        storm.start(port)
    settings = VllmSettings(adapters=2, most_rank=16, patience_s=1800.0)
    servers = [Server(f"http://127.0.0.1:{port}", "key") for port in storm.ports]
    sampler = VllmSampler(tmp_path, {}.__getitem__, settings, servers)
    try:
        async with asyncio.TaskGroup() as tasks:
            for work in (storm.rage(), storm.republish()):
                tasks.create_task(work)
            for _ in range(CLIENTS):
                tasks.create_task(storm.sample(sampler))
    finally:
        print(dict(storm.counts))
        await sampler.close()
        await storm.close()
    assert storm.counts["kills"] == KILLS
    assert storm.counts["samples"] >= SAMPLES


SERVE = """
import asyncio, sys
from pathlib import Path
from tests.integration.test_real_vllm import Case
asyncio.run(Case(Path(sys.argv[1]), Path(sys.argv[2])).sampler().encode("base", "x"))
"""


def test_our_own_ends_with_us(case: Case, tmp_path: Path) -> None:
    """With its engine, which vLLM leaves behind when it is killed."""
    process = psutil.Popen((sys.executable, "-c", SERVE, case.base, tmp_path))
    while not any("EngineCore" in " ".join(one.cmdline()) for one in process.children(True)):
        assert process.poll() is None
        time.sleep(0.1)
    started = process.children(recursive=True)
    process.kill()
    _, alive = psutil.wait_procs(started, HANG_S)
    assert not alive
