"""The oracle's results on disk, by a hash of all that they follow from.

Several modules compare with the same jobs alone, and so does the next session. A result follows
from the base's files, the job's settings, its initial factors, the sequences of each step, the
oracle's source and the libraries' versions. Where pytest has no cache, every call trains.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from tests.helpers import fake_quant_peft, oracle, oracle_experts
from tests.helpers.fake_quant_peft import FakeQuant
from tests.helpers.oracle import OracleResult, Sequenced, train_alone
from tests.helpers.session import ORACLE_CACHE
from tlora_megatron.config.job import JobSpec


def cached_train_alone(
    base_dir: Path,
    job: JobSpec,
    factors: Mapping[str, Tensor],
    batches: Sequence[Sequence[Sequenced]],
    quantised: FakeQuant | None = None,
) -> OracleResult:
    """The result of `oracle.train_alone`, trained only if no earlier call had the same inputs."""
    folder = os.environ.get(ORACLE_CACHE)
    if not folder:
        return train_alone(base_dir, job, factors, batches, quantised=quantised)
    path = Path(folder) / f"{_digest(base_dir, job, factors, batches, quantised)}.pt"
    if path.is_file():
        return OracleResult(**torch.load(path, weights_only=True))
    result = train_alone(base_dir, job, factors, batches, quantised=quantised)
    partial = path.with_suffix(f".{os.getpid()}")
    torch.save(asdict(result), partial)
    partial.rename(path)  # another process may be at the same job
    return result


def _digest(
    base_dir: Path,
    job: JobSpec,
    factors: Mapping[str, Tensor],
    batches: Sequence[Sequence[Sequenced]],
    quantised: FakeQuant | None,
) -> str:
    digest = hashlib.sha256()
    for part in _parts(base_dir, job, factors, batches, quantised):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()


def _parts(
    base_dir: Path,
    job: JobSpec,
    factors: Mapping[str, Tensor],
    batches: Sequence[Sequence[Sequenced]],
    quantised: FakeQuant | None,
) -> Iterator[bytes]:
    yield Path(oracle.__file__).read_bytes()
    yield Path(oracle_experts.__file__).read_bytes()
    yield repr(torch.get_default_dtype()).encode()
    if quantised is not None:
        yield Path(fake_quant_peft.__file__).read_bytes()
        yield repr(quantised).encode()
    yield repr([version(name) for name in ("torch", "transformers", "peft")]).encode()
    yield repr((job.lora, job.optimizer, job.schedule, job.max_steps)).encode()
    for file in sorted(base_dir.glob("*.json")) + sorted(base_dir.glob("*.safetensors")):
        yield file.name.encode()
        yield file.read_bytes()
    for name, factor in sorted(factors.items()):
        yield f"{name} {tuple(factor.shape)} {factor.dtype}".encode()
        yield factor.contiguous().numpy().tobytes()
    for batch in batches:
        yield str(len(batch)).encode()
        for sequence in batch:
            for values in (sequence.tokens, sequence.is_target):
                yield torch.as_tensor(values).numpy().tobytes()
