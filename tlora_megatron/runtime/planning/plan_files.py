"""Writes the files that run a plan: for `tlora train`, Megatron-LM, DeepSpeed and SLURM."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import yaml

from tlora_megatron.config.load import config_to_dict
from tlora_megatron.config.parallel_rules import SIZES, settle_deterministic, settle_replicas
from tlora_megatron.config.reader import read_spec
from tlora_megatron.config.schema import (
    BaseModelSpec,
    ParallelSpec,
    ReplicaSpec,
    RunConfig,
    shared_fields,
)
from tlora_megatron.config.sections import expand_short_form, refuse_quantization
from tlora_megatron.model.layout import LoraSharding
from tlora_megatron.model.quantisation import refuse_published
from tlora_megatron.model.spec import ModelSpec, refuse_experts
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.deploy import RankedDeployment
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.search import RankedPlan
from tlora_megatron.runtime.planning.slurm_file import SlurmOptions, slurm_script
from tlora_megatron.training.formats.megatron_flags import megatron_flags

KINDS = ("train", "megatron", "deepspeed", "slurm")
_TRAINER_FLAGS = (
    *("--exit-on-missing-checkpoint", "--save-interval", "100", "--train-iters", "100000"),
    *("--log-interval", "1", "--eval-iters", "0", "--transformer-impl", "local"),
    *("--no-persist-layer-norm", "--no-gradient-accumulation-fusion"),
    *("--no-masked-softmax-fusion", "--no-rope-fusion"),
)
"""Those of `scripts/megatron/finetune.sh` that no plan decides: the jobs end the training, and
neither Transformer Engine nor apex is needed."""
_FOREIGN = {"deepspeed": "DeepSpeed", "megatron": "Megatron-LM's flag"}
"""Trainers of others that plans are written for."""


def check_base(base: BaseModelSpec, runner: str | None) -> None:
    """Refuses an FP8 base for a kind of files or a program without one; None = whichever can."""
    where = _FOREIGN.get(runner or "")
    if where is None:
        return
    refuse_quantization(base, where)
    if base.path is not None:
        refuse_published(base.config_file, where)


def check_experts(spec: ModelSpec, runner: str | None) -> None:
    """Refuses a base with routed experts for programs that have no plans for one."""
    where = _FOREIGN.get(runner or "")
    if where is not None:
        refuse_experts(spec.experts, f"the base of a plan for {where}")


def apply_plan(config: RunConfig, plan: Plan, *, has_experts: bool = False) -> RunConfig:
    """The configuration with a plan's layout, budget, recompute and nano-batches.

    Args:
        config: may lack what `run.deterministic` fills in: it follows from the plan.
        has_experts: the base has routed experts, whose micro-batches run whole.

    Raises:
        ValueError: if the plan is for another trainer, or `run.deterministic` refuses something.
    """
    if "train" not in plan.runs_in:
        raise ValueError(
            f"a plan for tlora train must have VPP 1 and leave the number of micro-batches to the "
            f"run, got {plan.label}; --runs-in train looks for one"
        )
    is_power = plan.cp_size & (plan.cp_size - 1) == 0
    divides = plan.cp_size > 1 and is_power and plan.pp_size == 1
    own: dict[str, Any] = {
        "cp_by_micro_batch": config.parallel.cp_by_micro_batch and divides,
        "lora_sharding": plan.lora_sharding if plan.tp_size > 1 else "auto",
    }
    parallel = ParallelSpec(**shared_fields(plan, ParallelSpec) | own)
    run = replace(
        config.run,
        micro_batch_tokens=plan.micro_batch_tokens,
        recompute=plan.recompute,
        nano_batches=_nano_batches(config, plan, has_experts=has_experts),
        round_depth=plan.round_depth if plan.round_depth > 1 else config.run.round_depth,
    )
    return settle_deterministic(replace(config, parallel=parallel, run=run))


def _nano_batches(
    config: RunConfig, plan: Plan, *, has_experts: bool = False
) -> int | Literal["auto"]:
    """The value of `run.nano_batches`: auto if there is communication to hide.

    A number that the configuration asks for stays.
    """
    asked = config.run.nano_batches
    hides = plan.tp_size > 1 and plan.lora_sharding == "fold" and not has_experts
    may_choose = hides and asked == 1 and not config.run.deterministic
    return "auto" if may_choose else asked


def overrides_of(config: RunConfig, plan: Plan, *, has_experts: bool = False) -> list[str]:
    """The plan as overrides for `tlora train --set`."""
    applied, given = apply_plan(config, plan, has_experts=has_experts), config.parallel
    rare = ["first_stage_layers", "last_stage_layers", "ep_size", "expert_tp_size"]
    rare = [
        name
        for name in (*rare, "shard_optimizer")
        if getattr(given, name) != getattr(applied.parallel, name)
    ]
    by_micro_batch = ["cp_by_micro_batch"] if given.cp_by_micro_batch else []
    return [
        *([] if given.replicas is None else ["parallel.replicas=null"]),
        *as_overrides(applied, "parallel", (*by_micro_batch, *rare, *SIZES, "lora_sharding")),
        *as_overrides(applied, "run", ("micro_batch_tokens", "recompute")),
        *as_overrides(applied, "run", ("nano_batches", "round_depth")),
    ]


def as_overrides(config: RunConfig, section: str, names: Sequence[str]) -> list[str]:
    """The values of a section as `SECTION.NAME=VALUE`."""
    values = {name: getattr(getattr(config, section), name) for name in names}
    return [
        f"{section}.{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in values.items()
    ]


def write_plan(
    kind: str,
    path: Path,
    *,
    config: RunConfig,
    spec: ModelSpec,
    ranked: RankedPlan,
    hardware: HardwareProfile,
    asked_sharding: LoraSharding | None = None,
    slurm: SlurmOptions | None = None,
) -> list[str]:
    """Writes what `kind` needs and returns the command lines that start it.

    Args:
        asked_sharding: what the plan's was to be; None = it was free.
        slurm: what the user says of a cluster; None = nothing.
    """
    plan, nodes, local = ranked.plan, *_nodes(ranked.plan.num_gpus, hardware)
    check_base(config.base_model, kind)
    check_experts(spec, kind)
    applied = partial(apply_plan, has_experts=spec.experts is not None)
    if kind == "train":
        write_config(path, applied(config, plan))
        return [start_command(path, plan.num_gpus, hardware)]
    if kind == "deepspeed":
        path.write_text(json.dumps(_deepspeed(config, plan), indent=2) + "\n", encoding="utf-8")
        script = ["-m", "tlora_megatron.deepspeed", "--deepspeed_config", str(path)]
        return [_torchrun(nodes, local, script)]
    jobs = jobs_file(path)
    if kind == "megatron":
        jobs.write_text(_yaml(_jobs_only(config, plan, asked_sharding)), encoding="utf-8")
        path.write_text(_megatron(config, spec, ranked, jobs, nodes, local), encoding="utf-8")
        variables = "MEGATRON_LM=DIR CHECKPOINT=DIR"
        return [f"{variables} bash {shlex.quote(str(path))}"]
    write_config(jobs, applied(config, plan))
    text = slurm_script(
        jobs,
        nodes,
        local,
        whole_nodes=local == hardware.gpus_per_node,
        note=f"{plan.label}: {ranked.cost.tokens_per_s:,.0f} tokens/s predicted.",
        options=slurm or SlurmOptions(),
    )
    path.write_text(text, encoding="utf-8")
    return [f"sbatch {shlex.quote(str(path))}"]


def write_config(path: Path, config: RunConfig) -> None:
    """Writes a configuration that `tlora train` reads."""
    path.write_text(_yaml(config_to_dict(config)), encoding="utf-8")


def start_command(path: Path, num_gpus: int, hardware: HardwareProfile) -> str:
    """Returns the line that starts `tlora train` with a configuration on every node.

    Raises:
        ValueError: if the GPUs do not fill whole nodes.
    """
    return _torchrun(*_nodes(num_gpus, hardware), ["-m", "tlora_megatron.cli", "train", str(path)])


def jobs_file(script: Path) -> Path:
    """The absolute path of the jobs file that a written script reads."""
    return script.with_suffix(".jobs.yaml").resolve()


def _nodes(num_gpus: int, hardware: HardwareProfile) -> tuple[int, int]:
    """The number of nodes, and of GPUs on each."""
    local = min(num_gpus, hardware.host_gpus)
    if num_gpus % local:
        raise ValueError(f"GPUs must fill nodes of {local}, got {num_gpus}")
    return num_gpus // local, local


def _yaml(document: dict[str, Any]) -> str:
    return yaml.safe_dump(document, sort_keys=False, width=100)


def _jobs_only(config: RunConfig, plan: Plan, asked: LoraSharding | None) -> dict[str, Any]:
    document = config_to_dict(config)
    nano = _nano_batches(config, plan)
    run: dict[str, Any] = {"nano_batches": nano} if nano != 1 else {}
    if config.run.deterministic:
        run["deterministic"] = True
    # Where nobody asked for fold the run may choose: around Transformer Engine's linears there is
    # rank_exchange only.
    sharding = plan.lora_sharding
    is_given = plan.tp_size > 1 and (sharding != "fold" or asked == "fold")
    shared = {"parallel": {"lora_sharding": sharding}} if is_given else {}
    section = {"run": run} if run else {}
    return {"base_model": document["base_model"], **shared, **section, "jobs": document["jobs"]}


_ENDPOINT = "${RDZV_ENDPOINT:?must be HOST:PORT of the first node}"


def _torchrun(nodes: int, local: int, words: Sequence[str]) -> str:
    where = ["--standalone"] if nodes == 1 else ["--nnodes", str(nodes), "--rdzv-backend", "c10d"]
    rest = shlex.join(["--nproc-per-node", str(local), *words])
    end = "" if nodes == 1 else f'--rdzv-endpoint "{_ENDPOINT}" '
    return f"{shlex.join(['torchrun', *where])} {end}{rest}"


def _deepspeed(config: RunConfig, plan: Plan) -> dict[str, Any]:
    """DeepSpeed's JSON: data parallelism only, with the whole base model on every GPU.

    Raises:
        ValueError: for a layout that DeepSpeed's engine does not have here.
    """
    for name, size in (("pp_size", plan.pp_size), ("cp_size", plan.cp_size)):
        if size > 1:
            raise ValueError(f"{name} must be 1 for a DeepSpeed plan, got {size}")
    if plan.recompute == "selective":
        raise ValueError("recompute must be none or full for a DeepSpeed plan, got selective")
    section = config_to_dict(apply_plan(config, plan))
    section["run"]["nano_batches"] = 1  # DeepSpeed's engine has none
    del section["parallel"]
    document: dict[str, Any] = {
        "bf16": {"enabled": config.base_model.dtype == "bfloat16"},
        "zero_optimization": {"stage": 1 if plan.dp_size > 1 else 0},
        "tlora": section,
    }
    if plan.tp_size > 1:
        document["tensor_parallel"] = {"autotp_size": plan.tp_size}
    return document


_IN_SLURM = """if [[ -n ${SLURM_JOB_NODELIST:-} ]]; then
  first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  : "${RDZV_ENDPOINT:=$first:$((20000 + SLURM_JOB_ID % 10000))}"
fi
"""


def _megatron(
    config: RunConfig, spec: ModelSpec, ranked: RankedPlan, jobs: Path, nodes: int, local: int
) -> str:
    flags = shlex.join(_layout_flags(config, spec, ranked))
    launch = _torchrun(nodes, local, ["-m", "tlora_megatron.launch"])
    model, base = shlex.join(megatron_flags(spec)), shlex.quote(config.base_model.name)
    return (
        "#!/usr/bin/env bash\n"
        f"# {ranked.plan.label}: {ranked.cost.tokens_per_s:,.0f} tokens/s predicted, "
        f"{ranked.cost.load.filled_share:.0%} of the rows filled.\n"
        "set -euo pipefail\n"
        ': "${MEGATRON_LM:?must name a Megatron-LM checkout}"\n'
        ': "${CHECKPOINT:?must name what tlora convert made of the base}"\n'
        "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"
        f"{_IN_SLURM if nodes > 1 else ''}"
        f'{launch} "$MEGATRON_LM/pretrain_gpt.py" \\\n  {model} \\\n  {flags} \\\n'
        f"  {shlex.join(_TRAINER_FLAGS)} \\\n"
        f"  --tokenizer-type HuggingFaceTokenizer --tokenizer-model {base} \\\n"
        f'  --load "$CHECKPOINT" --save {shlex.quote(config.run.output_dir)} \\\n'
        f'  --tlora-config {shlex.quote(str(jobs))} "$@"\n'
    )


def _layout_flags(config: RunConfig, spec: ModelSpec, ranked: RankedPlan) -> list[str]:
    plan = ranked.plan
    if plan.num_micro_batches is None:
        raise ValueError(
            f"a plan for Megatron-LM must have a number of micro-batches, got {plan.label}; "
            "--runs-in megatron looks for one"
        )
    words: dict[str, object] = {
        "tensor-model-parallel-size": plan.tp_size,
        "pipeline-model-parallel-size": plan.pp_size,
        "context-parallel-size": plan.cp_size,
        "micro-batch-size": 1,
        "global-batch-size": plan.dp_size * plan.num_micro_batches,
        "seq-length": plan.micro_batch_tokens,
        "seed": max(1, config.run.seed),
    }
    if plan.micro_batch_tokens > spec.max_positions:
        # Megatron counts a packed micro-batch as one sequence.
        words["max-position-embeddings"] = plan.micro_batch_tokens
    if plan.vpp_size > 1:
        layers = spec.num_layers // (plan.pp_size * plan.vpp_size)
        words["num-layers-per-virtual-pipeline-stage"] = layers
    words |= {
        f"decoder-{end}-pipeline-num-layers": layers
        for end, layers in (("first", plan.first_stage_layers), ("last", plan.last_stage_layers))
        if layers is not None
    }
    if plan.recompute == "full":
        words |= {
            "recompute-granularity": "full",
            "recompute-method": "uniform",
            "recompute-num-layers": 1,
        }
    elif plan.recompute == "selective":
        words |= {"recompute-granularity": "selective", "recompute-modules": "mlp"}
    flags = [text for name, value in words.items() for text in (f"--{name}", str(value))]
    flags += ["--sequence-parallel"] if plan.sequence_parallel else []
    flags += ["--use-distributed-optimizer"] if plan.shard_optimizer else []
    return flags + (["--bf16"] if config.base_model.dtype == "bfloat16" else [])


def deployment_overrides(config: RunConfig, best: RankedDeployment) -> list[str]:
    """The deployment as overrides for `tlora train --set`."""
    applied, given, plain = _deployed(config, best), config.parallel, ParallelSpec()
    # Replicas have even stages.
    stages = ("first_stage_layers", "last_stage_layers")
    even = [f"parallel.{key}=null" for key in stages if getattr(given, key) is not None]
    if best.has_recompute_by_rows:
        return [
            *([] if given.replicas is None else ["parallel.replicas=null"]),
            *even,
            *as_overrides(applied, "parallel", SIZES),
            *as_overrides(applied, "run", ("micro_batch_tokens", "recompute", "round_depth")),
        ]
    sizes = [name for name in SIZES if getattr(given, name) != getattr(plain, name)]
    return [
        *even,
        *as_overrides(replace(config, parallel=plain), "parallel", sizes),
        f"parallel.replicas={best.deployment}",
        *as_overrides(applied, "run", ("nano_batches", "round_depth")),
    ]


def write_deployment(
    path: Path, config: RunConfig, best: RankedDeployment, hardware: HardwareProfile
) -> str:
    """Writes a configuration with the deployment; returns the line that starts it."""
    write_config(path, _deployed(config, best))
    return start_command(path, best.deployment.world_size, hardware)


def _deployed(config: RunConfig, best: RankedDeployment) -> RunConfig:
    # Where the configuration leaves the default depth, auto is what was planned.
    depth = config.run.round_depth
    run = replace(config.run, round_depth="auto" if depth == 1 else depth)
    plain = ParallelSpec(lora_sharding=config.parallel.lora_sharding)
    if best.has_recompute_by_rows:  # which `parallel.replicas` does not name: all are alike
        layout = best.deployment.replicas[0]
        assert layout.micro_batch_tokens is not None, "the planner names every budget"
        sizes: dict[str, Any] = {name: getattr(layout, name) for name in SIZES}
        run = replace(run, micro_batch_tokens=layout.micro_batch_tokens, recompute="auto")
        return replace(config, parallel=replace(plain, **sizes), run=run)
    if not best.deployment.tp_is_alike:
        run = replace(run, nano_batches=1)
    parts = expand_short_form(str(best.deployment), "parallel.replicas")
    specs = tuple(read_spec(ReplicaSpec, part, "parallel.replicas") for part in parts)
    parallel, run = settle_replicas(replace(plain, replicas=specs), run)
    return replace(config, parallel=parallel, run=run)
