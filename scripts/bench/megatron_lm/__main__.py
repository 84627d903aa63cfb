"""Unmodified `pretrain_gpt.py` with `--tlora-config` in many layouts, beside Hugging Face PEFT.

    python -m scripts.bench.megatron_lm --prepare DIR
    python -m scripts.bench.megatron_lm --prepared DIR --megatron-lm CHECKOUT --csv FILE

`--prepare` writes a tiny base, its Megatron checkpoint, four uneven jobs, and the losses of each
trained alone by transformers + PEFT in fp32 on the CPU. DIR may be copied to a GPU machine. The
second command runs the script once a layout, side by side where there are GPUs for it, and compares
every loss. Without CUDA, layouts of Megatron's own linears run over gloo. Exit status 1: a run
failed, or a loss is off by more than `cases.LIMITS`.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

import torch

from scripts.bench.harness.arguments import add_checkout, bench_parser, check_checkout
from scripts.bench.harness.processes import Life, live
from scripts.bench.harness.rows import gpu_name, versions
from scripts.bench.megatron_lm.cases import (
    LAYOUTS,
    Layout,
    Oracle,
    Place,
    Row,
    compare,
    verdicts,
    write,
    write_nano_jobs,
)
from tests.helpers.megatron_lm import (
    convert,
    make_launch_scenario,
    oracle,
    tokenizer_alone,
    write_jobs,
)


class Devices:
    """GPUs (processes' worth of CPU without CUDA) that runs take and give back.

    Args:
        share: runs that may have a GPU at the same time.
    """

    def __init__(self, count: int, share: int = 1) -> None:
        self._places = [share] * count
        self._changed = threading.Condition()

    @contextmanager
    def take(self, count: int) -> Iterator[tuple[int, ...]]:
        with self._changed:
            self._changed.wait_for(lambda: sum(map(bool, self._places)) >= count)
            emptiest = sorted(range(len(self._places)), key=lambda i: -self._places[i])
            taken = tuple(sorted(emptiest[:count]))
            self._add(taken, -1)
        try:
            yield taken
        finally:
            with self._changed:
                self._add(taken, 1)
                self._changed.notify_all()

    def _add(self, devices: tuple[int, ...], places: int) -> None:
        for device in devices:
            self._places[device] += places


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.prepare is not None:
        prepare(options.prepare)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        scenario = options.prepared or prepare(Path(scratch) / "scenario")
        place = Place(
            checkout=options.megatron_lm.resolve(),
            scenario=scenario.resolve(),
            out=options.out or Path(scratch) / "out",
            on_cpu=not torch.cuda.is_available(),
        )
        return measure(options, place)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; ends with a usage error where it cannot be run."""
    parser = bench_parser(__doc__)
    add_checkout(parser)
    parser.add_argument("--prepare", type=Path, help="write the scenario to this folder and end")
    parser.add_argument("--prepared", type=Path, help="its folder; made anew where not given")
    parser.add_argument("--layouts", help="comma-separated; all that fit where not given")
    parser.add_argument("--devices", type=int, help="GPUs to use; 2 processes without CUDA")
    parser.add_argument("--share", type=int, default=1, help="runs that a GPU has at a time")
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds a run may take")
    parser.add_argument("--out", type=Path, help="keep logs and adapters in this folder")
    options = parser.parse_args(arguments)
    if options.prepare is None:
        check_checkout(parser, options)
        unknown = set(_names(options)) - {layout.name for layout in LAYOUTS}
        if unknown:
            parser.error(f"--layouts must be among {', '.join(x.name for x in LAYOUTS)}")
    return options


def prepare(root: Path) -> Path:
    """Writes the scenario, its converted base and `oracle.json`; returns the folder."""
    root.mkdir(parents=True, exist_ok=True)
    make_launch_scenario(root)
    convert(root / "base", root / "megatron")
    document = json.loads((root / "config.json").read_text())
    write_jobs(root / "jobs_any_base.json", document, base_model={"path": None})
    tokenizer_alone(root)
    alone = {name: result.losses for name, result in oracle(root).items()}
    (root / "oracle.json").write_text(json.dumps(alone))
    return root


def measure(options: argparse.Namespace, place: Place) -> int:
    """Runs the layouts, prints and writes what they got; returns the exit status."""
    num_devices = options.devices or (2 if place.on_cpu else torch.cuda.device_count())
    layouts = chosen(_names(options), num_devices, on_cpu=place.on_cpu)
    write_nano_jobs(place.scenario, layouts)
    expected: Oracle = json.loads((place.scenario / "oracle.json").read_text())
    common = _versions(options, place)
    rows: list[Row] = []
    failures: list[str] = []
    print(" | ".join(common.values()))
    devices = Devices(num_devices, options.share)
    for layout, life in side_by_side(layouts, place, devices, options.timeout):
        print(f"{layout.name}: {life.seconds:.0f} s")
        sentence = failure(layout, life)
        if sentence is not None:
            failures.append(sentence)
            print(f"  {sentence}\n{_end_of(life.output)}")
        elif not layout.refusal:
            found = compare(layout, place.out / layout.folder, expected, common)
            rows += found
            failures += verdicts(layout, found, expected)
            for row in found:
                error = row["max_rel_loss_error"]
                print(f"  {row['job']:12} {row['steps']:3} steps   {error:.1e}")
        if options.csv:
            write(rows, options.csv)  # at once: a later layout may hang
    print("\n".join(failures) or f"all {len(layouts)} layouts passed")
    return 1 if failures or not layouts else 0


def chosen(names: Sequence[str], num_devices: int, *, on_cpu: bool) -> list[Layout]:
    """The layouts of those names (all where none is given) that this machine can run."""
    layouts = []
    for layout in LAYOUTS:
        if names and layout.name not in names:
            continue
        if layout.world > num_devices:
            print(f"{layout.name}: left out, needs {layout.world} devices, got {num_devices}")
        elif on_cpu and layout.transformer_engine:
            print(f"{layout.name}: left out, Transformer Engine needs CUDA")
        else:
            layouts.append(layout)
    return layouts


def side_by_side(
    layouts: Sequence[Layout], place: Place, devices: Devices, timeout_s: float
) -> Iterator[tuple[Layout, Life]]:
    """Runs all layouts, as many at a time as there are devices for; in the order they end."""
    place.out.mkdir(parents=True, exist_ok=True)

    def run(layout: Layout) -> tuple[Layout, Life]:
        with devices.take(layout.world) as taken:
            log = place.out / f"{layout.folder}.log"
            return layout, live(place.command(layout), place.environment(taken), log, timeout_s)

    with ThreadPoolExecutor(max_workers=max(1, len(layouts))) as threads:
        for done in as_completed([threads.submit(run, layout) for layout in layouts]):
            yield done.result()


def failure(layout: Layout, life: Life) -> str | None:
    """A complaint about how a run ended; None if it ended as it should."""
    name, refusal = layout.name, layout.refusal
    if life.code is None:
        return f"{name}: took over {life.seconds:.0f} s"
    if refusal and life.code == 0:
        return f"{name}: must fail over {refusal}, got exit status 0"
    if refusal and refusal not in life.output:
        return f"{name}: must fail over {refusal}, failed over something else"
    if life.code and not refusal:
        return f"{name}: exit status {life.code}"
    if layout.says not in life.output:
        return f"{name}: must say {layout.says!r}"
    return None


def _names(options: argparse.Namespace) -> list[str]:
    return [name.strip() for name in (options.layouts or "").split(",") if name.strip()]


def _versions(options: argparse.Namespace, place: Place) -> dict[str, str]:
    package = runpy.run_path(str(place.checkout / "megatron" / "core" / "package_info.py"))
    return {
        "gpu": gpu_name(),
        "versions": versions(),
        "commit": options.commit,
        "megatron_lm": package["__version__"],
    }


def _end_of(output: str) -> str:
    lines = output.splitlines()
    told = [x for x in lines if "Error" in x or "error:" in x or " must " in x]
    # torchrun's own follows, once a rank.
    telling = [x for x in told if "ChildFailedError" not in x][-8:]
    return "\n".join(f"    {line[:300]}" for line in [*telling, "...", *lines[-12:]])


if __name__ == "__main__":
    sys.exit(main())
