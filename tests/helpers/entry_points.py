"""Runs of one job in several companies through the commands that users type, in bf16.

On GPUs the base has heads of 64 and documents of up to 900 tokens, for which attention's own choice
of splits depends on the company; without one all is small, to see that the commands are right.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.helpers import megatron_lm
from tests.helpers.deepspeed_cases import zero
from tests.helpers.launch import REPO, environment, outcome
from tests.helpers.scenario import losses
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, save_tiny_tokenizer
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.runtime.ranks import free_port
from tlora_megatron.training.formats.checkpoint import find_checkpoint
from tlora_megatron.training.formats.megatron_flags import megatron_flags
from tlora_megatron.training.run.determinism import ENVIRONMENT

HELPERS = Path(__file__).parent
OWN = "own"
STEPS = 8
KILLED_AT = 5
"""The watched job's step; every second one is saved."""
ON_GPU = torch.cuda.is_available()
SHAPE = {
    "hidden_size": 1024 if ON_GPU else 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 16 if ON_GPU else 2,
    "num_key_value_heads": 4 if ON_GPU else 1,
    "head_dim": 64,
    "intermediate_size": 2816 if ON_GPU else 256,
    "max_position_embeddings": 4096,
}
LONGEST = 900 if ON_GPU else 60
MICRO_BATCH = 4096 if ON_GPU else 512
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def job(name: str, batch_size: int, steps: int, **lora: Any) -> dict[str, Any]:
    return {
        "name": name,
        "data": {"train": f"{name}.jsonl"},
        "lora": {"target_modules": ALL, **lora},
        "batch_size": batch_size,
        "max_steps": steps,
        "max_seq_len": LONGEST,
        "optimizer": {"lr": 1e-3},
        "schedule": {"name": "constant"},
    }


WATCHED = job(OWN, 4, STEPS, rank=16, dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"])
"""It leaves linears that its neighbours adapt."""
WRONG = {
    **job("wrong", 2, 20, rank=64, dropout=0.05, target_modules=["q_proj", "k_proj"]),
    "optimizer": {"lr": 1e30},
    "on_nonfinite": "fail",
}
"""Its second step's scores of attention are not finite."""
SHORT = job("short", 1, 2, rank=3, target_modules=["o_proj", "gate_proj", "up_proj"])
LONG = {
    **job("long", 6, 12, rank=64, dropout=0.3, target_modules=["down_proj"]),
    "portion_tokens": MICRO_BATCH // 8,
}
NEW = job("new", 1, 6, rank=33, target_modules=["k_proj"])
WIDE = job("wide", 3, 6, rank=128)
COMPANIES: dict[str, tuple[dict[str, Any], ...]] = {
    "alone": (WATCHED,),
    "beside": (WRONG, SHORT, WATCHED, LONG),
    "others": (NEW, WATCHED, WIDE, LONG),
}
"""Jobs in slot order. One of `beside` overflows and one ends early; `others` are other jobs."""
ENDS_IN_NAN = {"beside"}


def write_base(root: Path) -> None:
    base = make_tiny_model(
        root / "base", "llama", vocab_size=VOCAB_SIZE, dtype=torch.bfloat16, **SHAPE
    )
    save_tiny_tokenizer(base)
    draw = random.Random(0)
    for name in sorted({job["name"] for jobs in COMPANIES.values() for job in jobs}):
        lengths = (min(LONGEST, round(LONGEST * draw.lognormvariate(-1.3, 0.8))) for _ in range(24))
        texts = ("".join(draw.choices("abcdefgh ", k=max(4, length))) for length in lengths)
        records = ({"prompt": "?", "completion": text} for text in texts)
        (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    out: str
    """Its output folder; two runs of one folder are the second one going on with the first."""
    company: str
    killed: bool = False
    environment: tuple[tuple[str, str], ...] = ()
    code: int | None = None
    """Exit code; None = what follows from the company."""

    @property
    def exit_code(self) -> int:
        return int(self.company in ENDS_IN_NAN) if self.code is None else self.code


REFUSED = Run(out="refused", company="alone", environment=(("NCCL_ALGO", "Tree"),), code=2)
FIRST = (
    (Run(out="alone", company="alone"), Run(out="again", company="alone")),
    (Run(out="beside", company="beside"), Run(out="resumed", company="beside", killed=True)),
)
"""Processes that run at the same time, with the commands of each."""
THEN = ((REFUSED, Run(out="resumed", company="beside"), Run(out="moved", company="others")),)
OUTS = ("alone", "again", "beside", "resumed", "moved")
KILLED = "killed"
"""The folder that the kill left, from which the job moves to another run."""


class EntryPoint:
    """An entry point, with a folder of its own for everything but the base and the texts."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, name
        self.folder = root / name
        self.folder.mkdir()

    def pass_through(self) -> Passed:
        """Runs all commands.

        Raises:
            AssertionError: if one ends otherwise than it must.
        """
        said = self._at_once(FIRST)
        found = find_checkpoint(self.folder / "resumed" / "jobs" / OWN / "checkpoints")
        assert found is not None, said
        assert 0 < found.step < STEPS, f"the kill left step {found.step}\n{said}"
        shutil.copytree(self.folder / "resumed", self.folder / KILLED)
        return Passed(self, said + self._at_once(THEN))

    def _at_once(self, lives: Sequence[Sequence[Run]]) -> str:
        with ThreadPoolExecutor(8) as pool:
            return "".join(pool.map(self.life, lives))

    def life(self, runs: Sequence[Run]) -> str:
        entries = [self._entry(run) for run in runs]
        file = self.folder / f"{runs[0].out} {len(runs)}.json"
        file.write_text(json.dumps(entries))
        expected = -signal.SIGKILL if runs[-1].killed else 0
        return ended([HELPERS / "entry_point_worker.py", file], expected)

    def _entry(self, run: Run) -> dict[str, Any]:
        return {
            "entry_point": "tlora" if "tlora" in self.name else "deepspeed",
            "words": self.words(run),
            "code": run.exit_code,
            "kill_at": [OWN, KILLED_AT] if run.killed else None,
            "environment": dict(run.environment),
        }

    def words(self, run: Run) -> list[str]:
        config = self.root / f"{self.name} {run.company}.json"
        section = self._section(run.company)
        common = ["--output-dir", str(self.folder / run.out), "--set", "run.deterministic=true"]
        if "tlora" in self.name:
            config.write_text(json.dumps(section))
            return ["train", str(config), *common]
        stage = zero(int(self.name[-1])) | {"bf16": {"enabled": True}}
        config.write_text(json.dumps({**stage, "tlora": section}))
        return ["--deepspeed_config", str(config), *common]

    def _section(self, company: str) -> dict[str, Any]:
        quantised = {"quantization": "fp8"} if "FP8" in self.name else {}
        return {
            "base_model": {"path": "base", "dtype": "bfloat16", **quantised},
            "run": {
                "output_dir": "out",
                "micro_batch_tokens": MICRO_BATCH,
                "checkpoint_every_steps": 2,
                "tensorboard": False,
            },
            "jobs": self.jobs(company),
        }

    def jobs(self, company: str) -> list[dict[str, Any]]:
        jobs = list(COMPANIES[company])
        if company == "others":
            place, killed = jobs.index(WATCHED), self.folder / KILLED
            (was,) = (j for j in _read(killed / "config.json")["jobs"] if j["name"] == OWN)
            comes = {"resume_from": str(killed / "jobs" / OWN)}
            jobs[place] = {**WATCHED, **comes, "portion_tokens": was["portion_tokens"]}
        return jobs

    def sha256(self, out: str) -> str:
        found = losses(self.folder / out, OWN)
        if out == "moved":
            found = losses(self.folder / KILLED, OWN)[: STEPS - len(found)] + found
        assert len(found) == STEPS, f"{self.name}, {out}: {found}"
        adapter = self.folder / out / "jobs" / OWN / "adapter" / "adapter_model.safetensors"
        return hashlib.sha256(repr(found).encode() + adapter.read_bytes()).hexdigest()

    def summary(self, out: str) -> dict[str, Any]:
        return _read(self.folder / out / "summary.json")


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


class Passed(NamedTuple):
    entry_point: EntryPoint
    said: str
    """The output of all commands."""


class MegatronLm(EntryPoint):
    """The flag: every command is a process, and the variables are set before CUDA starts."""

    def _at_once(self, lives: Sequence[Sequence[Run]]) -> str:
        return super()._at_once([(run,) for life in lives for run in life])

    def life(self, runs: Sequence[Run]) -> str:
        (run,) = runs
        worker = HELPERS / "megatron_lm_worker.py"
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        variables = place | {"MASTER_PORT": str(free_port())} | dict(run.environment)
        if run.killed:
            variables["TLORA_KILL_AT"] = str(KILLED_AT + 1)
        # The trainer ends with 0 whatever its jobs did; what is refused ends as everywhere.
        expected = -signal.SIGKILL if run.killed else run.code or 0
        return ended([worker, *self.words(run)], expected, variables)

    def words(self, run: Run) -> list[str]:
        jobs = self.root / f"{self.name} {run.company}.json"
        sections = {
            "base_model": {"path": "base", "random_init": True},
            "run": {"deterministic": True, "tensorboard": False},
            "jobs": self.jobs(run.company),
        }
        jobs.write_text(json.dumps(sections))
        files = {
            "--tokenizer-type": "HuggingFaceTokenizer",
            "--tokenizer-model": self.root / "base",
            "--save": self.folder / run.out,
            "--tlora-config": jobs,
        }
        return [
            str(megatron_lm.checkout() / "pretrain_gpt.py"),
            *megatron_flags(read_model_spec(self.root / "base" / "config.json")),
            *megatron_lm.COMMON,
            *f"--seq-length {MICRO_BATCH} --global-batch-size 1 --train-iters 400".split(),
            *["--save-interval", "2", "--bf16"],
            *(_LOCAL.split() if ON_GPU else ()),
            *(str(word) for pair in files.items() for word in pair),
        ]


_LOCAL = (
    "--transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion "
    "--no-gradient-accumulation-fusion"
)


def ended(args: Sequence[object], code: int, variables: Mapping[str, str] = {}) -> str:
    """Runs this Python with arguments and without the variables that the key sets; returns what it
    wrote.

    Raises:
        AssertionError: if it ends otherwise or hangs.
    """
    inherited = {k: v for k, v in environment().items() if k not in ENVIRONMENT}
    paths = os.pathsep.join([str(REPO), inherited.get("PYTHONPATH", "")])
    env = inherited | {"PYTHONPATH": paths} | variables
    found, said = outcome(*args, env=env)
    assert found == code, f"exit {found}: {args}\n{said[-8000:]}"
    return said


def pass_through(root: Path, names: Iterable[str]) -> dict[str, Future[Passed]]:
    """Runs the commands of all entry points at once, to their ends."""
    write_base(root)
    made = [(MegatronLm if name == "megatron_lm" else EntryPoint)(root, name) for name in names]
    with ThreadPoolExecutor(max(1, len(made))) as pool:
        return {entry_point.name: pool.submit(entry_point.pass_through) for entry_point in made}
