"""Sets up the process of a rank, and what `run.deterministic` demands of it and its linears.

What it asks of the configuration is in `config.deterministic`, of the kernels in `ops.exactness`.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tlora_megatron.config.parallel_rules import DETERMINISM_COST
from tlora_megatron.config.schema import RunConfig
from tlora_megatron.files import BY_UMASK, write_atomic
from tlora_megatron.layers.sites import Site
from tlora_megatron.ops.frozen import flash4
from tlora_megatron.ops.kernel_build import built_library
from tlora_megatron.ops.lora.cuda_arguments import why_not_sizes
from tlora_megatron.ops.lora.kernel_choice import kernel_choice
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.training.evaluation import Scorer
from tlora_megatron.training.formats.quantised import QuantisationCard
from tlora_megatron.training.run.preparation import PreparedJob
from tlora_megatron.training.run.summary import versions

ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "CUBLASLT_WORKSPACE_SIZE": "0",
    "NCCL_ALGO": "Ring",
    "NCCL_NVLS_ENABLE": "0",
    "MKL_CBWR": "AUTO,STRICT",
}
"""Variables that libraries read when they start. Without a workspace cuBLAS cannot divide a sum by
the number of rows; a ring adds an element of a job's own slab in the slab's own order. MKL chooses
by the number of rows how it adds: with AVX-512 below 16 rows, and over many elements (from 896 on)
beyond 128. Its strict mode, which was as fast on one core, does not."""


def set_environment(deterministic: bool) -> None:
    """Sets `ENVIRONMENT` if `run.deterministic` is set; call it before CUDA starts.

    Raises:
        ValueError: if a variable has another value, or CUDA has started without it.
    """
    if not deterministic:
        return
    late = torch.cuda.is_initialized()
    for name, value in ENVIRONMENT.items():
        given = os.environ.get(name)
        if given is not None and given != value:
            raise ValueError(
                f"{name} must be {value} with run.deterministic, got {given}: unset it"
            )
        if given is None and late:
            raise ValueError(
                f"{name} must be {value} before CUDA starts with run.deterministic, got nothing: "
                f"export {name}={value}"
            )
        os.environ[name] = value


_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Names under which torch reads the settings of its allocators."""


def let_segments_grow() -> None:
    """Lets torch extend its segments of GPU memory, unless a variable sets up its allocator.

    Micro-batches of unlike rows and recompute leave free blocks of all sizes between others. In
    segments of fixed size an 8B model whose tensors took 42.6 GB of an H200 reserved 48.0.
    """
    if not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[1]] = "expandable_segments:True"


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Hides all objects made so far from Python's garbage collector.

    Tapes of nano-batches are thousands of small objects a step, each step sets the collector off,
    and it would look through a whole model's again and again (a fifth of the host's time for cuts).
    Turns the collector on, where the start of a run went without it.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    try:
        yield
    finally:
        gc.unfreeze()


logger = logging.getLogger(__name__)

_TRIED = (4, 5, 8, 12, 16, 48, 200, 512)
"""Numbers of rows that are tried on CPUs. MKL has another kernel for up to three rows on AMD's
processors: a base's linear has at least 16, and an adapter has those of its job's own portion."""
_MKL = f"MKL_CBWR={ENVIRONMENT['MKL_CBWR']}"
FILE_NAME = "determinism.json"
"""In a job's folder, beside its adapter: the fingerprint under which it was trained."""


def check_deterministic(
    device: torch.device, dtype: torch.dtype, linears: Sequence[tuple[Site, nn.Module]]
) -> None:
    """Refuses kernels and linears whose bits may depend on a job's neighbours."""
    kinds = {type(module) for _, module in linears}
    foreign = sorted(
        kind.__name__
        for kind in kinds
        if any(base.__module__.startswith("transformer_engine") for base in kind.__mro__)
    )
    if foreign:
        raise NotImplementedError(
            f"run.deterministic must have linears that our kernels compute, got Transformer "
            f"Engine's {', '.join(foreign)}: take the local spec, without FP8"
        )
    if device.type == "cuda" and (choice := kernel_choice(device, dtype)).name != "cuda":
        raise NotImplementedError(
            f"run.deterministic on GPUs must have the CUDA kernels, got {choice.name} "
            f"({choice.reason}): it needs bfloat16 on a Hopper GPU"
        )
    if device.type == "cuda":
        _check_sizes(site for site, _ in linears)
    else:
        _check_rows({(site.in_size, site.out_size) for site, _ in linears}, dtype)


def _check_rows(sizes: Iterable[tuple[int, int]], dtype: torch.dtype) -> None:
    """Refuses a library whose products on CPUs depend on the number of rows, by trying it."""
    generator = torch.Generator().manual_seed(0)
    for in_size, out_size in sorted(sizes):
        x_TK = torch.randn(_TRIED[-1], in_size, generator=generator).to(dtype)
        weight_NK = torch.randn(out_size, in_size, generator=generator).to(dtype)
        for factor_KN in (weight_NK.t(), weight_NK.t().contiguous()):
            whole_TN = x_TK @ factor_KN
            parts = (x_TK[:rows].contiguous() @ factor_KN for rows in _TRIED)
            if not all(torch.equal(part, whole_TN[: len(part)]) for part in parts):
                raise NotImplementedError(
                    f"run.deterministic on CPUs must have a library whose products of {dtype} do "
                    f"not depend on the number of rows, got one that does at sums over {in_size} "
                    f"elements: take float32, and export {_MKL} before the process starts"
                )


def _check_sizes(sites: Iterable[Site]) -> None:
    """Refuses linears that a library's GEMM would compute, which looks at the number of rows."""
    for site in sites:
        columns = [shard.columns for shard in site.targets]
        why = why_not_sizes(columns, site.in_size, site.out_size, site.first_column)
        if why is not None:
            raise NotImplementedError(
                f"run.deterministic on GPUs must have linears that the CUDA kernels compute, got "
                f"{site.linear} of layer {site.layer}: {why}"
            )


def run_fingerprint(
    config: RunConfig,
    groups: ParallelGroups,
    dtype: torch.dtype,
    engine: Scorer,
    quantisation: QuantisationCard | None = None,
) -> dict[str, Any]:
    """Returns what else bits follow from: runs with equal ones give a job equal bytes.

    Args:
        engine: of the trainer, as each has layers of its own around the linears.
    """
    layout, device = groups.layout, groups.device
    kernels = kernel_choice(device, dtype).name
    found = {
        "device": platform.machine(),
        "threads": torch.get_num_threads(),
        "kernels": kernels,
        "engine": type(engine).__name__,
        "dtype": config.base_model.dtype,
        "quantization": None if quantisation is None else str(quantisation),
        "nano_batches": config.run.nano_batches,
        "layout": {
            "tp_size": layout.tp_size,
            "pp_size": layout.pp_size,
            "dp_size": layout.dp_size,
            "sequence_parallel": layout.sequence_parallel,
            "lora_sharding": layout.lora_sharding,
            **({} if groups.deployment is None else {"replicas": str(groups.deployment)}),
        },
        "versions": versions(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        del found["threads"]
        found |= {
            "device": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "extension": built_library().stem if kernels == "cuda" else None,
        }
        if attention := flash4.used_on(device):
            found["attention"] = attention
    return found


def keep_fingerprints(
    fingerprint: dict[str, Any] | None, output_dir: Path, jobs: Sequence[PreparedJob]
) -> None:
    """Writes the fingerprint into the folder of each job that trains; warns if it began otherwise.

    Only the writer calls it.

    Args:
        fingerprint: None = nothing is promised any more; files that say so are removed.
    """
    if fingerprint is not None:
        logger.info(
            "run.deterministic: a job's losses and adapter have the same bits in every run with "
            "this fingerprint. It does not cover other devices, layouts or versions. It costs %s "
            "(docs/determinism.md): %s", DETERMINISM_COST, json.dumps(fingerprint),
        )  # fmt: skip
    for job in jobs:
        if job.is_done:
            continue
        name = job.spec.name
        path = output_dir / "jobs" / name / FILE_NAME
        if fingerprint is not None:
            kept = _with_earlier({**fingerprint, "portion_tokens": job.spec.portion_tokens}, job)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(kept, indent=2), mode=BY_UMASK)
        elif path.exists():
            logger.warning(
                "job %s goes on without run.deterministic, so its bits are promised no more", name
            )
            path.unlink()


def _with_earlier(mine: dict[str, Any], job: PreparedJob) -> dict[str, Any]:
    """Adds `earlier`: the fingerprint of the steps before, where they had another one or none."""
    if job.checkpoint is None:
        return mine
    theirs: dict[str, Any] | None = None
    differing = ["no fingerprint there"]
    with suppress(OSError, ValueError, TypeError):
        theirs = dict(json.loads((job.checkpoint.path.parents[1] / FILE_NAME).read_text()))
        now, then = _flat(mine), _flat(theirs)
        differing = [
            f"{key} {now.get(key)} instead of {then.get(key)}"
            for key in {**now, **then}
            if now.get(key) != then.get(key)
        ]
    if theirs is not None and not differing:
        return mine | {key: theirs[key] for key in ("earlier",) if key in theirs}
    logger.warning(
        "job %s goes on from a run with another fingerprint, so its bits are not those of a run "
        "that was never stopped: %s", job.spec.name, ", ".join(differing),
    )  # fmt: skip
    return mine | {"earlier": theirs}


def _flat(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """The values by dotted name, without what was before."""
    found: dict[str, Any] = {}
    for key, value in fingerprint.items():
        if key != "earlier":
            is_group = isinstance(value, dict)
            found |= {f"{key}.{k}": v for k, v in value.items()} if is_group else {key: value}
    return found
