"""Times training steps over bases with routed experts against the same base without any adapter.

    python -m scripts.bench.experts --cases experts --kernels k.txt
    python -m scripts.bench.experts --model configs/models/mixtral-8x7b.json --layers 4

Cases: `attention` has eight jobs of ranks 4 to 64 on attention alone, `experts` the same on all
linears, each expert with factors of its own; `experts_eighth` has an eighth of the rank there, and
in `experts_outer` the experts share the outer factors; `1x16` is one job of rank 16, and so on.

Modes: `floor` is forward and input gradients of the frozen base, whose experts are one
`torch.nn.functional.grouped_mm` each; `adapters` the same with all adapters and their gradients;
`step` is whole rounds of `--micro-batches` a batch. `hf_peft` (with `--peft`) is one job of rank 16
on all linears and experts by transformers and PEFT.

The head is cut to `--vocab-size`: the whole one takes as long as three layers. Weights and tokens
are random, so routing is nearly uniform; `--routing skewed` draws routers that prefer some experts.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from scripts.bench.experts.mixes import CASES, make_mix
from scripts.bench.harness.arguments import bench_parser
from scripts.bench.harness.clock import Timing, is_main, release, say
from scripts.bench.harness.rows import append_rows, gpu_name
from scripts.bench.harness.training_jobs import job_on
from scripts.bench.step.jobs import ATTENTION
from scripts.bench.step.peft import build_peft, run_peft
from scripts.bench.step.project import Effort, Project, run_together
from tlora_megatron.config.job import JobSpec
from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.profiling.synthetic_run import SyntheticRun
from tlora_megatron.training.data.tokenize import TokenSequence
from tlora_megatron.training.job_state import JobState

PEFT_SHAPES = ((1, 1024), (8, 1024), (16, 1024), (32, 1024), (64, 1024))
"""Sequences and their length: one of eight jobs' tokens, then as many as fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Project(Project):
    """A base whose adapters are drawn on the device: those of experts are large."""

    def fresh_job(
        self, spec: JobSpec, train: tuple[TokenSequence, ...], bank: AdapterBank
    ) -> JobState:
        slab = bank.new_slab(spec.lora)
        whole = torch.empty(slab.layout.numel, device=bank.device)
        slab.put("master", whole.normal_(0.0, 0.1 * self.run.spec.hidden_size**-0.5))
        return job_on(slab, spec, train)


class Bench:
    """Measures case by case; rows go to the CSV as they come."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        spec = read_model_spec(args.model)
        self.spec = replace(spec, num_layers=args.layers, vocab_size=args.vocab_size)
        self.layout = ParallelLayout(ep_size=args.ep, dp_size=args.ep)

    def run(self) -> None:
        """Runs all that is asked for; each leaves the GPU's memory empty behind it."""
        if self.args.cases:
            run = SyntheticRun(self.spec, self.layout, dtype=torch.bfloat16)
            if self.args.routing == "skewed":
                _skew(run)
            project = _Project(run=run, micro_batch_tokens=self.args.tokens)
            for name in self.args.cases:
                self._run_case(project, name)
                release()
            run.close()
            del run, project
            release()
        if self.args.peft:
            self._run_peft()

    def _run_case(self, project: Project, name: str) -> None:
        args = self.args
        mix = make_mix(
            name,
            tokens=args.tokens * args.ep,
            micro_batches=args.micro_batches,
            vocab_size=self.spec.vocab_size,
        )
        rounds = args.micro_batches * -(-args.rounds // args.micro_batches)
        effort = Effort(args.micro_batches, rounds, 0, args.kernels)
        timings = run_together(project, mix, effort)
        floor_ms = timings["floor"].step_s * 1e3
        for mode, timing in timings.items():
            count, shown = (args.micro_batches, "step") if mode == "together" else (1, mode)
            self._add(name, shown, timing, count, floor_ms * count)

    def _run_peft(self) -> None:
        """One job with factors in bf16, PEFT's fastest, until memory ends."""
        spec = self.spec
        changes = {"num_hidden_layers": spec.num_layers, "vocab_size": spec.vocab_size}
        model = build_peft(
            self.args.model,
            changes,
            target_modules=list(ATTENTION),
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        )
        for batch, length in PEFT_SHAPES:
            timing = run_peft(model, batch, length, spec.vocab_size, 5)
            if timing is None:
                say(f"PEFT: {batch} x {length} tokens do not fit")
                break
            self._add(f"1 x {batch} x {length}", "hf_peft", timing, 1, None)

    def _add(
        self, name: str, mode: str, timing: Timing, count: int, floor_ms: float | None
    ) -> None:
        args, case = self.args, CASES.get(name, CASES["1x16"])
        step_ms = timing.step_s * 1e3 * count
        row = {
            "gpu": gpu_name(), "world": args.ep, "commit": args.commit, "model": args.model.stem,
            "layers": args.layers, "layout": f"EP{args.ep}" if args.ep > 1 else "one process",
            "routing": args.routing if mode != "hf_peft" else "uniform",
            "tokens_per_gpu": round(timing.tokens / timing.steps), "micro_batches_per_step": count,
            "jobs": len(case.ranks),
            "targets": "attention" if case.expert_ranks is None else "all",
            "expert_rank": case.shown_expert_rank, "sharing": case.sharing,
            "mode": mode if mode != "hf_peft" else f"hf_peft ({name})",
            "step_ms": round(step_ms, 3),
            "floor_ms": "" if floor_ms is None else round(floor_ms, 3),
            "tokens": round(timing.tokens / timing.steps * count * args.ep),
            "peak_bytes": timing.peak_bytes,
        }  # fmt: skip
        ratio = "" if floor_ms is None else f", {step_ms / floor_ms:.3f} of the floor"
        peak = timing.peak_bytes / 2**30
        say(f"{name:>16} {mode:>9} {step_ms:8.2f} ms{ratio}, peak {peak:.1f} GiB")
        if args.csv and is_main():
            append_rows(args.csv, [row])


def _skew(run: SyntheticRun) -> None:
    """Draws routers whose experts have weights of unlike lengths: some meet far more rows."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    for name, weight in run.engine.model.named_parameters():
        if name.endswith("router.weight"):
            places = torch.randperm(len(weight), generator=generator, device="cuda")
            with torch.no_grad():
                weight.mul_(3.0 / (1.0 + places.float() / 8.0).sqrt()[:, None])


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--model", type=Path, default=Path("configs/models/qwen3-30b-a3b.json"))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--peft", action="store_true", help="also Hugging Face PEFT, one job")
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch of one GPU")
    parser.add_argument("--micro-batches", type=int, default=8, help="of an optimizer step")
    parser.add_argument("--rounds", type=int, default=16, help="timed micro-batches at least")
    parser.add_argument("--routing", choices=("uniform", "skewed"), default="uniform")
    parser.add_argument("--ep", type=int, default=1, help="GPUs that share the experts")
    parser.add_argument("--kernels", type=Path, help="write the kernels of a round to this file")
    Bench(parser.parse_args()).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
