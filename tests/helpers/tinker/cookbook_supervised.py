"""The supervised loop of tinker-cookbook, unpatched, on conversations that lie in a file.

    python cookbook_supervised.py ROWS LOG_FOLDER STEPS     (in the folder in which `base` lies)

The environment names the service. The cookbook writes its losses to LOG_FOLDER/metrics.jsonl.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig


def main() -> None:
    rows, log_folder, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    count = len(Path(rows).read_text().splitlines())
    dataset = FromConversationFileBuilder(
        file_path=rows,
        common_config=ChatDatasetBuilderCommonConfig(
            model_name_for_tokenizer="base",
            renderer_name="role_colon",
            max_length=256,
            batch_size=count,
            train_on_what=TrainOnWhat.ALL_ASSISTANT_MESSAGES,
        ),
    )
    config = train.Config(
        log_path=log_folder, model_name="base", recipe_name="recipe_sl_basic",
        renderer_name="role_colon", dataset_builder=dataset, learning_rate=1e-3,
        lr_schedule="constant", num_epochs=steps, lora_rank=8, adam_eps=1e-30, save_every=0,
        eval_every=0, infrequent_eval_every=0,
    )  # fmt: skip
    asyncio.run(train.main(config))


if __name__ == "__main__":
    main()
