"""The reinforcement loop of tinker-cookbook, unpatched, on a problem that a small base can learn.

    python cookbook_rl.py LOG_FOLDER STEPS LOSS [LETTER [GO]]    (in the folder that has `base`)

The environment names the service. An answer is right if it holds the letter, by default e. The
cookbook writes rewards to LOG_FOLDER/metrics.jsonl. Loops that are to begin together say that they
are ready by LOG_FOLDER/ready, and wait for a file GO.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import chz
from tinker_cookbook import renderers
from tinker_cookbook.rl import train
from tinker_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer

LETTER, GO = (*sys.argv[4:], *("e", None)[len(sys.argv[4:]) :])


class HoldsLetter(ProblemEnv):
    def get_question(self) -> str:
        return "Say something:"

    def check_answer(self, sample_str: str) -> bool:
        return LETTER in sample_str

    def check_format(self, sample_str: str) -> bool:
        return True

    def get_reference_answer(self) -> str:
        return LETTER


class Letters(RLDataset):
    def __init__(self, renderer: renderers.Renderer, steps: int) -> None:
        self.renderer = renderer
        self.steps = steps

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        env = partial(HoldsLetter, self.renderer)
        return [ProblemGroupBuilder(env_thunk=env, num_envs=8) for _ in range(4)]

    def __len__(self) -> int:
        return self.steps


@chz.chz
class LettersBuilder(RLDatasetBuilder):
    steps: int

    async def __call__(self) -> tuple[Letters, None]:
        if GO is not None:
            Path(sys.argv[1], "ready").touch()
            while not Path(GO).exists():
                await asyncio.sleep(0.01)
        renderer = renderers.get_renderer("role_colon", tokenizer=get_tokenizer("base"))
        return Letters(renderer, self.steps), None


def main() -> None:
    log_folder, steps, loss = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    config = train.Config(
        learning_rate=3e-3, dataset_builder=LettersBuilder(steps=steps), model_name="base",
        recipe_name="recipe_rl_basic", renderer_name="role_colon", max_tokens=6,
        log_path=log_folder, lora_rank=8, loss_fn=loss, eval_every=0, save_every=0,
        num_groups_to_log=0,
    )  # fmt: skip
    asyncio.run(train.main(config))


if __name__ == "__main__":
    main()
