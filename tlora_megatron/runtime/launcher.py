"""Starts one process per rank on this machine with torchrun, and lets a process leave."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

logger = logging.getLogger(__name__)


def run_with_torchrun(argv: Sequence[str], nproc: int) -> int:
    """Runs `python -m tlora_megatron.cli ARGV` in `nproc` processes and returns the exit code.

    The same as `torchrun --standalone --nproc-per-node NPROC -m tlora_megatron.cli ARGV`, but with
    the agent in this process: a signal sent here reaches the ranks, and the exit code is that of
    the first rank that failed, where torchrun ends with 1 and a traceback of its own.

    Args:
        argv: a command and its arguments, without `--nproc`.
        nproc: processes, at least 1.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    _set_environment(nproc)
    # A rank that fails has said why; the agent would add two lines about process ids.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        run(parse_args(torchrun_arguments(argv, nproc)))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        # A rank ended by a signal could not say anything. Shells give 128 + the signal's number.
        logger.error("rank %d was ended by signal %d", rank, -failure.exitcode)
        return 128 - failure.exitcode
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def leave_process_group() -> None:
    """Ends this process's part in the process group; NCCL warns of processes that only exit."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def torchrun_arguments(argv: Sequence[str], nproc: int) -> list[str]:
    """torchrun's arguments that run this package's command line on one machine."""
    return [
        "--standalone",
        "--nproc-per-node",
        str(nproc),
        "-m",
        "tlora_megatron.cli",
        *argv,
    ]


def _set_environment(nproc: int) -> None:
    cores = len(os.sched_getaffinity(0))
    # torchrun would set 1 thread however many cores there are.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    # Megatron's TP overlap relies on kernels starting in the order in which they were launched.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
