"""`tlora plan`: ranks the ways to run a configuration's jobs on some GPUs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from tlora_megatron.cli.plan_ranking import (
    PlanInputs,
    print_explanation,
    print_missing,
    print_recompute,
    print_result,
    print_teams,
    result_document,
)
from tlora_megatron.cli.planner_options import (
    DEFAULT_HARDWARE,
    add_hardware_arguments,
    add_slurm_arguments,
    add_space_arguments,
    asked_runner,
    naming_flags,
    search_space,
)
from tlora_megatron.cli.tables import check_output, make_table, open_console
from tlora_megatron.cli.train import add_config_arguments
from tlora_megatron.config.load import load_config
from tlora_megatron.config.parallel_rules import DETERMINISM_COST
from tlora_megatron.config.reader import must
from tlora_megatron.planner.advice import Advice, advise
from tlora_megatron.planner.candidate import is_ours_alone
from tlora_megatron.planner.deploy import MARGIN, DeploymentResult, RankedDeployment, deploy
from tlora_megatron.planner.layouts import Question
from tlora_megatron.planner.search import RankedPlan, SearchResult, search
from tlora_megatron.runtime.planning.plan_files import (
    KINDS,
    check_base,
    check_experts,
    jobs_file,
    write_deployment,
    write_plan,
)
from tlora_megatron.runtime.planning.plan_inputs import (
    base_shape,
    check_deployable,
    other_profiles,
    parse_lengths,
    plan_jobs,
    run_hardware,
)
from tlora_megatron.runtime.planning.slurm_file import SlurmOptions

_EPILOG = """\
examples:
  tlora plan run.yaml --gpus 8 --hardware h200
  tlora plan run.yaml --gpus 4 --lengths 256:3,1024:1 --explain
  tlora plan run.yaml --gpus 64 --hardware h100-infiniband --write slurm plan.sbatch \\
      --sbatch account=lora --sbatch time=8:00:00
  tlora plan run.yaml --gpus 2 --tp 2 --recompute none --json
  tlora plan run.yaml --gpus 16 --hardware a100-80g --replicas any

exit code: 0 a plan fits, 1 no plan fits, 2 a mistake in the input
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="rank the ways to run a configuration's jobs on some GPUs",
        description="Ranks the ways to run a configuration's jobs on some GPUs.",
        epilog=_EPILOG,
    )
    parser.add_argument("config", metavar="CONFIG", help="configuration file, YAML or JSON")
    add_config_arguments(parser)
    parser.add_argument(
        "--gpus",
        type=int,
        required=True,
        metavar="N",
        help="GPUs there are; plans may use fewer",
    )
    add_hardware_arguments(parser)
    add_space_arguments(parser)
    parser.add_argument(
        "--replicas",
        choices=("alike", "any"),
        default="alike",
        help="any: replicas may differ in layout, budget and recompute (default: alike)",
    )
    parser.add_argument(
        "--top", type=int, default=10, metavar="N", help="number of plans to show (default: 10)"
    )
    parser.add_argument(
        "--explain",
        type=int,
        nargs="?",
        const=1,
        metavar="RANK",
        help="show where the time and memory of a plan go, by its rank (default: the first)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--write",
        nargs=2,
        metavar=("KIND", "PATH"),
        help="write the files that run the plan of --explain's rank, or the first; "
        f"KIND: {', '.join(KINDS)}",
    )
    add_slurm_arguments(parser)
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Searches, prints the plans, and writes the chosen one if asked to."""
    _check_arguments(args)
    slurm = SlurmOptions(
        sbatch=tuple(args.sbatch), setup=tuple(args.setup), environment=args.environment
    )
    inputs = _load(args)
    if args.replicas == "any":
        return _show_deployments(args, inputs)
    with naming_flags(args):
        result = search(*inputs.asked, may_idle=True)
    chosen = _chosen(args, result)
    _show(args, inputs, result)
    if chosen is None:
        return 1
    if args.explain is not None and not args.json:
        print_explanation(open_console(), chosen, inputs)
    if args.write is not None:
        _write(args, inputs, chosen, slurm)
    return 0


def _show_deployments(args: argparse.Namespace, inputs: PlanInputs) -> int:
    """Finds replicas of any kinds, prints them, and writes a configuration if asked to."""
    check_deployable(inputs.config)
    with naming_flags(args):
        result = deploy(*inputs.asked)
    advice = None if result.best is not None else _advice(inputs)
    if args.json:
        document = deployments_document(result, args.gpus, args.top) | advice_document(advice)
        print(json.dumps(document, indent=2))
    else:
        print_deployments(open_console(), result, inputs)
        if advice is not None:
            print_advice(open_console(), advice, " with replicas alike")
    if result.best is None:
        return 1
    if args.write is not None:
        line = write_deployment(Path(args.write[1]), inputs.config, result.best, inputs.hardware)
        _tell_written(args, inputs, [line])
    return 0


def print_deployments(console: Console, result: DeploymentResult, inputs: PlanInputs) -> None:
    """Prints the deployments with their distance to the bound, and which one is to be taken."""
    hardware, num_gpus = inputs.hardware, inputs.num_gpus
    console.print(
        f"{result.tokens:,.0f} tokens in all batches, on {num_gpus} x {hardware.gpu} (profile "
        f"{hardware.name}: {hardware.source}, {hardware.date})"
    )
    if not result.ranked:
        console.print("no replica holds the longest sequence", style="red")
        return
    numbers = ("tokens/s", "GPU-s", "undivided", "over bound", "busy", "depth")
    table = make_table("", "replicas", *numbers, right=("", *numbers), words=("replicas",))
    for place, entry in enumerate(result.ranked[: inputs.top], start=1):
        sampled = entry.sampled
        table.add_row(
            str(place),
            entry.label,
            f"{result.tokens / entry.time_s:,.0f}",
            f"{entry.time_s * num_gpus:,.2f}",
            f"{entry.fluid_s * num_gpus:,.2f}",
            f"{entry.gap:.1%}",
            "-" if sampled is None else f"{sampled.busy_share:.1%}",
            "-" if sampled is None else str(sampled.depth),
        )
    console.print(table)
    console.print(
        f"bound of all deployments: {result.bound_s * num_gpus:,.2f} GPU-s; {result.num_kinds} "
        f"kinds of replicas fit, {result.num_undominated} are worth mixing"
    )
    first = result.ranked[0]
    kind = "alike" if first.is_alike else "unlike"
    console.print(f"to take: {first.label} ({kind}: unlike ones must win by {MARGIN:.0%})")


def deployments_document(result: DeploymentResult, num_gpus: int, top: int) -> dict[str, Any]:
    """The document that `--json` prints."""
    return {
        "num_gpus": num_gpus,
        "tokens": result.tokens,
        "bound_gpu_s": result.bound_s * num_gpus if result.ranked else None,
        "kinds_that_fit": result.num_kinds,
        "kinds_worth_mixing": result.num_undominated,
        "deployments": [_document(result, entry, num_gpus) for entry in result.ranked[:top]],
    }


def _document(result: DeploymentResult, entry: RankedDeployment, num_gpus: int) -> dict[str, Any]:
    pairs = zip(entry.replicas.kinds, entry.replicas.counts, strict=True)
    return {
        "replicas": entry.label,
        "alike": entry.is_alike,
        "tokens_per_s": result.tokens / entry.time_s,
        "gpu_s": entry.time_s * num_gpus,
        "undivided_gpu_s": entry.fluid_s * num_gpus,
        "over_bound": entry.gap,
        "sampled": None if entry.sampled is None else entry.sampled._asdict(),
        "kinds": [
            {"count": count, **asdict(kind.layout), "rate": asdict(kind.curve.rate)}
            for kind, count in pairs
        ],
    }


def _check_arguments(args: argparse.Namespace) -> None:
    if args.top < 1:
        raise must("--top", "be at least 1", args.top)
    if args.explain is not None and args.explain < 1:
        raise must("--explain", "be at least 1", args.explain)
    if args.replicas == "any" and args.explain is not None:
        raise must("--explain", "be absent with --replicas any", args.explain)
    for name in ("sbatch", "setup", "environment"):
        given = getattr(args, name)
        if given and (args.write is None or args.write[0] != "slurm"):
            raise must(f"--{name}", "come with --write slurm", given)
    if (args.vpp_size or 1) > 1 and asked_runner(args) in ("train", "deepspeed"):
        remedy = "virtual stages are Megatron-LM's: --runs-in or --write megatron"
        raise must("--vpp", f"be 1 for {asked_runner(args)}", args.vpp_size, remedy)
    if args.replicas == "any" and args.runs_in not in (None, "train", "any"):
        raise must("--runs-in", "be train with --replicas any", args.runs_in)
    if args.write is None:
        return
    kind, path = args.write
    if kind not in KINDS:
        raise must("--write", f"name one of {', '.join(KINDS)}", kind)
    if args.replicas == "any" and kind != "train":
        raise must("--write", "be train with --replicas any", kind)
    # Its rounds are of another kind; `tlora train` and DeepSpeed share theirs.
    if args.runs_in not in (None, "any") and (args.runs_in == "megatron") != (kind == "megatron"):
        raise must("--runs-in", f"be absent or any with --write {kind}", args.runs_in)
    # The user wrote the configuration by hand, comments and all.
    check_output("--write", path, [args.config])
    check_output("--write", jobs_file(Path(path)), [args.config])


def _load(args: argparse.Namespace) -> PlanInputs:
    config = load_config(
        args.config, args.overrides, args.output_dir, settle=False, files_may_be_missing=True
    )
    check_base(config.base_model, asked_runner(args))
    hardware = run_hardware(args.hardware or DEFAULT_HARDWARE, config)
    spec = base_shape(config.base_model)
    check_experts(spec, asked_runner(args))
    for option, given in (("--ep", args.ep_size), ("--expert-tp", args.expert_tp_size)):
        if spec.experts is None and given is not None:
            raise must(option, "be absent for a base without routed experts", given)
    lengths = None if args.lengths is None else parse_lengths(args.lengths)
    jobs = plan_jobs(config, spec, lengths)
    with naming_flags(args):
        return PlanInputs(
            config=config,
            spec=spec,
            jobs=jobs,
            hardware=hardware,
            num_gpus=args.gpus,
            top=args.top,
            space=search_space(args, config),
        )


def _advice(inputs: PlanInputs) -> Advice:
    """Looks for changes that would make a plan fit, where none does."""
    return advise(Question(*inputs.asked), other_profiles(inputs.hardware))


def print_advice(console: Console, advice: Advice, replicas: str = "") -> None:
    """Prints a line for each change that helps the replicas, or why none does."""
    for remedy in advice.remedies:
        console.print(f"would fit{replicas}: {remedy.text}")
    if advice.why_none:
        console.print(advice.why_none)


def advice_document(advice: Advice | None) -> dict[str, Any]:
    """The keys that `--json` adds; for None a plan fits, and nobody asked."""
    if advice is None:
        return {"would_fit": [], "why_nothing_fits": None}
    return {
        "would_fit": [remedy.text for remedy in advice.remedies],
        "why_nothing_fits": advice.why_none or None,
    }


def _show(args: argparse.Namespace, inputs: PlanInputs, result: SearchResult) -> None:
    advice = None if result.plans else _advice(inputs)
    if args.json:
        print(json.dumps(result_document(result, inputs) | advice_document(advice), indent=2))
    else:
        print_result(open_console(), result, inputs)
        if advice is not None:
            print_advice(open_console(), advice)
        is_open = args.runs_in is None and args.write is None and not is_ours_alone(inputs.spec)
        if is_open and result.best is not None and "train" in result.best.plan.runs_in:
            told = "under Megatron-LM's trainer times are others: --runs-in megatron or any"
            open_console().print(told)
        has_portions = any(job.portion_tokens for job in inputs.config.jobs)
        if inputs.spec.experts is None and not has_portions:
            print_teams(open_console(), result, inputs)
        print_recompute(open_console(), result, inputs)
    if inputs.config.run.deterministic and result.plans:
        notes = open_console(stderr=args.json)
        notes.print(
            f"run.deterministic: plans keep a job's bits. Its cost is in neither their times "
            f"nor their memory: {DETERMINISM_COST} (docs/determinism.md)"
        )


def _chosen(args: argparse.Namespace, result: SearchResult) -> RankedPlan | None:
    """The plan of `--explain`'s rank, or the first; None if no plan fits."""
    if not result.plans:
        return None
    rank = 1 if args.explain is None else args.explain
    if rank > len(result.plans):
        raise must("--explain", f"be in [1, {len(result.plans)}]", rank)
    return result.plans[rank - 1]


def _write(
    args: argparse.Namespace,
    inputs: PlanInputs,
    chosen: RankedPlan,
    slurm: SlurmOptions,
) -> None:
    """Writes the files of `--write` and prints how to start them."""
    kind, path = args.write
    try:
        lines = write_plan(
            kind,
            Path(path),
            config=inputs.config,
            spec=inputs.spec,
            ranked=chosen,
            hardware=inputs.hardware,
            asked_sharding=inputs.space.lora_sharding,
            slurm=slurm,
        )
    except OSError as error:
        raise must("--write", "name a file that can be written", path, str(error)) from None
    _tell_written(args, inputs, lines)


def _tell_written(args: argparse.Namespace, inputs: PlanInputs, lines: Sequence[str]) -> None:
    notes = open_console(stderr=args.json)
    notes.print(f"written: {args.write[1]}")
    print_missing(notes, inputs.config)
    for line in lines:
        notes.print(f"start it: {line}")
