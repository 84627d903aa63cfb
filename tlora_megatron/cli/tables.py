"""Prints the tables of the commands, and checks the files that they are asked to write."""

from __future__ import annotations

import os
import shlex
import sys
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tlora_megatron.config.job import JobSpec
from tlora_megatron.config.reader import ConfigError, must
from tlora_megatron.config.schema import RunConfig
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.layout import Deployment
from tlora_megatron.model.quantisation import base_quantisation, read_published_format
from tlora_megatron.service.logs import json_line
from tlora_megatron.timeline import time_line


def check_output(option: str, path: str | Path, keep: Iterable[str | Path]) -> None:
    """Refuses a folder, a file in one that is not there, and one that is read."""
    path = Path(path)
    if path.is_dir():
        raise must(option, "name a file, not a directory", str(path))
    if not path.parent.is_dir():
        is_file = path.parent.exists()
        remedy = "" if is_file else f"mkdir -p {shlex.quote(str(path.parent))}"
        raise must(option, "be in a folder that exists", str(path), remedy)
    for file in map(Path, keep):
        if file.resolve() == path.resolve():
            raise must(option, f"leave {file}, which is read, as it is", str(path))


def refuse_duplicates(option: str, names: Iterable[str], remedy: str = "") -> None:
    """Refuses jobs that are named twice; raises `ConfigError` for the first such name."""
    for name, count in Counter(names).items():
        if count > 1:
            rest = remedy and f"; {remedy}"
            raise ConfigError(f"{option} must name job {name!r} once, got it {count} times{rest}")


_WIDTH_WITHOUT_TERMINAL = 200


def global_rank() -> int:
    """The rank that torchrun gave this process; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def open_console(*, stderr: bool = False) -> Console:
    """A console without markup, wrapping, or 80 columns in files; tables need `soft_wrap=False`."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(
        stderr=stderr,
        width=None if stream.isatty() else _WIDTH_WITHOUT_TERMINAL,
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


class JsonConsole(Console):
    """A console that prints each sentence as an object on a line; it draws no tables."""

    def __init__(self) -> None:
        super().__init__(force_terminal=False)

    def print(self, *objects: Any, **_: Any) -> None:
        self.tell(" ".join(map(str, objects)))

    def tell(self, message: str, **more: object) -> None:
        """Prints a sentence with further fields."""
        print(json_line("info", "serve", message, **more), file=self.file, flush=True)


_STATUS_STYLE = {"finished": "green", "running": "yellow", "failed": "red", "rejected": "red"}
_RESULTS = {"eval_loss": "{:.4g}", "exact_match": "{:.1%}"}
_WHEN = ("before", "after")
_BUSY_ENOUGH = 0.9
"""Predicted busy share below which another way to share rounds out is named."""


def print_run(console: Console, summary: dict[str, Any], output_dir: str) -> None:
    """Prints from `summary.json` a run's jobs before and after, its speed, and results."""
    jobs = summary.get("jobs", {})
    measured = [f"{key}_{when}" for key in _RESULTS for when in _WHEN]
    is_evaluated = any(job.get(key) is not None for job in jobs.values() for key in measured)
    results = ("eval loss", "exact match") if is_evaluated else ("last loss",)
    table = make_table("job", "status", "rank", "steps", *results, "tokens", words=("job",))
    for name, job in jobs.items():
        style = _STATUS_STYLE.get(job.get("status"), "")
        cells = _run_cells(job, is_evaluated=is_evaluated)
        table.add_row(name, *cells, style=style if style == "red" else "")
    console.print(table, soft_wrap=False)
    for name, job in jobs.items():
        if job.get("reason"):
            console.print(f"{name}: {job['reason']}", style=_STATUS_STYLE.get(job["status"], ""))
    _print_speed(console, summary.get("run", {}))
    for name, job in jobs.items():
        if job.get("adapter"):
            console.print(f"adapter of {name}: {job['adapter']}")
    report = Path(output_dir) / "report.html"
    if report.is_file():
        console.print(f"report: {report}")
    if sentence := summary.get("run", {}).get("stop_sentence"):
        console.print(sentence, style="bold")


def print_config(console: Console, config: RunConfig) -> None:
    """Prints a resolved configuration: the run in four lines, then a row per job."""
    base, parallel, run = config.base_model, config.parallel, config.run
    source = base.path or f"{base.config} with random weights, seed {base.seed}"
    console.print(f"base model: {source} ({base.dtype})")
    if (quantization := _quantization(config)) is not None:
        console.print(f"quantization: {quantization}")
    if parallel.replicas is not None:
        deployment = Deployment.from_specs(parallel.replicas)
        size = deployment.world_size
        console.print(f"replicas: {deployment} ({size} processes)", soft_wrap=True)
    else:
        sp = ", sequence parallel" if parallel.sequence_parallel else ""
        by = " by micro-batch" if parallel.cp_by_micro_batch and parallel.cp_size > 1 else ""
        ends = {"first": parallel.first_stage_layers, "last": parallel.last_stage_layers}
        given = [f"{count} layers in the {end}" for end, count in ends.items() if count is not None]
        sizes = f"tp {parallel.tp_size}, pp {parallel.pp_size}"
        sizes += f" ({', '.join(given)})" if given else ""
        sizes += f", cp {parallel.cp_size}{by}{sp}"
        sizes += ", sharded optimizer" if parallel.shard_optimizer else ""
        console.print(f"parallel: {sizes}; data parallel over the rest of the processes")
    console.print(
        f"run: {run.micro_batch_tokens} tokens a micro-batch, recompute {run.recompute}, "
        f"resume {run.resume}, seed {run.seed}"
    )
    console.print(f"output: {run.output_dir}")
    words = ("job", "targets", "lr and schedule", "data")
    table = make_table(
        "job", "rank/alpha", "targets", "batch", "end", "lr and schedule", "data", words=words
    )
    for job in config.jobs:
        table.add_row(*_config_cells(job))
    console.print(table, soft_wrap=False)
    for error in config.job_errors:
        console.print(f"left out: {error.name}: {error.message}", style="red")


def _quantization(config: RunConfig) -> str | None:
    """Says how the base is quantised; None if it is not."""
    base = config.base_model
    if base.quantization is None and read_published_format(base.config_file) is None:
        return None
    spec = read_model_spec(base.config_file)
    found = base_quantisation(base, spec)
    return None if found is None else found.describe(spec)


def print_adapter(console: Console, adapter: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    for key, value in adapter.items():
        text = ", ".join(value) if isinstance(value, list) else _text(value)
        table.add_row(key.replace("_", " "), text)
    console.print(table, soft_wrap=False)


def make_table(*columns: str, right: Collection[str] = (), words: Collection[str] = ()) -> Table:
    """An empty table; on a narrow terminal only columns of `words` give way to the others."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in right else "left"
        if column in words:
            table.add_column(column, justify=justify, min_width=10, overflow="fold")
        else:
            table.add_column(column, justify=justify, no_wrap=True)
    return table


def _run_cells(job: dict[str, Any], *, is_evaluated: bool) -> tuple[str, ...]:
    total, blocks = job.get("max_steps"), job.get("num_blocks", 1)
    if is_evaluated:
        results = [_change(job, key, form) for key, form in _RESULTS.items()]
    else:
        loss = job.get("last_loss")
        results = ["-" if loss is None else _RESULTS["eval_loss"].format(loss)]
    return (
        job.get("status", "-"),
        _text(job.get("rank")) + (f" / {blocks} blocks" if blocks > 1 else ""),
        _text(job.get("steps")) + (f"/{total}" if total is not None else ""),
        *results,
        _text(job.get("tokens")),
    )


def _change(job: dict[str, Any], key: str, form: str) -> str:
    values = tuple(job.get(f"{key}_{when}") for when in _WHEN)
    if values == (None, None):
        return "-"
    return " -> ".join("-" if value is None else form.format(value) for value in values)


def _print_speed(console: Console, run: dict[str, Any]) -> None:
    parts = []
    if run.get("tokens_per_s") is not None:
        parts.append(f"{run['tokens_per_s']:,.0f} tokens/s")
    if run.get("world_size") is not None:
        size = run["world_size"]
        parts.append("1 process" if size == 1 else f"{size} processes")
    if run.get("replicas"):
        parts.append(f"replicas {run['replicas']}")
    times = time_line(run)
    if run.get("wall_time_s") is not None and not times:
        parts.append(f"{run['wall_time_s']:,.1f} s")
    if parts:
        console.print(", ".join(parts), style="bold")
    if times:
        console.print(f"time: {times}")
    nano = run.get("nano_batches")
    if nano and nano.get("asked") != 1:
        console.print(f"nano-batches: {_nano_batches(nano)}")
    if run.get("balance"):
        console.print(f"rounds: {_balance(run['balance'])}", soft_wrap=True)
    if run.get("compute"):
        console.print(f"base: {_compute(run['compute'])}", soft_wrap=True)


def _balance(balance: dict[str, Any]) -> str:
    """Describes how rounds were shared out, and how long replicas waited by prediction."""
    depth, by = balance["depth"], balance["shared_out_by"]
    line = f"{depth} micro-batch{'es' if depth > 1 else ''} a replica, shared out by {by}"
    share = balance["predicted_busy_share"]
    if share is None:
        return line
    ran = balance.get("micro_batches_by_cp_size")
    who = "replicas" if ran is None else "their ranks"
    line += f"; {who} computed for {share:.0%} of a round and waited for the slowest one for "
    line += f"{1 - share:.0%}, by prediction"
    if ran is not None:
        counts = ", ".join(f"{count} of {size}" for size, count in ran.items())
        return f"{line}; micro-batches of the first process by context-parallel ranks: {counts}"
    if by == "tokens" and share < _BUSY_ENOUGH:
        line += " (run.round_depth: auto would share rounds out by time)"
    return line


def _compute(compute: dict[str, Any]) -> str:
    """Describes who computed the base of a run under another trainer, and why not our kernels."""
    layers, head = compute["layers"], "ours" if compute["head"] == "own" else "Megatron's"
    halves = layers.get("halves", 0)
    line = f"{layers['own']} of {sum(layers.values())} layers by our kernels"
    line += f", {halves} in one half" if halves else ""
    return "; ".join([f"{line}, head by {head}", *compute["reasons"]])


def _nano_batches(nano: dict[str, Any]) -> str:
    """Describes the number of nano-batches: the one kept and its gain, or how often each ran."""
    count, ratio = nano["count"], nano.get("time_over_one")
    if nano.get("controller"):
        gain = "" if ratio is None or count == 1 else f", {ratio:.3f} of the time of 1"
        return f"{count} ({nano['controller']}){gain}"
    ran = ", ".join(f"{times:,} in {number}" for number, times in nano.get("ran", {}).items())
    return f"{nano.get('asked')} asked for; micro-batches ran: {ran or 'none'}"


def _config_cells(job: JobSpec) -> tuple[str, ...]:
    end = f"{job.max_steps} steps" if job.max_steps is not None else f"{job.epochs} epochs"
    length = job.schedule.warmup_steps or job.schedule.warmup_ratio
    warmup = f", warm-up {length}" if length else ""
    data = [Path(path).name for path in job.data.files]
    lora = job.lora
    rslora = " rsLoRA" if lora.use_rslora else ""
    blocks = f" {lora.num_blocks} blocks" if lora.is_block_diagonal else ""
    return (
        job.name,
        f"{lora.rank}/{lora.alpha:g}{rslora}{blocks}",
        " ".join(job.lora.target_modules),
        str(job.batch_size),
        end,
        f"{job.optimizer.lr:g} {job.schedule.name}{warmup}",
        " ".join(data),
    )


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
