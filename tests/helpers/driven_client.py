"""Clients of driven jobs, as an API would speak for them: through the jobs' request logs."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.helpers.gang_driver import GangDriver
from tlora_megatron.service.request_log import RequestLog
from tlora_megatron.training.driven_requests import Answer, Request

VOCABULARY = 100
"""Tokens below which the quickstart's base has all."""


class Client:
    def __init__(self, driver: GangDriver, job: str) -> None:
        self.driver, self.job = driver, job
        self.log = RequestLog(driver.home.job(job))
        self.number = 0

    def ask(self, op: str, arrays: dict[str, np.ndarray] | None = None, **params: Any) -> int:
        self.number += 1
        request = Request(op=op, params=params, arrays=arrays or {})  # type: ignore[arg-type]
        assert self.log.write_request(self.number, request)
        return self.number

    def answer(self, number: int) -> Answer:
        self.driver.run_until(lambda: self.log.has_answer(number))
        found = self.log.read_answer(number)
        assert found is not None
        return found

    def good(self, number: int) -> Answer:
        found = self.answer(number)
        assert found.error is None, found.error
        return found


def batch(seed: int, lengths: tuple[int, ...] = (7, 23, 12), **arrays: Any) -> dict[str, Any]:
    """Random tokens, targets that are the input shifted, and weights, some of them 0."""
    generator = np.random.default_rng(seed)
    total = sum(lengths)
    rows = [generator.integers(0, VOCABULARY, n + 1).astype(np.int32) for n in lengths]
    weights = (generator.random(total) < 0.7).astype(np.float32) / total
    found = {
        "lengths": np.array(lengths, np.int32),
        "tokens": np.concatenate([row[:-1] for row in rows]),
        "targets": np.concatenate([row[1:] for row in rows]).astype(np.int64),
        "weights": weights,
    }
    return found | arrays
