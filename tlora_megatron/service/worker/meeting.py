"""How the ranks of a gang find each other: rank 0 opens a store and says where it is."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from tlora_megatron.service.gang_folder import GangFolder
from tlora_megatron.service.messages import GangSpec

if TYPE_CHECKING:
    from torch.distributed import Store

_MEET_S = 300.0
"""Between the first and the last rank's start: imports from a slow file system."""
_LOOK_S = 0.01
_FILE = "meet.json"


def meet(spec: GangSpec, rank: int, folder: GangFolder, host: str | None = None) -> Store:
    """Returns the store of a gang; collective over its ranks.

    The kernel chooses the port while rank 0 already holds it, so nobody can take it in between.

    Args:
        host: rank 0's address for the others; None = loopback where all are on one node, else that
            of this host's name.

    Raises:
        TimeoutError: if rank 0 does not come.
    """
    from torch.distributed import PrefixStore

    store = _open(spec, folder, host) if rank == 0 else _find(folder)
    return PrefixStore(f"{spec.gang}-{spec.epoch}", store)


def _open(spec: GangSpec, folder: GangFolder, host: str | None) -> Store:
    from torch.distributed import TCPStore

    host = host or own_address(spec)
    listener = socket.create_server((host, 0), backlog=1024)
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        timeout=timedelta(seconds=_MEET_S),
    )
    folder.write(_FILE, f'{{"host": "{host}", "port": {port}}}')
    return store


def _find(folder: GangFolder) -> Store:
    from torch.distributed import TCPStore

    end_s = time.monotonic() + _MEET_S
    while (place := folder.read_json(_FILE)) is None:
        if time.monotonic() > end_s:
            raise TimeoutError(f"rank 0 must open its store within {_MEET_S:g} s, got none")
        time.sleep(_LOOK_S)
    return TCPStore(
        place["host"], place["port"], is_master=False, timeout=timedelta(seconds=_MEET_S)
    )


def leave_together(store: Store, rank: int) -> None:
    """Keeps ranks that have nothing left to do until rank 0 has not either.

    It may still write what was saved, and NCCL would abort it when another rank is gone.
    """
    if rank == 0:
        store.set("left", "")
        return
    with suppress(RuntimeError):  # the store ends with rank 0
        store.wait(["left"], timedelta(days=1))


def own_address(spec: GangSpec) -> str:
    """This host's address for the other ranks of a gang."""
    if len({node for node, _ in spec.gpus}) <= 1:
        return "127.0.0.1"
    return socket.gethostbyname(socket.gethostname())
