"""A process of the pool: takes submissions on stdin, answers on stdout, one line of JSON each.

    python -m tlora_megatron.service.prepare.worker

It ends when its stdin does, and with that when the controller dies, however that happens.
"""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tlora_megatron.channel import LinePipe
from tlora_megatron.service.home import Home
from tlora_megatron.service.prepare.submission import Outcome, PrepareRules, Refused, Submission
from tlora_megatron.service.prepare.validate import validate

logger = logging.getLogger(__name__)

_NICE = 10
"""Training goes first on a host's cores."""


def main() -> None:
    """Answers until stdin ends."""
    os.nice(_NICE)
    pipe = LinePipe.of_child()
    logging.basicConfig(level=logging.WARNING)
    _import_early()
    serve(pipe)


def serve(pipe: LinePipe) -> None:
    """Answers one request after the other; tidies the cache of tokens before the first."""
    is_tidy = False
    while not pipe.is_over:
        pipe.wait()
        for request in pipe.receive():
            if not is_tidy:
                _tidy(Path(request["rules"]["root"]))
                is_tidy = True
            outcome = _answer(request)
            kind = "refused" if isinstance(outcome, Refused) else "validated"
            pipe.send({kind: asdict(outcome)})


def _answer(request: dict[str, Any]) -> Outcome:
    job_id, name = str(request["job"]), request["submission"].get("name")
    try:
        submission = Submission(**request["submission"])
        return validate(job_id, submission, PrepareRules(**request["rules"]))
    except Exception as error:
        logger.exception("job %s", job_id)
        kind = type(error).__name__
        return Refused(job=job_id, error=f"job {name!r} could not be checked: {kind}: {error}")


def _tidy(root: Path) -> None:
    from tlora_megatron.training.data.job_data import TokenCache

    TokenCache(Home(root).tokens).prune()


def _import_early() -> None:
    """Imports early what the first submission would wait for."""
    import tlora_megatron.training.run.reading  # noqa: F401


if __name__ == "__main__":
    main()
