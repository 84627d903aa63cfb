"""Worker: one round in 1, 2, 3, ... nano-batches; losses and all gradients must be those of one.

Arguments: the scenario's `config.json` and each variant as in `tp=2,sp=1,recompute=full,dropout=1,
dtype=bfloat16`. `foreign=1`: the last stage has a linear that cannot be cut, so that all stages
must run whole. One nano-batch after four is bit for bit what it was before them.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.helpers.isolation import DROPOUT
from tests.helpers.variants import end_world, options_of
from tlora_megatron.config.load import load_config
from tlora_megatron.config.schema import RunConfig
from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.multi_adapter import BlackBoxMixin, make_multi_adapter
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.runtime.backbone import KnownBase, open_backbone, own_replica
from tlora_megatron.runtime.choices import resolve_lora_sharding
from tlora_megatron.training.run.training_run import TrainingRun
from tlora_megatron.training.super_model import SuperModel

COUNTS = (2, 3)
TOLERANCES = {None: 2e-5, "bfloat16": 3e-2}
"""Relative to a tensor's largest magnitude, by dtype."""


class Result(NamedTuple):
    losses: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    scores: list[torch.Tensor]
    rows: int
    parts: list[int]
    """Nano-batches of each micro-batch."""


def main() -> None:
    for variant in sys.argv[2:]:
        options = options_of(variant)
        check(Path(sys.argv[1]), options)
        if dist.get_rank() == 0:
            print(f"{variant}: equal", flush=True)
    end_world()


def check(path: Path, options: dict[str, str]) -> None:
    expected, *others, again = run_rounds(path, options, (1, *COUNTS, 1))
    for count, actual in zip(COUNTS, others, strict=True):
        assert (max(actual.parts) == 1) == ("foreign" in options), actual.parts
        assert max(actual.parts) <= count + 1, actual.parts
        compare(f"{options} in {count}", expected, actual, TOLERANCES[options.get("dtype")])
    # Flash attention adds up the queries' gradients in any order.
    tolerance = TOLERANCES["bfloat16"] if "dtype" in options else 0.0
    compare(f"{options} in 1 again", expected, again, tolerance)


def compare(name: str, expected: Result, actual: Result, tolerance: float) -> None:
    assert expected.gradients.keys() == actual.gradients.keys()
    pairs = [
        *zip(["losses"] * 9, expected.losses, actual.losses, strict=False),
        *zip(["scores"] * 9, expected.scores, actual.scores, strict=False),
        *((key, expected.gradients[key], actual.gradients[key]) for key in expected.gradients),
    ]
    for key, one, other in pairs:
        used = min(len(one), len(other))  # padding may differ
        largest = one.abs().max().clamp(min=1e-8)
        error = ((one[:used] - other[:used]).abs().max() / largest).item()
        assert error <= tolerance, f"{name}: {key} is off by {error}"


def run_rounds(path: Path, options: dict[str, str], counts: tuple[int, ...]) -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        config = read_config(path, options, Path(folder) / f"{dist.is_initialized()}")
        spec = read_model_spec(config.base_model.config_file)
        with TrainingRun(config, spec, resolve_sharding=resolve_lora_sharding) as run:
            known = KnownBase(spec, None, own_replica(config))
            loop = run.start(*open_backbone(config, known, on_loaded=run.check_agreement))
            model: Any = loop.super_model
            if "foreign" in options and model.groups.is_last_stage:
                make_foreign(model.engine.model, model.bank)
            return [measure(model, count) for count in counts]


def make_foreign(model: Any, bank: AdapterBank) -> None:
    """Makes the first linear look like one of another library's; it computes as before."""
    linear = model.decoder.layers[0].mlp.linear_fc2
    site = linear.tlora_adapters.site
    make_multi_adapter(linear, BlackBoxMixin).bind_adapters(bank, site)


def measure(model: Any, count: int) -> Result:
    """Losses of a round, gradients by name, losses of the same rows when predicting."""
    draw_weights(model)
    model.engine.nano_batches.set_count(count)
    batches = model.begin_round()
    losses = in_packed_order(model, model.engine.forward_backward(batches))
    for job in model.jobs:
        # What TP ranks hold alike is summed once a step: here, each has a part of the sum.
        slab = job.adapter.slab
        partial = slab.grad[: slab.layout.replicated_numel]
        if partial.numel():
            dist.all_reduce(partial, group=model.groups.tp_group)
    gradients = {
        f"{job.name} {name}": view.clone()
        for job in model.jobs
        for name, view in job.adapter.slab.grad_views.items()
    }
    for job in model.jobs:  # the next count sees the same round
        job.loss = None
        job.adapter.slab.zero_grad()
    scores = in_packed_order(model, [loss for loss, _ in model.engine.predict(batches)])
    return Result(
        losses=losses, gradients=gradients, scores=scores, rows=batches[0].view.num_tokens,
        parts=[max(1, len(batch.view.nano_views)) for batch in batches],
    )  # fmt: skip


def in_packed_order(model: Any, values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Values of the executed rows of each micro-batch; none on stages before the last."""
    pairs = zip(model._micro_batches, values, strict=False)
    return [micro_batch.restore_order(values_T).clone() for micro_batch, values_T in pairs]


def draw_weights(model: SuperModel) -> None:
    """Fresh adapters would have gradients of `lora_a` that are all zero."""
    for slot, job in enumerate(model.jobs):
        slab = job.adapter.slab
        whole = slab.whole("master")
        generator = torch.Generator().manual_seed(slot)
        shape = whole.shape
        with torch.no_grad():
            slab.buffers()["master"].copy_(torch.randn(shape, generator=generator) * 0.1)
        model.bank.refresh(slot)


def read_config(path: Path, options: dict[str, str], output_dir: Path) -> RunConfig:
    document = json.loads(path.read_text())
    if options.get("dropout"):
        for job in document["jobs"]:
            job["lora"]["dropout"] = DROPOUT[job["name"]]
    if "jobs" in options:
        document["jobs"] = [j for j in document["jobs"] if j["name"] in options["jobs"].split("+")]
    file = path.parent / f"variant{os.environ.get('RANK', 0)}.json"  # each rank writes its own
    file.write_text(json.dumps(document))
    overrides = [
        f"base_model.dtype={options.get('dtype', 'float32')}",
        f"parallel.tp_size={options.get('tp', 1)}",
        f"parallel.pp_size={options.get('pp', 1)}",
        f"parallel.sequence_parallel={'true' if 'sp' in options else 'false'}",
        f"run.recompute={options.get('recompute', 'none')}",
    ]
    return load_config(file, overrides, str(output_dir))


if __name__ == "__main__":
    main()
