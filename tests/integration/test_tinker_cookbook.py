"""tinker-cookbook's loops, unpatched, on the quickstart's base by `tlora serve --http`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launch import HANG_S, REPO
from tests.helpers.scenario import losses
from tests.helpers.served_http import ServedHttp, serving_http, serving_quickstart
from tests.helpers.tinker.cookbook_recipes import ANSWERER, MODEL, RECIPES, lay_out
from tlora_megatron.config.load import read_config
from tlora_megatron.runtime import controller

QUICKSTART = REPO / "configs" / "quickstart"
SCRIPTS = REPO / "tests" / "helpers" / "tinker"
STEPS = 5
ANSWERS = "How do I sign in?\n\n"
"""What a recipe may ask its user."""
ROLE_COLON = """{{- bos_token }}{%- for message in messages %}
{%- if message['role'] == 'assistant' -%}
Assistant:{% generation %}{{ ' ' + message['content'] + '\\n\\nUser:' }}{% endgeneration %}
{%- else -%}
{{ 'User: ' + message['content'] + '\\n\\n' }}
{%- endif %}
{%- endfor %}"""
"""The cookbook's renderer role_colon as a chat template."""

pytestmark = pytest.mark.cookbook


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHttp]:
    with serving_quickstart(tmp_path_factory.mktemp("cookbook"), "float32") as found:
        yield found


def run(served: ServedHttp, *words: object, folder: Path = QUICKSTART) -> str:
    """Runs a script of the cookbook where the name of the base leads to its tokenizer, too."""
    env = {**os.environ, "TINKER_BASE_URL": served.address, "TINKER_API_KEY": served.token("ann")}
    env.update(TINKER_TELEMETRY="0", HF_HUB_OFFLINE="1", HF_HOME=str(served.home.root / "hub"))
    env.pop("PYTHONPATH", None)
    result = subprocess.run(
        [os.environ["COOKBOOK_PYTHON"], *map(str, words)],
        cwd=folder, env=env, capture_output=True, text=True, timeout=HANG_S, input=ANSWERS,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-5000:]
    return result.stdout


def logged(folder: Path) -> list[dict[str, Any]]:
    """Metrics of each step; a line behind them tells of the run's end."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if len(line) > 1]


def conversations(path: Path) -> None:
    """Writes sixteen conversations; answers of one length, since the cookbook weighs each alike."""
    lines = (QUICKSTART / "data" / "mirror_train.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if len(row["completion"]) == 5][:16]
    chats = [
        [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["completion"]},
        ]
        for row in rows
    ]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))


def trained_here(served: ServedHttp, rows: Path, folder: Path) -> list[float]:
    """Losses of the same recipe by `tlora train`, with the seed that the service chose."""
    base = folder / "base"
    shutil.copytree(QUICKSTART / "base", base)
    (base / "chat_template.jinja").write_text(ROLE_COLON)
    (job,) = served.home.jobs.glob("*/job.json")
    document = {
        "base_model": {"path": str(base), "dtype": "float32"},
        "run": {"output_dir": str(folder / "out")},
        "jobs": [
            {
                "name": "same",
                "data": {"train": str(rows)},
                "lora": {"rank": 8, "alpha": 32},
                "batch_size": 16,
                "max_seq_len": 256,
                "max_steps": STEPS,
                "seed": json.loads(job.read_text())["job"]["seed"],
                "optimizer": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-30, "max_grad_norm": 0},
                "schedule": {"name": "constant", "warmup_steps": 0},
            }
        ],
    }
    controller.train_run(read_config(document, folder))
    return losses(folder / "out", "same")


def test_supervised_loop_has_the_losses_of_tlora_train(served: ServedHttp, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    conversations(rows)
    run(served, SCRIPTS / "cookbook_supervised.py", rows, tmp_path / "log", STEPS)
    found = [step["train_mean_nll"] for step in logged(tmp_path / "log")]
    assert found == pytest.approx(trained_here(served, rows, tmp_path), rel=1e-5)
    (saved,) = map(json.loads, (tmp_path / "log/checkpoints.jsonl").read_text().splitlines())
    assert saved["state_path"].startswith("tinker://")


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "stable_reinforce"])
def test_reinforcement_loop_learns(served: ServedHttp, tmp_path: Path, loss: str) -> None:
    run(served, SCRIPTS / "cookbook_rl.py", tmp_path / "log", 12, loss)
    reward = "env/all/reward/total"  # the log's last line has none
    rewards = [step[reward] for step in logged(tmp_path / "log") if reward in step]
    assert len(rewards) == 12
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.5


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServedHttp, Path]]:
    """A service whose base and data lie where the recipes look for them."""
    folder = tmp_path_factory.mktemp("recipes")
    lay_out(folder)
    bases = [f"--base={name}={folder / name}" for name in (MODEL, ANSWERER)]
    with serving_http(folder / "service", folder / "serve.log", *bases, "--sampler=own") as served:
        yield served, folder


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_run(kitchen: tuple[ServedHttp, Path], recipe: str) -> None:
    served, folder = kitchen
    shutil.rmtree(folder / "log", ignore_errors=True)
    module = f"tinker_cookbook.recipes.{recipe.split()[0]}"
    run(served, "-m", module, *RECIPES[recipe], folder=folder)
