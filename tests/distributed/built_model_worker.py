"""Worker: a user's model with packed attention and adapters, in every layout named, against the
same model untouched, document by document, in one process.

Arguments: file of the reference, then variants such as `rope=scaled,tp=2,sp=1,recompute=full` (or
the modules of a selective one, `mlp+layernorm`), `pp=2,vp=2,first=1`, `cp=2`, with `linears=te`
(the stand-in of Transformer Engine's) or `linears=around` (Megatron's own as black boxes), `nano=2`
(nano-batches, of which none may be made with `whole=1`); `own=4` has our kernels compute what they
can, which is so many of the layers (with `halves=4`, so many of which one half) and target rows
alone, and before that all by modules; with `late=NAME` a hook on that module of the last rank comes
when all is decided; `ddp=1` is Megatron's DDP as under `--overlap-param-gather`; `share=` is a LoRA
sharding; `rope=hybrid` is HybridModel, `rope=moe` has experts, a shared one among them, and
`linears=te` of it the stand-in's grouped ones; `ep=2` and `etp=1` divide them, over replicas too,
and `rows=alltoall` is Megatron's other dispatcher. A variant `reference=plain+yarn` writes the
file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import Tensor

from tests.helpers.built_model import (
    LORAS,
    MOE_LORAS,
    PACKINGS,
    fill_bank,
    largest_error,
    nano_batch,
    run_documents_alone,
    run_packed,
    whole_gradients,
)
from tests.helpers.tiny_models import random_factors
from tests.helpers.user_models import EXPERTS_SPEC, SPEC, build_user_gpt, build_user_hybrid
from tests.helpers.variants import end_world, layout_of, options_of
from tlora_megatron.config.job import LoraSpec
from tlora_megatron.integrations.megatron import engine, staggered
from tlora_megatron.integrations.megatron.built.model import (
    discover,
    freeze,
    install_packed_attention,
    record_stages,
)
from tlora_megatron.integrations.megatron.built.own_compute import OwnCompute, use_own_compute
from tlora_megatron.integrations.megatron.layer import plain_layer
from tlora_megatron.integrations.megatron.layer.plain_layer import PlainLayer
from tlora_megatron.integrations.megatron.nano_batches import NanoBatches
from tlora_megatron.integrations.megatron.process_groups import current_groups, initialize_parallel
from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.multi_adapter import attach
from tlora_megatron.layers.sites import check_targets
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.training.formats.safetensors_file import Scratch
from tlora_megatron.training.saving.snapshot import SnapshotTaker

_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def main() -> None:
    file = Path(sys.argv[1])
    for variant in sys.argv[2:]:
        options = options_of(variant)
        if "reference" in options:
            file.parent.mkdir(exist_ok=True)
            torch.save(reference(options["reference"].split("+")), file)
        else:
            check(variant, options, torch.load(file, weights_only=True))
    end_world("all equal")


def config_options(options: dict[str, str], layout: ParallelLayout) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp_size,
        "pipeline_model_parallel_size": layout.pp_size,
        "context_parallel_size": layout.cp_size,
        "sequence_parallel": layout.sequence_parallel,
    }
    if options.get("rope") == "moe":
        fields |= {
            "expert_model_parallel_size": layout.ep_size,
            "expert_tensor_parallel_size": layout.expert_tp,
            "moe_token_dispatcher_type": options.get("rows", "allgather"),
        }
    if options.get("recompute") == "full":
        fields |= _FULL
    elif "recompute" in options:
        fields["recompute_granularity"] = "selective"
        fields["recompute_modules"] = options["recompute"].split("+")
    if "vp" in options:
        fields |= {
            "virtual_pipeline_model_parallel_size": int(options["vp"]),
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
    if "first" in options:
        fields["num_layers_in_first_pipeline_stage"] = int(options["first"])
    return fields


class Built(NamedTuple):
    chunks: list[Any]
    groups: Any
    bank: AdapterBank
    compute: OwnCompute | None


def build_frozen(
    options: dict[str, str], layout: ParallelLayout, **more: Any
) -> tuple[list[Any], ParallelGroups, Any]:
    """The chunks, their groups and the linears found in them; `more` are fields of the config."""
    initialize_parallel(layout)
    if "vp" in options:
        parallel_state.set_virtual_pipeline_model_parallel_world_size(int(options["vp"]))
    engine.install()
    kind = options.get("rope", "plain")
    fields = config_options(options, layout) | more
    if kind == "hybrid":
        chunks = build_user_hybrid(**fields)
    else:
        chunks = build_user_gpt(kind, te=options.get("linears") == "te", **fields)
    groups = current_groups(layout, with_experts=kind == "moe")
    freeze(chunks)
    linears = discover(chunks, adapted(kind)[0], groups)
    return chunks, record_stages(groups, linears), linears


def build(options: dict[str, str], layout: ParallelLayout) -> Built:
    """The chunks with adapters; with `own=` computed by our kernels."""
    chunks, groups, linears = build_frozen(options, layout)
    spec, loras = adapted(options.get("rope", "plain"))
    for lora in loras:
        check_targets(spec, groups.layout, "a job", lora.target_modules)
    if "share" in options:
        sharding: Any = options["share"]
        groups = replace(groups, layout=replace(groups.layout, lora_sharding=sharding))
        linears = [(replace(site, lora_sharding=sharding), linear) for site, linear in linears]
    compute = None
    if "own" in options:
        install_packed_attention(chunks)
        compute = use_own_compute(chunks, linears, groups, SPEC.vocab_size)
    bank = AdapterBank([s for s, _ in linears], loras, dtype=torch.float32, device=groups.device)
    attach(linears, bank, black_box=options.get("linears") == "around")
    fill_bank(bank, spec, loras)
    if "ddp" in options:
        chunks = [_wrapped(chunk) for chunk in chunks]
    return Built(chunks, groups, bank, compute)


def _wrapped(chunk: Any) -> DistributedDataParallel:
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
    )
    return DistributedDataParallel(chunk.config, settings, chunk)


def adapted(kind: str) -> tuple[ModelSpec, Sequence[LoraSpec]]:
    return (EXPERTS_SPEC, MOE_LORAS) if kind == "moe" else (SPEC, LORAS)


def reference(ropes: list[str]) -> dict[str, Any]:
    found = {}
    for rope in ropes:
        chunks, groups, bank, _ = build({"rope": rope}, ParallelLayout())
        found[rope] = (run_documents_alone(chunks), whole_gradients(bank, groups, adapted(rope)[0]))
    return found


def check(variant: str, options: dict[str, str], references: dict[str, Any]) -> None:
    chunks, groups, bank, compute = build(options, layout_of(options))
    install_packed_attention(chunks)
    num_nano = int(options.get("nano", 1))
    if num_nano > 1:
        nano_batches = NanoBatches(chunks, groups)
        nano_batches.set_count(num_nano)
        num_nano = nano_batches.count
        assert num_nano == (1 if "whole" in options else int(options["nano"])), num_nano
    kind = options.get("rope", "plain")
    spec, _ = adapted(kind)
    modules = None
    if compute is not None and "layernorm" not in options.get("recompute", ""):
        # Megatron's own recompute of it needs Transformer Engine.
        with patch.object(PlainLayer, "runs_now", lambda *_: False):
            modules = run_packed(chunks, groups), whole_gradients(bank, groups, spec)
        for adapter in bank.adapters:
            adapter.slab.zero_grad()
    calls = hook_later(chunks, options.get("late"))
    with (
        patch.object(staggered, "run_in_lane", wraps=staggered.run_in_lane) as in_lanes,
        patch.object(plain_layer, "run_layer", wraps=plain_layer.run_layer) as layers,
    ):
        losses = run_packed(chunks, groups, num_nano, compute=compute)
    if compute is not None:
        check_compute(compute, options)
    if num_nano > 1:
        check_sublayers([len(call.args[0]) for call in in_lanes.call_args_list], options, chunks)
    elif "late" not in options:
        runs = len(PACKINGS) // groups.layout.dp_size
        assert layers.call_count >= num_parts(chunks) * runs, layers.call_count
    assert bool(calls) == ("late" in options and is_last_rank()), f"{len(calls)} calls"
    expected_losses, expected = references[kind]
    if groups.is_last_stage:
        assert len(losses) == len(expected_losses)
        for got, whole in zip(losses, expected_losses, strict=True):
            used = whole != 0
            assert_close(variant, got[used], whole[used])
    check_gathered(bank, groups, spec)
    found = whole_gradients(bank, groups, spec)
    if modules is not None:
        check_against_modules(variant, (losses, found), modules)
    error, name = largest_error(found, expected)
    if dist.get_rank() == 0:
        print(f"{variant}: gradients off by {error:.1e} at most ({name})")
    assert error < 1e-5, f"{variant}: {name} is off by {error}"
    parallel_state.set_virtual_pipeline_model_parallel_world_size(None)


def is_last_rank() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def hears_of_hook(options: dict[str, str]) -> bool:
    """True on the rank that gets a hook, and on those that agree with it."""
    return "late" in options and (is_last_rank() or "tp" in options)


def hook_later(chunks: Sequence[Any], name: str | None) -> list[int]:
    """Puts a hook on a module of the last rank's last chunk; returns what its calls are added to.

    Ranks that did not agree on the way would wait for each other for ever.
    """
    calls: list[int] = []
    if name is not None and is_last_rank():
        chunks[-1].get_submodule(name).register_forward_hook(lambda *_: calls.append(1))
    return calls


def check_sublayers(counts: list[int], options: dict[str, str], chunks: Sequence[Any]) -> None:
    """All nano-batches went through all sublayers without modules, or none did."""
    batches = [nano_batch(i, int(options["nano"]), 1) for i in range(len(PACKINGS))]
    num_lanes = sum(len(batch.view.nano_views) for batch in batches)
    layers = sum(len(chunk.decoder.layers) for chunk in chunks)
    runs = 2 if options.get("recompute") == "full" else 1
    direct = options.get("own") == str(SPEC.num_layers)
    if "layers" in options.get("late", "") and hears_of_hook(options):
        direct = False
    assert sum(counts) == (2 * layers * num_lanes * runs if direct else 0), counts


def check_compute(compute: OwnCompute, options: dict[str, str]) -> None:
    """So many layers, and the head, were to be computed by our kernels, and were if there was no
    hook."""
    layers = SPEC.num_layers * (2 if options.get("rope") == "hybrid" else 1)
    own, halves = int(options["own"]), int(options.get("halves", 0))
    assert compute.layers == (own, halves, layers - own - halves), compute.line
    where = "the hook" if is_last_rank() else "on another tensor-parallel rank"
    assert len(compute.late.found) == hears_of_hook(options), compute.late.found
    assert all(where in reason for reason in compute.late.found), compute.late.found
    assert compute.has_own_head, compute.line


def num_parts(chunks: Sequence[Any]) -> int:
    """Layers of this process that run by our kernels, whole or in one half."""
    layers = (module for chunk in chunks for module in chunk.modules())
    return sum(isinstance(layer, PlainLayer) for layer in layers)


def check_against_modules(variant: str, own: Any, modules: Any) -> None:
    """Our kernels and Megatron's modules differ by rounding, on rows with a target."""
    for got, whole in zip(own[0], modules[0], strict=True):
        used = got != 0
        torch.testing.assert_close(got[used], whole[used], rtol=3e-6, atol=3e-6)
    error, name = largest_error(own[1], modules[1])
    assert error < 3e-6, f"{variant}: {name} is off by {error} from that of the modules"


def check_gathered(bank: AdapterBank, groups: ParallelGroups, spec: ModelSpec) -> None:
    """A checkpoint gathers what was loaded, however many layers each stage has."""
    taker, whole = SnapshotTaker(spec, groups), {}
    for seed, adapter in enumerate(bank.adapters):
        room = torch.empty(taker.numel(adapter.lora, 1)) if groups.is_writer else None
        if snapshot := taker.take(adapter.slab, ("master",), room):
            snapshot.wait()
            whole = {t.name: t.read(Scratch()) for t in snapshot.tensors("master")}
        expected = random_factors(spec, adapter.lora, seed=seed) if groups.is_writer else {}
        assert whole.keys() == expected.keys()
        assert all(torch.equal(whole[name], expected[name]) for name in expected)


def assert_close(variant: str, got: Tensor, expected: Tensor) -> None:
    error = float((got - expected).abs().max() / expected.abs().max())
    assert error < 1e-5, f"losses of {variant}: relative error {error}"


if __name__ == "__main__":
    main()
