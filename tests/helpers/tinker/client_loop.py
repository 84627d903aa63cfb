"""A loop over the `tinker` client, of any version; imports nothing of this project.

    python client_loop.py ADDRESS ROWS RANK STEPS      (with TINKER_API_KEY)

prints the losses and what the server said of the model, as JSON.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tinker
from tinker import types

warnings.simplefilter("ignore", FutureWarning)
BASE = "base"


def data(rows: str) -> list[types.Datum]:
    """The rows of a file of prompts and completions; a token is a byte, and 3 more."""
    found = []
    for line in Path(rows).read_text().splitlines():
        row = json.loads(line)
        prompt, completion = ([byte + 3 for byte in row[key].encode()] for key in row)
        tokens = [1, *prompt, *completion, 2]
        weights = [0.0] * len(prompt) + [1.0 / (8 * len(completion))] * (len(completion) + 1)
        found.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
            )
        )
    return found


def create(address: str, key: str | None, rank: int) -> Any:
    """A new model of the quickstart's base."""
    service = tinker.ServiceClient(base_url=address, api_key=key)
    made: Any = service.create_lora_training_client(base_model=BASE, rank=rank, seed=0)
    return made.result() if hasattr(made, "result") else made


def train(
    model: Any, rows: list[types.Datum], steps: int, before: Callable[[int], None] | None = None
) -> list[float]:
    """Losses of steps of eight rows; `before` is called as a step's requests are under way."""
    losses = []
    for step in range(steps):
        first = step * 8 % len(rows)
        passed = model.forward_backward(rows[first : first + 8], "cross_entropy")
        stepped = model.optim_step(types.AdamParams(learning_rate=5e-3, beta2=0.999, eps=1e-8))
        if before is not None:
            before(step)
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    return losses


def main() -> None:
    address, rows, rank, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    model = create(address, None, rank)
    losses = train(model, data(rows), steps)
    path = model.save_state("end").result().path
    text = model.get_tokenizer().decode([119, 104, 100])
    info = model.get_info()
    told = {"losses": losses, "path": path, "text": text, "rank": info.lora_rank}
    print(json.dumps({**told, "version": tinker.__version__}))


if __name__ == "__main__":
    main()
