"""Gangs on a Ray cluster: detached actors in a placement group, an actor a rank."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tlora_megatron.service.engines.local.seats import Seats
from tlora_megatron.service.engines.past import PastGangs, gang_folders
from tlora_megatron.service.engines.present import check_places, infos
from tlora_megatron.service.engines.protocol import Cursor, GangInfo, NodeInfo
from tlora_megatron.service.engines.rank_process import HOST_VARIABLE, RANK_COMMAND
from tlora_megatron.service.engines.ray.cluster import (
    ADDRESS,
    Cluster,
    check_installed,
    end_cluster,
    given_cluster,
    own_cluster,
)
from tlora_megatron.service.engines.ray.connection import Connection
from tlora_megatron.service.engines.ray.gang import RayGang
from tlora_megatron.service.home import Home, make_folder
from tlora_megatron.service.mail.folder import EventReader, GangFolder
from tlora_megatron.service.messages import Command, GangEvent, GangSpec

logger = logging.getLogger(__name__)

_ASKED = "the service has ended it"
_HALF_STARTED = "its actors are not there; its start was broken off, or they have ended"
_OPEN_S = 90.0
_KILL_S = 15.0
"""For which `kill` waits: a node that has to prove it may have to start a process first."""
_AGAIN_S = 5.0
"""Between two attempts to reach a cluster that is lost."""


class RayEngine:
    """`GangEngine` on Ray, which runs in a child process (`bridge`); no call of it can hang.

    Gangs that an earlier engine has started for the same folder are taken up; actors of no gang
    that is known are ended. All nodes must see the folder and have this package installed.

    Args:
        root: the service's folder.
        gpus: of a cluster of its own: GPUs to use, or places on a host without any; None = all.
        seats: of a cluster of its own on a host without GPUs; None = one a core.
        address: of a cluster that is there; None = that of RAY_ADDRESS, or one of its own.
        rank_command: for tests.

    Raises:
        ValueError: if the cluster asks for no token.
        ImportError: if Ray is not installed.
        RuntimeError: if the cluster cannot be reached.
    """

    shares_gpus = False  # the cluster gives a gang's GPUs out when it is gone

    def __init__(
        self,
        root: Path | str,
        gpus: int | None = None,
        *,
        seats: int | None = None,
        address: str | None = None,
        rank_command: Sequence[str] = RANK_COMMAND,
    ) -> None:
        check_installed()
        self._home = Home.open(root)
        self._folder = make_folder(self._home.root / "ray")
        self._rank_command = list(rank_command)
        digest = hashlib.sha256(str(self._home.root).encode()).hexdigest()
        self._namespace = f"tlora-{digest[:12]}"
        given = address or os.environ.get(ADDRESS)
        self._open_cluster = (
            (lambda: given_cluster(given)) if given else self._own_cluster(gpus, seats)
        )
        self._gangs: dict[tuple[str, int], RayGang] = {}
        """Those that may have processes, and those that are gone and were not told of since."""
        self._past = PastGangs(self._home.root)
        self._since: dict[tuple[str, int], int] = {}
        self._nodes: tuple[NodeInfo, ...] = ()
        self._ids: list[str] = []
        """Ray's names of the nodes, in the order in which they were first seen."""
        self._has_gpus = self._is_lost = False
        self._search: _Search | None = None
        self._tried_s = 0.0
        self.cluster = self._open_cluster()
        """The cluster in use; another one once that is lost."""
        self._connection = self._connect()
        self._find_gangs()
        self._wait_until_ready()

    def start(self, spec: GangSpec) -> None:
        """Begins to start the actors of a gang; a second call with the same epoch does nothing.

        Raises:
            RuntimeError: while Ray cannot be reached.
        """
        key = (spec.gang, spec.epoch)
        folder = GangFolder(self._home.root, spec.gang, spec.epoch)
        if key in self._gangs or folder.has_spec:
            return
        check_places(spec, [node.gpus for node in self._nodes])
        if not self._connection.is_ready or self._connection.is_over:
            raise RuntimeError(f"Ray must be reachable to start gang {spec.gang}, got {self._why}")
        folder.create(spec)
        gang = self._gangs[key] = RayGang(folder, spec)
        nodes = [self._nodes[node] for node, _ in spec.gpus]
        environment = {
            name: value for name in ("OMP_NUM_THREADS",) if (value := os.environ.get(name))
        }
        if len({node.node for node in nodes}) > 1:
            environment[HOST_VARIABLE] = nodes[0].address
        self._connection.send(
            "start",
            **gang.key,
            path=str(folder.path),
            places=[(node.address, node.gpus) for node in nodes],
            uses_gpus=self._has_gpus,
            command=self._rank_command,
            environment=environment,
        )

    def post(self, command: Command) -> None:
        """Hands a command to a gang's first actor; one for a gang that is over is dropped."""
        gang = self._gangs.get((command.gang, command.epoch))
        if gang is not None:
            is_there = self._connection.is_ready and not self._connection.is_over
            gang.post(command, self._connection if is_there else None)

    def poll(self, since: Cursor) -> Sequence[GangEvent]:
        """Events after the cursor; deaths are seen and acted on here, so call it often."""
        self._since = {key: since.get(key, self._since.get(key, 0)) for key in self._gangs}
        self._listen()
        events = self._past.events(since, self._gangs)
        for key, gang in list(self._gangs.items()):
            if gang.is_over and gang.is_proved:
                del self._gangs[key]
            elif gang.is_over and key not in since:
                continue
            events += gang.events(since.get(key, 0))
        self._past.sweep(self._gangs)
        return events

    def kill(self, gang: str, epoch: int) -> bool:
        """Ends all processes of a gang; True with proof of every node that they are gone."""
        known = self._gangs.get((gang, epoch))
        if known is None:
            return True
        known.is_missed({"rank": 0, "reason": _ASKED})
        self._wait(lambda: known.is_over, _KILL_S)
        return known.is_over and known.is_proved

    def gangs(self) -> Sequence[GangInfo]:
        """Gangs with processes, started here or taken up."""
        self._listen()
        return infos(self._gangs)

    def nodes(self) -> Sequence[NodeInfo]:
        """The cluster's nodes, also those that it has lost."""
        self._listen()
        return self._nodes

    @property
    def bridge_pid(self) -> int:
        """The process that speaks with Ray."""
        return self._connection.pid

    def close(self) -> None:
        """Lets go of the gangs, which go on; a cluster of its own without any is ended."""
        if all(gang.has_stopped for gang in self._gangs.values()):
            self._wait(lambda: not self.gangs(), _KILL_S)
        is_idle = not self.gangs()
        self._connection.close()
        if is_idle:
            end_cluster(self.cluster)

    def _own_cluster(self, gpus: int | None, seats: int | None) -> Callable[[], Cluster]:
        has_gpus = bool(Seats.of_host(None, None).devices)
        here = Seats.of_host(gpus if has_gpus else None, seats or gpus)
        count = len(here.devices)
        cpus = os.cpu_count() or 1 if count else here.count
        return lambda: own_cluster(self._folder, cpus=cpus, gpus=count)

    @property
    def _why(self) -> str:
        return self._connection.why or f"no answer; {self._folder}/bridge.log may say why"

    def _connect(self) -> Connection:
        self._tried_s = time.monotonic()
        return Connection(self.cluster, self._namespace, self._folder / "bridge.log")

    def _wait_until_ready(self) -> None:
        """Waits for the first connection.

        Raises:
            RuntimeError: if there is none.
        """
        end_s = time.monotonic() + _OPEN_S
        while not self._connection.is_ready:
            self._hear()
            if self._connection.is_over or time.monotonic() > end_s:
                self._connection.close()
                raise RuntimeError(
                    f"Ray must be reachable at {self.cluster.address}, got {self._why}"
                )
            time.sleep(0.01)

    def _wait(self, is_reached: Callable[[], bool], seconds: float) -> None:
        end_s = time.monotonic() + seconds
        self._listen()
        while not is_reached() and time.monotonic() < end_s:
            time.sleep(0.01)
            self._listen()

    def _listen(self) -> None:
        """Hears the bridge and ends gangs of which a process was missed; looks after the bridge."""
        self._hear()
        if self._is_lost:
            self._come_back()
        elif self._connection.is_over or self.cluster.is_over:
            self._lose_bridge()
        for gang in self._gangs.values():
            if self._is_lost:
                gang.is_missed({"rank": 0, "reason": f"Ray is lost: {self._why}"})
                gang.end(None)
            elif self._connection.is_ready:
                gang.end(self._connection)

    def _hear(self) -> None:
        for words in self._connection.receive():
            what = words["say"]
            if what in ("ready", "nodes"):
                self._see_nodes(words["nodes"])
            if what == "ready":
                self._connection.is_ready = True
                self._take_up(frozenset(words["actors"]))
            elif what in ("events", "ending", "gone"):
                self._hear_of(self._gangs.get((words["gang"], words["epoch"])), words)

    def _hear_of(self, gang: RayGang | None, words: Mapping[str, Any]) -> None:
        if gang is None or gang.is_over:
            return
        if words["say"] == "events":
            gang.hear(words["lines"])
        elif words["say"] == "ending":
            gang.is_missed(dict(words["codes"]))
        else:
            gang.is_missed({"rank": 0, "reason": _HALF_STARTED})
            gang.finish(is_proved=words["is_proved"])

    def _find_gangs(self) -> None:
        """Looks for gangs in the folder that are not over."""
        for folder in gang_folders(self._home):
            last = EventReader(folder).last()
            if folder.has_spec and (last is None or last.kind != "died"):
                self._gangs[folder.gang, folder.epoch] = RayGang(folder, folder.spec())
        self._past.remove_old(self._gangs)

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
                gang.adopted(self._connection, self._since.get(key, 0))
            else:
                halves.append(gang)
        self._connection.send("sweep")
        for gang in halves:
            gang.is_missed({"rank": 0, "reason": _HALF_STARTED})
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
        """Starts another bridge; if there is no cluster for it, all gangs are lost."""
        had_connected, why = self._connection.is_ready, self._connection.why
        self._connection.close()
        for gang in self._gangs.values():
            gang.forget_bridge()
        if had_connected and why is None and not self.cluster.is_over:
            logger.warning("the bridge to Ray has ended by itself; another one is started")
            self._connection = self._connect()
            return
        self._is_lost = True
        self._nodes = tuple(replace(node, healthy=False) for node in self._nodes)
        logger.error("Ray is lost: %s", self._why)

    def _come_back(self) -> None:
        """Looks for the cluster again, or starts another one of its own; without waiting for it."""
        if self._search is None and time.monotonic() > self._tried_s + _AGAIN_S:
            self._tried_s = time.monotonic()
            self._search = _Search(self._open_cluster)
        elif self._search is not None and self._search.is_over:
            cluster, self._search = self._search.found, None
            if cluster is not None:
                self.cluster, self._is_lost, self._ids = cluster, False, []
                self._connection = self._connect()


class _Search:
    """Opens a cluster in a thread: a new one takes seconds to start."""

    def __init__(self, open_cluster: Callable[[], Cluster]) -> None:
        self.found: Cluster | None = None
        self._open = open_cluster
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """True once there is a cluster, or none could be had."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.found = self._open()
        except (RuntimeError, ValueError, OSError) as error:
            logger.warning("%s", error)
