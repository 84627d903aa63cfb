"""Tenants of the unmodified `tinker` SDK: each trains its own adapter, and thinks between steps.

python -m scripts.bench.doors.tenants < plan.json > steps.json     # a process of clients
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

RANKS = (8, 16, 32, 64)
_PROCESSES = 2
"""Clients of one process share its interpreter; more processes than cores bring nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The work of the tenants of one process."""

    address: str = ""
    base: str
    tokens: tuple[str, ...] = ()
    """Tokens of the API, one a tenant."""
    first: int = 0
    """Number of the first tenant, which chooses its rank and its data."""
    steps: int = 0
    """0: as many as fit into `seconds`."""
    seconds: float = 0.0
    """After so long no tenant begins a step; 0: no limit."""
    think_s: float
    """Mean of the exponential time between two steps."""
    sequences: int
    length: int
    """Tokens of each sequence."""


class Step(NamedTuple):
    """One step of a tenant: a forward_backward and an optim_step, sent together."""

    tenant: int
    begin_s: float
    """Unix time."""
    took_s: float
    tokens: int


def run(plan: Plan, *, processes: int = _PROCESSES) -> list[Step]:
    """Lets all tenants train; returns their steps in the order of their beginnings.

    Raises:
        RuntimeError: if a process of clients fails.
    """
    share = -(-len(plan.tokens) // processes)
    parts = []
    for begin in range(0, len(plan.tokens), share):
        part = asdict(plan) | {
            "tokens": plan.tokens[begin : begin + share],
            "first": plan.first + begin,
        }
        parts.append(json.dumps(part))
    environment = {**os.environ, "TINKER_TELEMETRY": "0", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-m", __spec__.name]
    running = [_start(command, environment, part) for part in parts]
    steps: list[Step] = []
    for process in running:
        out, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"clients must end well, got exit code {process.returncode}")
        steps += [Step(*row) for row in json.loads(out.splitlines()[-1])]
    return sorted(steps, key=lambda step: step.begin_s)


def _start(command: Sequence[str], environment: dict[str, str], part: str) -> Any:
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None, "a pipe must be there"
    process.stdin.write(part)
    process.stdin.close()
    process.stdin = None
    return process


class Tenant:
    def __init__(self, plan: Plan, place: int) -> None:
        self._plan = plan
        self._number = plan.first + place
        self._token = plan.tokens[place]
        self._random = random.Random(self._number)
        self._until_s = math.inf
        self.steps: list[Step] = []
        self.error: BaseException | None = None

    def live(self, start: threading.Barrier) -> None:
        """Opens a model, waits until all others have one, and trains."""
        try:
            self._train(start)
        except BaseException as error:
            self.error = error
            start.abort()

    def _train(self, start: threading.Barrier) -> None:
        import tinker
        from tinker import types

        plan, rank = self._plan, RANKS[self._number % len(RANKS)]
        client = tinker.ServiceClient(base_url=plan.address, api_key=self._token)
        model = client.create_lora_training_client(base_model=plan.base, rank=rank).result()
        data = self._data(types)
        step = types.AdamParams(learning_rate=1e-4)
        # The first step is not timed: the model's place in a gang is found meanwhile.
        model.forward_backward(data, "cross_entropy").result()
        start.wait()
        self._until_s = time.time() + (plan.seconds or math.inf)
        time.sleep(self._random.random() * plan.think_s)
        while self._goes_on():
            begin_s = time.time()
            passed = model.forward_backward(data, "cross_entropy")
            stepped = model.optim_step(step)
            passed.result(), stepped.result()
            took_s = time.time() - begin_s
            tokens = plan.sequences * plan.length
            self.steps.append(Step(self._number, begin_s, took_s, tokens))
            time.sleep(self._random.expovariate(1 / plan.think_s) if plan.think_s else 0.0)

    def _goes_on(self) -> bool:
        plan = self._plan
        return time.time() < self._until_s and (not plan.steps or len(self.steps) < plan.steps)

    def _data(self, types: Any) -> list[Any]:
        rows = [
            [self._random.randrange(32, 250) for _ in range(self._plan.length + 1)]
            for _ in range(self._plan.sequences)
        ]
        return [
            types.Datum(
                model_input=types.ModelInput.from_ints(row[:-1]),
                loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)},
            )
            for row in rows
        ]


def main() -> int:
    """Runs the tenants of the plan on standard input; prints their steps."""
    found = json.load(sys.stdin)
    plan = Plan(**{**found, "tokens": tuple(found["tokens"])})
    tenants = [Tenant(plan, place) for place in range(len(plan.tokens))]
    start = threading.Barrier(len(tenants))
    threads = [threading.Thread(target=tenant.live, args=(start,)) for tenant in tenants]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for tenant in tenants:
        if tenant.error is not None and not isinstance(tenant.error, threading.BrokenBarrierError):
            raise tenant.error
    print(json.dumps([step for tenant in tenants for step in tenant.steps]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
