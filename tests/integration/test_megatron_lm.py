"""Unmodified Megatron-LM training scripts with `--tlora-config`: every job gets what it gets alone.

Each run is a whole life of `pretrain_gpt.py` of the checkout that MEGATRON_LM_PATH names, over a
base that `tlora convert` wrote and Megatron's own `--load` read.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.launch import python
from tests.helpers.megatron_lm import (
    COMMON,
    FULL,
    NUM_STEPS,
    RUNNER,
    SIZES,
    SP,
    arguments,
    assert_equals_oracle,
    checkout,
    convert,
    logged,
    make_launch_scenario,
    model_flags,
    oracle,
    outcome,
    pretrain_gpt,
    refusal,
    run,
    tokenizer_alone,
    train,
    words,
    write_jobs,
)
from tests.helpers.scenario import (
    JOBS,
    assert_same_bits,
    exported,
    losses,
    records,
    summary_of,
)
from tests.helpers.tiny_models import TinyModelType, make_tiny_model
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, save_tiny_tokenizer
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.timeline import time_line

pytestmark = [pytest.mark.megatron_lm, pytest.mark.slow]

NAMES = tuple(job["name"] for job in JOBS)
LAYOUTS = {
    "one process": "",
    "TP2+SP": f"{SP} --tensorboard-dir {{out}}/events",
    "TP2+SP full recompute": f"{SP} {FULL}",
    "PP2 full recompute": f"--pipeline-model-parallel-size 2 {FULL}",
    "PP2 selective recompute": "--pipeline-model-parallel-size 2 --recompute-granularity selective",
    "VPP2": "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
    "--log-interval 5",
    "DP2 distributed optimizer": "--use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather",
    "CP2": "--context-parallel-size 2",
}
TIED: dict[str, tuple[TinyModelType, str]] = {
    "TP2": ("qwen2", "--tensor-model-parallel-size 2"),
    "PP2": ("qwen3", "--pipeline-model-parallel-size 2"),
}
"""A kind of model, of which one has biases and the other normed heads, and a layout."""

Launch = Callable[..., tuple[Path, str]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("megatron_lm")
    make_launch_scenario(root)
    convert(root / "base", root / "megatron")
    return root


@pytest.fixture(scope="module")
def launch(root: Path) -> Launch:
    """Runs pretrain_gpt.py over the scenario, once a name; gives the output folder and the log."""
    done: dict[str, tuple[Path, str]] = {}

    def launch(
        name: str,
        flags: str = "",
        *,
        config: str = "jobs.json",
        environment: Mapping[str, str] = {},
    ) -> tuple[Path, str]:
        if name not in done:
            out = root / "runs" / name.replace(" ", "_")
            done[name] = out, train(root, out, flags, config=config, environment=environment)
        return done[name]

    return launch


def all_ours(num_layers: int) -> dict[str, Any]:
    """Who computed the base where our kernels computed all of it, from the first step on."""
    layers = {"own": num_layers, "halves": 0, "modules": 0}
    return {"layers": layers, "head": "own", "reasons": []}


def test_the_flag_is_in_the_help() -> None:
    code, output = outcome(pretrain_gpt(), ["--help"])
    if code:
        # A help text of Megatron's own that argparse cannot format; the usage shows the flags too.
        assert outcome(pretrain_gpt(), ["--help"], plain=True)[0] != 0
        _, output = outcome(pretrain_gpt(), ["--no-such-flag"])
    assert "--tlora-config FILE" in output
    assert "--micro-batch-size" in output


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_weights_equal_the_oracle(layout: str, launch: Launch, root: Path) -> None:
    out, _ = launch(layout, LAYOUTS[layout])
    assert_equals_oracle(out, root)
    assert {job["status"] for job in summary_of(out)["jobs"].values()} == {"finished"}
    assert (out / "report.html").is_file()
    assert summary_of(out)["run"]["compute"] == all_ours(4)


def test_the_line_at_the_end_says_where_the_time_went(launch: Launch) -> None:
    out, log = launch("one process")
    times = summary_of(out)["run"]["time_s"]
    assert f"time: {time_line(summary_of(out)['run'])}" in log
    assert all(times[name] > 0 for name in ("imports", "base", "data", "rounds", "evaluation"))


def test_evaluation_is_that_of_the_files(launch: Launch) -> None:
    out, _ = launch("one process")
    for layout, flags in LAYOUTS.items():
        other, _ = launch(layout, flags)
        for name in NAMES:
            evals = [
                [r["eval_loss"] for r in records(folder, name) if "eval_loss" in r]
                for folder in (out, other)
            ]
            assert len(evals[0]) == 2
            assert evals[1] == pytest.approx(evals[0], rel=1e-5), f"{layout} {name}"


def test_bf16_follows_the_oracle(launch: Launch, root: Path) -> None:
    out, _ = launch("bf16", f"--bf16 {SP}")
    for name in NAMES:
        assert losses(out, name) == pytest.approx(oracle(root)[name].losses, rel=1e-2), name
        values = torch.cat([f.flatten() for f in exported(out, name, root / "base").values()])
        assert (values != values.bfloat16().float()).float().mean() > 0.9, name


@pytest.mark.parametrize("layout", TIED)
def test_tied_embeddings(layout: str, tmp_path: Path) -> None:
    kind, flags = TIED[layout]
    make_launch_scenario(tmp_path)
    save_tiny_tokenizer(make_tiny_model(tmp_path / "base", kind, tied=True, vocab_size=VOCAB_SIZE))
    convert(tmp_path / "base", tmp_path / "megatron")
    train(tmp_path, tmp_path / "out", flags)
    assert_equals_oracle(tmp_path / "out", tmp_path)
    num_layers = read_model_spec(tmp_path / "base" / "config.json").num_layers
    assert summary_of(tmp_path / "out")["run"]["compute"] == all_ours(num_layers)


def test_the_trainer_s_log_line_holds_the_jobs_losses(launch: Launch) -> None:
    out, log = launch("TP2+SP", LAYOUTS["TP2+SP"])
    lines = logged(log)
    for name in NAMES:
        shown = [line[f"loss/{name}"] for line in lines if f"loss/{name}" in line]
        assert shown == pytest.approx(losses(out, name), rel=1e-5), name
    assert len(lines) == summary_of(out)["run"]["rounds"] < 400
    assert all("lm loss" in line for line in lines)


def test_an_interval_of_the_log_is_averaged_over_the_steps_a_job_took(launch: Launch) -> None:
    out, log = launch("VPP2", LAYOUTS["VPP2"])
    lines = logged(log)
    # The first iteration has a line of its own and is part of the first interval nevertheless.
    intervals = lines[1:]
    for name in NAMES:
        steps = losses(out, name)
        shown = [line[f"loss/{name}"] for line in intervals if f"loss/{name}" in line]
        assert min(steps) - 1e-5 <= min(shown)
        assert max(shown) <= max(steps) + 1e-5
    # This job steps in every iteration while it trains.
    shown = [line["loss/attention"] for line in intervals if "loss/attention" in line]
    steps = losses(out, "attention")
    expected = [sum(steps[i : i + 5]) / len(steps[i : i + 5]) for i in range(0, NUM_STEPS, 5)]
    assert shown == pytest.approx(expected[: len(shown)], rel=1e-5)


def test_the_trainer_s_tensorboard_holds_the_jobs_losses(launch: Launch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out, _ = launch("TP2+SP", LAYOUTS["TP2+SP"])
    events = EventAccumulator(str(out / "events")).Reload()
    for name in NAMES:
        values = [event.value for event in events.Scalars(f"loss/{name}")]
        assert values == pytest.approx(losses(out, name), rel=1e-6)


KILL = {"TLORA_KILL_AT": "13"}


@pytest.mark.parametrize("flags", ["", SP], ids=["one process", "TP2+SP"])
def test_a_killed_run_goes_on_from_the_jobs_checkpoints(
    flags: str, root: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    # The base is computed by our kernels before and by Megatron's modules behind; under tensor
    # parallelism the other way round.
    ways: list[dict[str, str]] = [{}, {"TLORA_FLAG_COMPUTE": "modules"}]
    before, behind = reversed(ways) if flags else ways
    args, nproc = arguments(root, out, flags), 2 if flags else 1
    refusal(pretrain_gpt(), args, nproc=nproc, environment=KILL | before)
    assert not (out / "summary.json").exists()
    saved = {name: len(losses(out, name)) for name in NAMES}
    assert min(saved.values()) > 0
    assert max(saved.values()) < NUM_STEPS
    output = train(root, out, flags, environment=behind)
    # --save-interval 10: the trainer counts on from there.
    first = next(line for line in output.splitlines() if "iteration  " in line)
    assert " 11/" in first
    assert_equals_oracle(out, root)


def test_a_run_that_reached_train_iters_goes_on_with_more(root: Path) -> None:
    out = root / "capped"
    output = train(root, out, "--single --train-iters 6")
    assert {job["status"] for job in summary_of(out)["jobs"].values()} == {"running"}
    assert "4 jobs have steps left" in output
    train(root, out, "--pipeline-model-parallel-size 2")
    assert_equals_oracle(out, root)
    # Nothing is left to do, and nothing is done.
    before = {name: records(out, name) for name in NAMES}
    assert not logged(train(root, out))
    assert {name: records(out, name) for name in NAMES} == before


WIDE = "--seq-length 2048 --max-position-embeddings 2048 --global-batch-size 1 --single"
"""One micro-batch a round, in which every job's whole batch finds room."""


def variant(
    root: Path,
    name: str,
    names: tuple[str, ...] = NAMES,
    changes: Mapping[str, Mapping[str, Any]] = {},
    **sections: Any,
) -> str:
    """Writes a configuration of some of the jobs, with changes to some; returns its file's name."""
    document = json.loads((root / "config.json").read_text())
    jobs = [job for job in document["jobs"] if job["name"] in names]
    document["jobs"] = [job | dict(changes.get(job["name"], {})) for job in jobs]
    return write_jobs(root / f"{name}.json", document, **sections).name


@pytest.mark.parametrize(
    ("flags", "count"), [("--sequence-parallel", 3), (FULL, "auto")], ids=["SP", "full recompute"]
)
def test_micro_batches_run_in_nano_batches(
    flags: str, count: int | str, launch: Launch, root: Path
) -> None:
    config = variant(root, f"nano {count}", run={"nano_batches": count})
    out, log = launch(f"nano {count}", f"--tensor-model-parallel-size 2 {flags}", config=config)
    assert "nano-batches run staggered" in log
    assert "base: 4 of 4 layers by our kernels, head by ours" in log
    assert not summary_of(out)["run"]["compute"]["reasons"]
    assert_equals_oracle(out, root)


@pytest.mark.parametrize("name", NAMES)
def test_a_job_alone_equals_the_job_in_company_to_the_bit(
    name: str, launch: Launch, root: Path
) -> None:
    together, _ = launch("together", WIDE)
    alone, _ = launch(f"alone {name}", WIDE, config=variant(root, f"alone_{name}", (name,)))
    assert_same_bits(together, alone, name)


def test_a_job_gone_wrong_leaves_its_neighbours_their_bits(launch: Launch, root: Path) -> None:
    flags = LAYOUTS["TP2+SP full recompute"]
    healthy, _ = launch("TP2+SP full recompute", flags)
    wrong = {"optimizer": {"lr": 1e38}, "on_nonfinite": "fail"}
    config = variant(root, "ill", changes={"outputs": wrong})
    ill, log = launch("ill", flags, config=config)
    assert summary_of(ill)["jobs"]["outputs"]["status"] == "failed"
    assert "job outputs: failed: not finite at step" in log
    assert not (ill / "jobs" / "outputs" / "adapter").exists()
    for name in NAMES[:-1]:
        assert_same_bits(healthy, ill, name)


WITHOUT_EFFECT = (
    "--lr 3e-3 --min-lr 1 --lr-decay-style cosine --clip-grad 0.5 --weight-decay 0.3 --adam-beta1 "
    "0.5 --optimizer-cpu-offload --data-path nowhere --sft --async-save --eval-iters 7 "
    "--use-persistent-ckpt-worker --attention-backend flash --no-save-optim --reset-position-ids "
    "--ckpt-format torch"
)


def test_flags_without_effect_have_none_and_are_named_in_one_line(launch: Launch) -> None:
    together, _ = launch("together", WIDE)
    out, log = launch("without effect", f"{WIDE} {WITHOUT_EFFECT}")
    for name in NAMES:
        assert_same_bits(together, out, name)
    (line,) = [line for line in log.splitlines() if "without effect beside" in line]
    assert all(word in line for word in WITHOUT_EFFECT.split() if word.startswith("--"))


def test_one_process_needs_no_torchrun(root: Path) -> None:
    out = root / "runs" / "no_torchrun"
    python(RUNNER, pretrain_gpt(), *arguments(root, out, "--train-iters 2"))
    assert summary_of(out)["run"]["rounds"] == 2


PRETRAINING = words(
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 "
    "--seq-length 64 --max-position-embeddings 64 --normalization RMSNorm --swiglu "
    "--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights "
    "--global-batch-size 4 --train-iters 4 --tokenizer-type NullTokenizer --vocab-size 127 "
    "--use-cpu-initialization --save-interval 4 --ckpt-format torch --eval-iters 1"
)


def stored_tensors(folder: Path) -> dict[str, bytes]:
    """The bytes of every tensor of a checkpoint, optimizer and all, in their order."""
    file = folder / "iter_0000004" / "mp_rank_00" / "model_optim_rng.pt"
    with zipfile.ZipFile(file) as archive:
        (names,) = (archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
        assert b"exp_avg" in names
        return {name: archive.read(name) for name in archive.namelist() if "/data/" in name}


def test_without_the_flag_nothing_changes(tmp_path: Path) -> None:
    shown, saved = [], []
    for plain in (True, False):
        out = tmp_path / ("plain" if plain else "hooked")
        args = [*COMMON, *PRETRAINING, "--save", out]
        lines = logged(run(pretrain_gpt(), args, plain=plain, nproc=2))
        assert len(lines) == 4
        shown.append([{k: v for k, v in line.items() if "elapsed" not in k} for line in lines])
        saved.append(stored_tensors(out))
    assert shown[0] == shown[1]
    assert saved[0] == saved[1]


REFUSED = {
    "micro-batch size": ("--micro-batch-size 2", "--micro-batch-size must be 1"),
    "fp16": ("--fp16", "--fp16 must be off"),
    "missing base": ("--load {out}/none", "must hold a Megatron checkpoint of the base"),
    "contradiction": ("--seq-length 128", "run.micro_batch_tokens must agree with --seq-length"),
    "another model": ("--rotary-base 1000000", "--rotary-base must be 10000 as in"),
    "own check": ("--num-virtual-stages-per-pipeline-rank 2", "must pass its own check"),
}
"""One of each kind; tests/unit/integrations/megatron_lm has the others."""


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_ends_with_a_sentence(case: str, root: Path) -> None:
    flags, message = REFUSED[case]
    run_section = {"micro_batch_tokens": 256} if case == "contradiction" else {}
    config = variant(root, "refused", run=run_section)
    out = root / "refused" / case.replace(" ", "_")
    errors, output = refusal(pretrain_gpt(), arguments(root, out, flags, config=config))
    assert len(errors) == 1
    assert message in " ".join(output.split())
    assert "exitcode  : 2" in output
    assert not (out / "jobs").exists()


def over_unknown(root: Path, out: Path, flags: str, nproc: int = 1) -> tuple[list[str], str]:
    """The refusal of a run over a base without a known config.json."""
    config = variant(root, out.name, base_model={"path": None})
    args = [*arguments(root, out, flags, config=config), "--tokenizer-model", tokenizer_alone(root)]
    found = refusal(pretrain_gpt(), args, nproc=nproc)
    assert not (out / "jobs" / "mlp" / "metrics.jsonl").exists()
    return found


def test_the_base_is_loaded_strictly(root: Path) -> None:
    _, output = over_unknown(root, root / "strict", "--qk-layernorm")
    assert "q_layernorm.weight" in output


def test_another_model_is_refused_where_no_config_is_known(root: Path) -> None:
    (error,), _ = over_unknown(root, root / "unknown", f"--rotary-base 1000000 {SP}", 2)
    assert "the model must give the text of" in error


def test_a_checkpoint_of_megatron_s_old_format_is_loaded_strictly_too(
    root: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    flags = [*model_flags(root / "megatron"), *COMMON, "--ckpt-format", "torch"]
    sizes = words("--seq-length 256 --global-batch-size 1 --train-iters 1 --save-interval 1")
    run(pretrain_gpt(), [*flags, *sizes, "--save", base], plain=True)
    config = variant(root, "old_format", base_model={"path": None})
    sources = ["--load", base, "--save", tmp_path / "out", "--tlora-config", root / config]
    args = [*flags, *SIZES, *sources, "--train-iters", "2"]
    tokenizer = ["--tokenizer-model", tokenizer_alone(root)]
    _, output = refusal(pretrain_gpt(), [*args, *tokenizer, "--qk-layernorm"])
    assert "must hold the weights of this model and no others, got 8 missing" in output
    assert "q_layernorm.weight" in output
    run(pretrain_gpt(), args)


OWN_SCRIPT = """
import tlora_megatron.autohook
import sys
from functools import partial

sys.path.insert(0, {checkout!r})
import pretrain_gpt
from megatron.core.enums import ModelType
from megatron.training import pretrain

if __name__ == "__main__":
    {call}
"""
PARSE = (
    "from megatron.training.arguments import parse_and_validate_args; "
    "from megatron.training.argument_utils import *; args = parse_and_validate_args(); "
)
DATA = "pretrain_gpt.train_valid_test_datasets_provider"
MODEL = "partial(pretrain_gpt.model_provider, pretrain_gpt.gpt_builder)"
REST = "ModelType.encoder_or_decoder, pretrain_gpt.forward_step"
CALLS = {
    "0.16": f"pretrain({DATA}, {MODEL}, {REST})",
    "0.18": f"{PARSE}pretrain(pretrain_cfg_container_from_args(args), {DATA}, {MODEL}, {REST})",
    "0.19": f"{PARSE}pretrain(pretrain_cfg_container_from_args(args, gpt_config_from_args(args)), "
    f"{DATA}, {REST})",
}
"""How scripts of a version, and of those behind it, call the trainer."""


def test_a_script_of_the_user_s_own_with_one_import(root: Path, tmp_path: Path) -> None:
    text = pretrain_gpt().read_text()
    version = "0.19" if "gpt_config_from_args" in text else "0.18"
    call = CALLS[version if "pretrain_cfg_container_from_args" in text else "0.16"]
    own = tmp_path / "train.py"
    own.write_text(OWN_SCRIPT.format(checkout=str(checkout()), call=call))
    run(own, arguments(root, tmp_path / "out"), plain=True)
    assert_equals_oracle(tmp_path / "out", root)


def test_hybrid_model(root: Path, tmp_path: Path) -> None:
    hybrid = checkout() / "pretrain_hybrid.py"
    if not hybrid.is_file():
        pytest.skip("HybridModel has no script in this version")
    config = root / variant(root, "hybrid", base_model={"random_init": True})
    flags_of_model = model_flags(root / "megatron")
    at = flags_of_model.index("--num-layers")
    model = [*flags_of_model[:at], *flags_of_model[at + 2 :], "--hybrid-layer-pattern", "*-*-*-*-"]
    spec = ["--spec", "hybrid_local_spec", "spec", "--use-cpu-initialization"]
    flags = {"one": "", "CP2": LAYOUTS["CP2"], "TP2+SP": LAYOUTS["TP2+SP full recompute"]}
    for layout, words_of_layout in flags.items():
        sources = ["--save", tmp_path / layout, "--tlora-config", config]
        args = [*model, *spec, *COMMON, *SIZES, *sources, *words_of_layout.split()]
        nproc = 2 if words_of_layout else 1
        run(hybrid, args, nproc=nproc, environment={"TLORA_WEIGHTS": "1"})
        assert summary_of(tmp_path / layout)["run"]["compute"] == all_ours(8)
    for name in NAMES:
        # Weights drawn by name are another model's under TP.
        expected = losses(tmp_path / "one", name)
        assert losses(tmp_path / "CP2", name) == pytest.approx(expected, rel=1e-5), name
        job = summary_of(tmp_path / "TP2+SP")["jobs"][name]
        assert job["eval_loss_after"] < job["eval_loss_before"]
        factors = exported(tmp_path / "TP2+SP", name, root / "base")
        assert len(factors) == len(oracle(root)[name].factors)


def test_a_job_alone_has_the_bytes_of_the_job_in_company(launch: Launch, root: Path) -> None:
    job, run = NAMES[-1], {"deterministic": True}
    change = {job: {"portion_tokens": 60}}
    outs = {}
    for name, jobs in (("alone", (job,)), ("beside", NAMES)):
        config = variant(root, f"deterministic {name}", jobs, change, run=run)
        outs[name], _ = launch(f"deterministic {name}", SP, config=config)
    alone, beside = (summary_of(out)["run"]["deterministic"] for out in outs.values())
    assert alone == beside
    assert alone["layout"]["lora_sharding"] == "s_lora"
    assert_same_bits(outs["alone"], outs["beside"], job)


@pytest.mark.parametrize("sharding", ["rank_exchange", "s_lora"])
def test_each_lora_sharding_equals_the_oracle(sharding: str, launch: Launch, root: Path) -> None:
    config = variant(root, sharding, parallel={"lora_sharding": sharding})
    out, _ = launch(sharding, SP, config=config)
    assert summary_of(out)["run"]["layout"]["lora_sharding"] == sharding
    assert_equals_oracle(out, root)
