"""One process of a gang, from its start to its end.

    python -m tlora_megatron.service.worker.rank FOLDER RANK

FOLDER is the gang's, with its spec. Whoever starts the process sets CUDA_VISIBLE_DEVICES to its
one GPU, and OMP_NUM_THREADS.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast, get_args

from tlora_megatron.model.weight_files import read_ahead
from tlora_megatron.ops.kernel_build import build_early
from tlora_megatron.runtime.ranks import describe_failure, is_lost_connection, leave
from tlora_megatron.service.engines.protocol import HOST_VARIABLE
from tlora_megatron.service.home import Home
from tlora_megatron.service.messages import EventKind, GangFolder, GangSpec
from tlora_megatron.service.sampling.vllm_probe import (
    MOST_TOKENS,
    TEXT,
    BaseScores,
    read_scores,
    write_scores,
)
from tlora_megatron.service.supervisor import identity_of
from tlora_megatron.service.worker.gang_logs import CommandReader, EventWriter
from tlora_megatron.service.worker.peers import leave_together, meet, own_address, peer_watchdog

if TYPE_CHECKING:
    from torch.distributed import Store

    from tlora_megatron.config.schema import RunConfig
    from tlora_megatron.training.loop import Loop

logger = logging.getLogger(__name__)

FAILED, OUT_OF_MEMORY, LEASE_OVER = 1, 3, 75
"""Exit codes; 0 = the gang was told to stop."""


def main(argv: list[str]) -> int:
    """Takes part in the gang whose folder and rank the arguments name; returns the exit code."""
    folder, rank = GangFolder.at(Path(argv[0])), int(argv[1])
    folder.write(folder.pid(rank).name, f"{identity_of()}")
    if folder.is_closed:  # by an engine that has not seen this process
        return FAILED
    code = run_rank(folder.spec(), rank, folder=folder, host=os.environ.get(HOST_VARIABLE))
    folder.write(f"exit_{rank}", str(code))
    return code


def run_rank(spec: GangSpec, rank: int, *, folder: GangFolder, host: str | None = None) -> int:
    """Lives the whole life of one process of a gang; returns its exit code.

    A process that fails says why in `end_K.json` before it ends, and in its log.
    """
    _set_up(spec, rank)
    process = RankProcess(spec, rank, folder)
    try:
        return process.serve(host)
    except BaseException as error:
        traceback.print_exc()
        return process.fail(error)


class RankProcess:
    """A rank's life: what it hears and tells, and what it says of its end."""

    def __init__(self, spec: GangSpec, rank: int, folder: GangFolder) -> None:
        self._spec = spec
        self._rank = rank
        self._folder = folder
        self.commands: CommandReader | None = None
        """On rank 0 from the time that the base is loaded."""
        self.events: EventWriter | None = None
        """On rank 0."""
        self._joining: list[str] = []

    def serve(self, host: str | None) -> int:
        """Opens the super-model, serves the gang's commands to the end; returns the exit code."""
        begin_s = time.monotonic()
        # What needs neither torch nor other processes: the disk's reading, the kernels.
        base = self._spec.base_model
        if base.get("path") is not None and self._rank == 0:
            read_ahead(Path(base["path"]))
        if base.get("dtype", "bfloat16") == "bfloat16":
            build_early()
        import_all()
        from tlora_megatron.runtime.backbone import Rendezvous
        from tlora_megatron.runtime.resident import open_resident
        from tlora_megatron.service.request_log import RequestLogs
        from tlora_megatron.service.worker.read_order import order_reader

        imported_s = time.monotonic()
        if self._rank == 0:
            self.events = EventWriter(self._spec, self._folder.events())
        at = host or own_address(self._spec)
        store = meet(self._spec, self._rank, self._folder, at)
        met_s = time.monotonic()
        place = Rendezvous(store, self._rank, self._spec.world_size)
        config = gang_config(self._spec)
        with (
            peer_watchdog(store, self._rank, self._spec.world_size, at, self._miss),
            open_resident(
                config,
                events=self,
                rendezvous=place,
                read_order=order_reader(config, self._spec.root),
                may_write=self._may_write,
                clients=RequestLogs(Path(self._spec.root), self._may_write),
            ) as commands,
        ):
            self._score_base(commands.loop, config, store)
            if self._rank == 0:
                # Not before: a large base may take longer to load than the lease lasts.
                self.commands = CommandReader(self._spec, self._folder.commands())
            seconds = {"imports_s": imported_s - begin_s, "meet_s": met_s - imported_s}
            self.emit("started", None, {**seconds, "base_s": time.monotonic() - met_s})
            commands.serve(self.commands)
        leave_together(store, self._rank)
        return LEASE_OVER if self._lease_is_over else 0

    def _score_base(self, loop: Loop, config: RunConfig, store: Store) -> None:
        """Leaves word of what the base says of a few tokens, unless somebody has; collective."""
        from tlora_megatron.training.resident.client_steps import score_base

        home, base = Home(Path(self._spec.root)), self._spec.base_model
        if self._rank == 0:
            store.set("to_score", json.dumps(_tokens_to_score(home, base, config)))
        tokens = json.loads(store.get("to_score"))[: loop.backbone.max_positions]
        # Some folders have a tokenizer with more tokens than the base.
        if len(tokens) < 2 or max(tokens) >= loop.backbone.vocab_size:
            return
        logprobs = score_base(loop.super_model, loop.backbone, tokens).tolist()
        if self._rank == 0:
            with suppress(OSError):  # nobody is told less than before
                write_scores(home, base, BaseScores(tokens=tuple(tokens), logprobs=tuple(logprobs)))

    def fail(self, error: BaseException) -> int:
        """Says why this process ends; returns its exit code."""
        kind = type(error).__name__  # of a GPU's error, which torch defines
        out_of_memory = isinstance(error, MemoryError) or kind == "OutOfMemoryError"
        is_lost = is_lost_connection(error)
        self._say(describe_failure(error), out_of_memory=out_of_memory, is_lost=is_lost)
        return OUT_OF_MEMORY if out_of_memory else FAILED

    def _miss(self) -> NoReturn:
        """Ends this process, whose threads may wait on a GPU for one that is gone."""
        if not (self._folder.path / f"end_{self._rank}.json").exists():
            reason = "another process of its gang has ended, and nobody has ended this one"
            self._say(reason, is_lost=True)
        end(FAILED)

    def _say(self, reason: str, *, out_of_memory: bool = False, is_lost: bool = False) -> None:
        """Leaves word of this process's end in `end_K.json`."""
        ending = {
            "reason": reason,
            "out_of_memory": out_of_memory,
            "newcomers": self._joining if out_of_memory else [],
            "is_lost": is_lost,
            "at": time.time(),
        }
        try:
            self._folder.write(f"end_{self._rank}.json", json.dumps(ending))
        except OSError:
            logger.exception("rank %d could not leave word of its end", self._rank)

    @property
    def _lease_is_over(self) -> bool:
        return self.commands is not None and self.commands.deadline.is_over

    def _may_write(self, job: str) -> bool:
        assert self.commands is not None, "only rank 0 writes"
        return self.commands.may_write(job)

    def emit(self, kind: str, job: str | None, body: Mapping[str, Any]) -> None:
        """Reports what the loop reports; what is for the end is kept until then."""
        if kind == "out_of_memory":
            self._joining = list(body["joining"])
            return
        if self.events is None or kind not in get_args(EventKind):
            return
        if kind == "stopped" and self._lease_is_over:
            self._say(f"nothing was heard of a controller for {self._spec.lease_s:g} s")
            return
        self.events.tell(cast(EventKind, kind), job, body)


def import_all() -> None:
    """Imports all that a rank needs; starts no thread and does not touch a GPU."""
    from tlora_megatron.integrations.megatron import imports

    imports.quieten()
    import tlora_megatron.runtime.resident
    import tlora_megatron.service.request_log
    import tlora_megatron.service.worker.read_order  # noqa: F401
    from tlora_megatron.runtime.backbone import import_backbone

    import_backbone()


def gang_config(spec: GangSpec) -> Any:
    """The configuration of a gang: a run without jobs, whose output is the service's folder."""
    from tlora_megatron.config.load import read_gang_config

    sections = {"base_model": spec.base_model, "parallel": spec.parallel, "run": spec.run}
    return read_gang_config(sections, Path(spec.root), output_dir=spec.root)


def _tokens_to_score(home: Home, base: Mapping[str, Any], config: RunConfig) -> list[int]:
    """Tokens that a base is to score; none if it has, or if nobody can make tokens for it."""
    from tlora_megatron.training.data.tokenize import load_tokenizer

    try:
        if read_scores(home, base) is not None:
            return []
        tokens = load_tokenizer(config.base_model.folder).encode(TEXT, add_special_tokens=False)
    except (OSError, ValueError):
        return []
    most = min(MOST_TOKENS, config.longest_sequence)
    return [int(token) for token in tokens[:most]]


def _set_up(spec: GangSpec, rank: int) -> None:
    """Sets what torch and the package read from the environment, and the log."""
    nodes = [node for node, _ in spec.gpus]
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_RANK": "0",  # it sees its own GPU only
        "LOCAL_WORLD_SIZE": str(nodes.count(nodes[rank])),  # its cores are theirs
    }
    if len(set(nodes)) <= 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )


def end(code: int) -> NoReturn:
    """Ends this process; one that has failed waits for no thread of its own."""
    if code == 0:
        leave(0)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    end(main(sys.argv[1:]))
