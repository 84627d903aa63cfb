"""Gangs on a Ray cluster: detached actors in a placement group, an actor a rank."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tlora_megatron.service.engines.base import GangEngine, GangHandle
from tlora_megatron.service.engines.protocol import (
    HOST_VARIABLE,
    RANK_COMMAND,
    NodeInfo,
    blame,
    inherited_environment,
    say_died,
)
from tlora_megatron.service.engines.ray.agent import reap
from tlora_megatron.service.home import make_folder
from tlora_megatron.service.messages import GangFolder, GangSpec
from tlora_megatron.service.supervisor import Child, package_path

logger = logging.getLogger(__name__)

AUTH = "RAY_AUTH_MODE"
ADDRESS = "RAY_ADDRESS"
_TOKEN_FILE = "RAY_AUTH_TOKEN_PATH"
_BRIDGE = "tlora_megatron.service.engines.ray.bridge"
_PROBE = "import ray; ray.init({address!r}, log_to_driver=False, configure_logging=False)"
_CONNECT_S = 60.0
_SILENCE_S = 30.0
"""Longest silence of the bridge: it speaks every second, unless a call of Ray does not return."""
_LOOK_S = 0.05


def cluster_address(address: str | None) -> str:
    """The address of a cluster that asks for a token; None = that of RAY_ADDRESS.

    Raises:
        ImportError: if Ray is not installed.
        ValueError: if there is no address, or programs may talk to the cluster without a token.
        RuntimeError: if nobody answers.
    """
    if importlib.util.find_spec("ray") is None:
        raise ImportError("--engine ray must find Ray; pip install 'tlora-megatron[ray]'")
    address = address or os.environ.get(ADDRESS)
    if not address:
        raise ValueError(
            f"{ADDRESS} must name a cluster for --engine ray, got none; `ray start --head` starts "
            f"one, as docs/engines.md says, and --engine local needs none on one host"
        )
    mode = os.environ.get(AUTH)
    if mode != "token":
        raise ValueError(
            f"{AUTH} must be token for --engine ray, got {mode}: whoever reaches a port of a Ray "
            f"cluster without it can run code there; start the cluster and the service with "
            f"{AUTH}=token and {_TOKEN_FILE}"
        )
    if _is_open(address):
        raise ValueError(
            f"the Ray cluster at {address} must ask for a token, got one that lets everybody in "
            f"and run code; start all of its nodes with {AUTH}=token and {_TOKEN_FILE}"
        )
    return address


@functools.cache
def _is_open(address: str) -> bool:
    """True if a program without a token gets in; it is ended as soon as it is refused."""
    environment = {**inherited_environment(), AUTH: "disabled", "PYTHONPATH": package_path()}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "probe.log"
        command = [sys.executable, "-c", _PROBE.format(address=address)]
        probe = Child(command, environment=environment, log=log)
        try:
            while True:
                code = probe.exit_code  # before its words, so that none is missed
                said = log.read_text(errors="replace")
                if "Unauthenticated" in said or "AuthenticationError" in said:
                    return False
                if code is not None:
                    break
                time.sleep(_LOOK_S)
        finally:
            probe.kill()
    if code == 0:
        return True
    raise RuntimeError(f"Ray must be reachable at {address}, got no answer")


class Connection:
    """One bridge, from its start to its end."""

    def __init__(self, address: str, namespace: str, log: Path) -> None:
        environment = inherited_environment()
        environment |= {"PYTHONPATH": package_path(), "RAY_DEDUP_LOGS": "0"}
        command = [sys.executable, "-m", _BRIDGE, address, namespace]
        self._child = Child(command, environment=environment, log=log, wire="lines")
        self._spoke_s = time.monotonic()
        self.is_ready = False
        """True once it is connected with Ray."""
        self.why: str | None = None
        """The reason that it has given for its end."""

    @property
    def is_over(self) -> bool:
        """True once it has ended, or says nothing any more."""
        silence_s = time.monotonic() - self._spoke_s
        is_silent = silence_s > (_SILENCE_S if self.is_ready else _CONNECT_S)
        if is_silent:
            self.why = self.why or f"Ray has not answered for {silence_s:.0f} s"
        return is_silent or self._child.pipe.is_over or self._child.exit_code is not None

    def send(self, do: str, **more: Any) -> None:
        """Tells the bridge one thing; one that has ended hears nothing."""
        self._child.pipe.send({"do": do, **more})

    def receive(self) -> Sequence[Mapping[str, Any]]:
        """Takes the bridge's messages that have come in; never waits."""
        messages = self._child.pipe.receive()
        for message in messages:
            self._spoke_s = time.monotonic()
            if message["say"] == "lost":
                self.why = message["reason"]
        return messages

    def close(self) -> None:
        self._child.kill()


_HALF_STARTED = "its actors are not there; its start was broken off, or they have ended"
_OPEN_S = 90.0
_AGAIN_S = 5.0
"""Between two attempts to reach a cluster that is lost."""
_REAP_S = 2.0


class RayGang(GangHandle):
    """The actors of one start of a gang, seen through the bridge, and its folder."""

    def __init__(self, folder: GangFolder, spec: GangSpec) -> None:
        super().__init__(folder, spec)
        self.is_told = False
        """True once the bridge was asked to end it."""

    @property
    def key(self) -> dict[str, Any]:
        """Its name and epoch, as the bridge is told them."""
        return {"gang": self.spec.gang, "epoch": self.spec.epoch}

    def look(self) -> None:
        """Does nothing: the bridge tells the engine of its end."""

    def kill(self, reason: str) -> None:
        """Begins to end all processes; `end` carries it on."""
        self.died = self.died or {"rank": 0, "reason": reason}

    def release(self) -> None:
        """Does nothing: nothing of it is held here."""

    def end(self, connection: Connection | None) -> None:
        """Ends what runs in reach of this process, and has the bridge end the rest."""
        if self.is_over or self.died is None or (self.is_told and connection is not None):
            return
        self.folder.close()
        ranks = list(range(self.spec.world_size))
        unproved = sorted(set(ranks) - set(reap(str(self.folder.path), ranks, _REAP_S)))
        if connection is None:
            self.finish(is_proved=not unproved)
        else:
            self.is_told = True
            connection.send("end", **self.key, unproved=unproved)

    def finish(self, *, is_proved: bool) -> None:
        say_died(self.folder, self.died or {"rank": 0, "reason": "it has ended"})
        self.is_over, self.is_proved = True, is_proved


class RayEngine(GangEngine[RayGang]):
    """`GangEngine` on Ray, which runs in a child process (`bridge`); no call of it can hang.

    Actors of no gang that is known are ended. All nodes must see the folder and have this package.

    Raises:
        ValueError, ImportError, RuntimeError: as `cluster_address`.
    """

    kill_s = 15.0  # a node that has to prove it may have to start a process first

    def __init__(
        self,
        root: Path | str,
        *,
        address: str | None = None,
        rank_command: Sequence[str] = RANK_COMMAND,
    ) -> None:
        self.address = cluster_address(address)
        super().__init__(root, rank_command)
        self._folder = make_folder(self.home.root / "ray")
        digest = hashlib.sha256(str(self.home.root).encode()).hexdigest()
        self._namespace = f"tlora-{digest[:12]}"
        self._nodes: tuple[NodeInfo, ...] = ()
        self._ids: list[str] = []
        """Ray's names of the nodes, in the order in which they were first seen."""
        self._has_gpus = self._is_lost = False
        self._connection = self._connect()
        self.adopt_all()
        end_s = time.monotonic() + _OPEN_S
        while not self._connection.is_ready:
            self._hear()
            if self._connection.is_over or time.monotonic() > end_s:
                self._connection.close()
                raise RuntimeError(f"Ray must be reachable at {self.address}, got {self._why}")
            time.sleep(0.01)

    def launch(self, folder: GangFolder, spec: GangSpec) -> RayGang:
        gang = RayGang(folder, spec)
        nodes = [self._nodes[node] for node, _ in spec.gpus]
        threads = os.environ.get("OMP_NUM_THREADS")
        environment = {"OMP_NUM_THREADS": threads} if threads else {}
        if len({node.node for node in nodes}) > 1:
            environment[HOST_VARIABLE] = nodes[0].address
        self._connection.send(
            "start",
            **gang.key,
            path=str(folder.path),
            places=[(node.address, node.gpus) for node in nodes],
            uses_gpus=self._has_gpus,
            command=self.rank_command,
            environment=environment,
        )
        return gang

    def adopt(self, folder: GangFolder, *, has_stopped: bool) -> RayGang:
        """Takes up a gang; the bridge will say what is left of it."""
        return RayGang(folder, folder.spec())

    def check_reachable(self, spec: GangSpec) -> None:
        if not self._connection.is_ready or self._connection.is_over:
            raise RuntimeError(f"Ray must be reachable to start gang {spec.gang}, got {self._why}")

    def nodes(self) -> Sequence[NodeInfo]:
        """The cluster's nodes, also those that it has lost."""
        self.look()
        return self._nodes

    def close(self) -> None:
        """Lets go of the gangs, which go on; those that have stopped leave the cluster first."""
        end_s = time.monotonic() + self.kill_s
        while time.monotonic() < end_s and any(
            gang.has_stopped and not gang.is_over for gang in self._gangs.values()
        ):
            self.look()
            time.sleep(0.01)
        self._connection.close()
        super().close()

    def look(self) -> None:
        """Hears the bridge and ends gangs of which a process was missed; looks after the bridge."""
        self._hear()
        if self._is_lost:
            if time.monotonic() > self._tried_s + _AGAIN_S:
                self._is_lost, self._ids = False, []
                self._connection = self._connect()
        elif self._connection.is_over:
            self._lose_bridge()
        for gang in self._gangs.values():
            if self._is_lost:
                gang.kill(f"Ray is lost: {self._why}")
                gang.end(None)
            elif self._connection.is_ready:
                gang.end(self._connection)

    @property
    def _why(self) -> str:
        return self._connection.why or f"no answer; {self._folder}/bridge.log may say why"

    def _connect(self) -> Connection:
        self._tried_s = time.monotonic()
        return Connection(self.address, self._namespace, self._folder / "bridge.log")

    def _hear(self) -> None:
        for words in self._connection.receive():
            what = words["say"]
            if what in ("ready", "nodes"):
                self._see_nodes(words["nodes"])
            if what == "ready":
                self._connection.is_ready = True
                self._take_up(frozenset(words["actors"]))
            elif what in ("ending", "gone"):
                gang = self._gangs.get((words["gang"], words["epoch"]))
                if gang is None or gang.is_over:
                    continue
                if what == "ending":
                    gang.died = gang.died or blame(gang.folder, dict(words["codes"]))
                else:
                    gang.kill(_HALF_STARTED)
                    gang.finish(is_proved=words["is_proved"])

    def _take_up(self, actors: frozenset[str]) -> None:
        """Tells a new bridge of the gangs; those whose actors are not all there are ended."""
        halves = []
        for key, gang in self._gangs.items():
            names = {f"gang.{key[0]}.{key[1]}.{rank}" for rank in range(gang.spec.world_size)}
            if gang.is_over:
                continue
            if names <= actors:
                size = gang.spec.world_size
                self._connection.send("adopt", **gang.key, path=str(gang.folder.path), size=size)
            else:
                halves.append(gang)
        self._connection.send("sweep")
        for gang in halves:
            gang.kill(_HALF_STARTED)
            gang.end(None)

    def _see_nodes(self, found: Sequence[Mapping[str, Any]]) -> None:
        """Numbers the nodes by when they were first seen."""
        by_id = {node["id"]: node for node in found}
        new = sorted(set(by_id) - set(self._ids), key=lambda name: by_id[name]["address"])
        self._ids += [name for name in new if by_id[name]["alive"]]
        self._has_gpus = any(node["gpus"] for node in found)
        kind = "gpus" if self._has_gpus else "cpus"
        known = {name: by_id.get(name) for name in self._ids}
        self._nodes = tuple(
            NodeInfo(node=number, address=node["address"], gpus=node[kind], healthy=node["alive"])
            if node is not None
            else replace(self._nodes[number], healthy=False)
            for number, node in enumerate(known.values())
        )

    def _lose_bridge(self) -> None:
        """Starts another bridge; if it is the cluster that is gone, all gangs are lost."""
        self._hear()  # it may have said why
        had_connected, why = self._connection.is_ready, self._connection.why
        self._connection.close()
        for gang in self._gangs.values():
            gang.is_told = False
        if had_connected and why is None:
            logger.warning("the bridge to Ray has ended by itself; another one is started")
            self._connection = self._connect()
            return
        self._is_lost = True
        self._nodes = tuple(replace(node, healthy=False) for node in self._nodes)
        logger.error("Ray is lost: %s", self._why)
