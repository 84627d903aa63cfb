"""The real vLLM, with room for two adapters: `./scripts/test.sh vllm`."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from tests.helpers.launch import HANG_S
from tests.helpers.sampling_case import LORAS, Reference, greedy, write_adapters
from tests.helpers.tiny_models import random_factors
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.runtime.sampling.values import Prompt, SamplingParams
from tlora_megatron.service.sampling.sampler import SamplingRefused
from tlora_megatron.service.sampling.vllm_sampler import VllmSampler
from tlora_megatron.service.sampling.vllm_server import Server, VllmSettings
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
