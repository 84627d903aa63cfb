"""How the ranks of a gang find each other, and notice that one of them is gone.

Neither NCCL nor a GPU that waits for a dead rank does: the others would hold their GPUs until
somebody ends them. Every rank keeps a connection to rank 0 open, which the kernel closes with
either process, whatever has started them and wherever they are.
"""

from __future__ import annotations

import json
import secrets
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, cast

from tlora_megatron.service.messages import GangFolder, GangSpec

if TYPE_CHECKING:
    from torch.distributed import Store


_MEET_S = 300.0
"""Between the first and the last rank's start: imports from a slow file system."""
_MEETING_LOOK_S = 0.01
_FILE = "meet.json"


def meet(spec: GangSpec, rank: int, folder: GangFolder, host: str) -> Store:
    """Returns the store of a gang, on a port that the kernel chooses; collective over its ranks.

    Args:
        host: rank 0's address for the others.

    Raises:
        TimeoutError: if rank 0 does not come.
    """
    from torch.distributed import PrefixStore, TCPStore

    timeout, end_s = timedelta(seconds=_MEET_S), time.monotonic() + _MEET_S
    if rank == 0:
        listener = socket.create_server((host, 0), backlog=_BACKLOG)
        port = listener.getsockname()[1]
        store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            timeout=timeout,
        )
        folder.write(_FILE, f'{{"host": "{host}", "port": {port}}}')
    else:
        while (place := folder.read_json(_FILE)) is None:
            if time.monotonic() > end_s:
                raise TimeoutError(f"rank 0 must open its store within {_MEET_S:g} s, got none")
            time.sleep(_MEETING_LOOK_S)
        store = TCPStore(place["host"], place["port"], is_master=False, timeout=timeout)
    return PrefixStore(f"{spec.gang}-{spec.epoch}", store)


def leave_together(store: Store, rank: int) -> None:
    """Keeps ranks that are done until rank 0 is: NCCL would abort what it may still write."""
    if rank == 0:
        store.set("left", "")
        return
    with suppress(RuntimeError):  # the store ends with rank 0
        store.wait(["left"], timedelta(days=1))


def own_address(spec: GangSpec) -> str:
    """This host's address for the other ranks: loopback where all are on one node."""
    if len({node for node, _ in spec.gpus}) <= 1:
        return "127.0.0.1"
    return socket.gethostbyname(socket.gethostname())


GRACE_S = 2.0
"""From a death to the end of those who notice it by themselves: an engine that watches is quicker,
and finds out who was first."""
_BACKLOG = 1024
_KEY = "peer_watchdog"
_GOODBYE = b"."
_HELLO_S = 5.0
_LOOK_S = 1.0
_SILENT_NODE_S = 5
"""Between two questions whether a silent node is there; it is gone after three without answer."""


@contextmanager
def peer_watchdog(
    store: Store, rank: int, world_size: int, host: str, on_lost: Callable[[], None]
) -> Iterator[None]:
    """Watches over the other ranks in the block, which all leave together; `host` is rank 0's.

    `on_lost` is called on a thread, some time after a rank has ended inside its block.
    """
    if world_size == 1:
        yield
        return
    line = _Watchdog(on_lost)
    if rank == 0:
        line.open(store, host)
    else:
        line.connect(store)
    line.watch()
    yield  # who leaves by an exception says no goodbye: the others are to end
    line.leave()


class _Watchdog:
    def __init__(self, on_lost: Callable[[], None]) -> None:
        self._on_lost = on_lost
        self._selector = selectors.DefaultSelector()
        self._token = b""
        self._turn = threading.Lock()
        self._is_over = False

    def open(self, store: Store, host: str) -> None:
        """Listens at a port of the kernel's choice and says where."""
        listener = socket.create_server((host, 0), backlog=_BACKLOG)
        self._token = secrets.token_hex(16).encode()
        place = [host, listener.getsockname()[1], self._token.decode()]
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        store.set(_KEY, json.dumps(place))

    def connect(self, store: Store) -> None:
        host, port, token = json.loads(store.get(_KEY))
        connection = socket.create_connection((host, port))
        connection.sendall(token.encode())
        self._keep(connection)

    def watch(self) -> None:
        threading.Thread(target=self._watch, name="tlora-peer-watchdog", daemon=True).start()

    def leave(self) -> None:
        """Says goodbye; nobody is missed from now on."""
        with self._turn:
            self._is_over = True
            self._accept_waiting()
            for connection in self._sockets(self._hear):
                with suppress(OSError):
                    connection.send(_GOODBYE)
            self._close()

    def _watch(self) -> None:
        while not self._is_over:
            ready = self._selector.select(_LOOK_S)
            with self._turn:
                if self._is_over:
                    return
                is_lost = any(key.data(key.fileobj) for key, _ in ready)
                if is_lost:
                    self._close()  # so that the others notice it now
            if is_lost:
                time.sleep(GRACE_S)
                self._on_lost()
                return

    def _accept(self, listener: socket.socket) -> bool:
        with suppress(OSError):
            connection, _ = listener.accept()
            connection.settimeout(_HELLO_S)
            if secrets.compare_digest(_read(connection, len(self._token)), self._token):
                self._keep(connection)
            else:
                connection.close()
        return False

    def _accept_waiting(self) -> None:
        """Lets in who has connected already; without a goodbye it would take this for a death."""
        for listener in self._sockets(self._accept):
            waiting = select.poll()
            waiting.register(listener, select.POLLIN)
            for _ in range(_BACKLOG):
                if not waiting.poll(0):
                    break
                self._accept(listener)

    def _keep(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            connection.setsockopt(socket.IPPROTO_TCP, option, _SILENT_NODE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        self._selector.register(connection, selectors.EVENT_READ, self._hear)

    def _hear(self, connection: socket.socket) -> bool:
        """Reads what came; True if a rank has ended without a goodbye."""
        try:
            word = connection.recv(len(_GOODBYE))
        except BlockingIOError:
            return False
        except OSError:
            word = b""
        self._selector.unregister(connection)
        connection.close()
        return word != _GOODBYE

    def _sockets(self, *handlers: Callable[[socket.socket], bool]) -> list[socket.socket]:
        """The sockets that are watched for some handler."""
        keys = self._selector.get_map().values()
        return [cast(socket.socket, key.fileobj) for key in keys if key.data in handlers]

    def _close(self) -> None:
        for own in self._sockets(self._accept, self._hear):
            self._selector.unregister(own)
            own.close()


def _read(connection: socket.socket, count: int) -> bytes:
    """So many bytes, or those that came before the end."""
    found = b""
    while len(found) < count and (part := connection.recv(count - len(found))):
        found += part
    return found
