"""The process that speaks with Ray for a service, in lines of JSON on stdin and stdout.

    python -m tlora_megatron.service.engines.ray.bridge ADDRESS NAMESPACE

It is told `start`, `adopt`, `sweep` and `end`; it says `ready`, `nodes` (about once a second: a
sign of life), `ending`, `gone` and `lost`. It ends with its stdin; gangs go on.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from tlora_megatron.channel import LinePipe
from tlora_megatron.service.engines.ray.agent import Agent, reap

_LOOK_S = 0.02
_PULSE_S = 1.0
_WATCH_S = 30.0
"""Length of one question for a rank's end: those of services that were killed run out."""
_GRACE_S = 20.0
"""Without the cluster's head: Ray ends this process, and ranks without a word, after 60."""
_REAP_S = 5.0
_LEAVE_S = 10.0

RemoteAgent = ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"io": 8})(Agent)
_reap = ray.remote(num_cpus=0, max_retries=0)(reap)
Key = tuple[str, int]


class Gang:
    """The actors of one gang and what was asked of them."""

    def __init__(self, key: Key, path: str, agents: list[ActorHandle]) -> None:
        self.key = key
        self.path = path
        self.agents = agents
        self.watches = {rank: self._watch(rank) for rank in range(len(agents))}
        self.codes: dict[int, int | None] = {}
        self.reaping: list[ray.ObjectRef] = []
        self.unproved: set[int] = set()
        self.first_s: float | None = None
        """When the first of its processes ended."""
        self.is_told = False
        self.end_s: float | None = None

    def _watch(self, rank: int) -> ray.ObjectRef:
        return self.agents[rank].watch.options(concurrency_group="io").remote(_WATCH_S)

    @property
    def is_missed(self) -> bool:
        """True once a rank has failed; after one that has not, the others have time to end."""
        if not self.codes or self.end_s is not None:
            return False
        self.first_s = self.first_s or time.monotonic()
        is_late = time.monotonic() > self.first_s + _LEAVE_S
        return (
            any(self.codes.values()) or None in self.codes.values() or not self.watches or is_late
        )

    def look(self) -> None:
        """Takes what was answered."""
        for rank, ref in list(self.watches.items()):
            if not _is_ready(ref):
                continue
            try:
                answer = ray.get(ref, timeout=1)
            except ray.exceptions.RayError:
                answer = {"code": None}
            if answer is None:
                self.watches[rank] = self._watch(rank)
            else:
                del self.watches[rank]
                self.codes[rank] = answer["code"]

    def kill(self, ranks: list[int]) -> None:
        """Ends the actors, with which their ranks end, and asks all nodes to prove that of some."""
        self.end_s = time.monotonic()
        self.unproved = set(ranks)
        for agent in self.agents:
            ray.kill(agent, no_restart=True)
        for node in [n for n in ray.nodes() if n["Alive"]] if ranks else ():
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            asked = _reap.options(scheduling_strategy=strategy)
            self.reaping.append(asked.remote(self.path, ranks, _REAP_S))


class Bridge:
    """Connects to a cluster and serves one service."""

    def __init__(self, address: str, namespace: str, pipe: LinePipe) -> None:
        self._pipe = pipe
        self._prefix = f"{namespace}."
        ray.init(
            address=address,
            namespace=namespace,
            log_to_driver=False,
            configure_logging=False,
        )
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        self._head = (host.strip("[]"), int(port))
        self._gangs: dict[Key, Gang] = {}
        self._heard_s = time.monotonic()
        self._pulse_s = 0.0

    def serve(self) -> None:
        """Serves until stdin ends or the cluster is lost."""
        self._say("ready", nodes=_nodes(), actors=_actors())
        while not self._pipe.is_over:
            self._pipe.wait(_LOOK_S)
            for order in self._pipe.receive():
                getattr(self, f"_do_{order.pop('do')}")(**order)
            for gang in list(self._gangs.values()):
                self._look(gang)
            if time.monotonic() > self._pulse_s + _PULSE_S:
                self._pulse_s = time.monotonic()
                if not self._pulse():
                    return

    def _do_start(
        self,
        gang: str,
        epoch: int,
        path: str,
        places: list[list[Any]],
        uses_gpus: bool,
        command: list[str],
        environment: Mapping[str, str],
    ) -> None:
        """Begins to start a gang; `places` are address and worker slots of each rank's node."""
        kind = {"GPU": 1} if uses_gpus else {"CPU": 1}
        bundles = [{**kind, f"node:{address}": 0.001} for address, _ in places]
        group = placement_group(
            bundles, strategy="PACK", name=f"{self._prefix}{gang}.{epoch}", lifetime="detached"
        )
        agents = [
            RemoteAgent.options(
                name=f"gang.{gang}.{epoch}.{rank}",
                lifetime="detached",
                num_cpus=kind.get("CPU", 0),
                num_gpus=kind.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=rank
                ),
            ).remote(path, rank, command, environment, slots)
            for rank, (_, slots) in enumerate(places)
        ]
        self._gangs[gang, epoch] = Gang((gang, epoch), path, agents)

    def _do_adopt(self, gang: str, epoch: int, path: str, size: int) -> None:
        """Takes up a gang that another process has started."""
        names = [f"gang.{gang}.{epoch}.{rank}" for rank in range(size)]
        try:
            agents = [ray.get_actor(name) for name in names]
        except ValueError:  # one has ended since it was listed
            self._say("gone", gang=gang, epoch=epoch, is_proved=False)
            return
        self._gangs[gang, epoch] = Gang((gang, epoch), path, agents)

    def _do_sweep(self) -> None:
        """Ends what belongs to no gang that is known: leaked actors and places."""
        known = {f"{gang}.{epoch}" for gang, epoch in self._gangs}
        for name in _actors():
            if name.removeprefix("gang.").rpartition(".")[0] not in known:
                ray.kill(ray.get_actor(name), no_restart=True)
        for found in placement_group_table().values():
            name = found["name"]
            if (
                name.startswith(self._prefix)
                and name.removeprefix(self._prefix) not in known
                and found["state"] != "REMOVED"
            ):
                remove_placement_group(ray.util.get_placement_group(name))

    def _do_end(self, gang: str, epoch: int, unproved: list[int]) -> None:
        """Ends a gang; of some of its ranks the service has no proof by itself."""
        found = self._gangs.get((gang, epoch))
        if found and found.end_s is None:
            found.kill(unproved)

    def _look(self, gang: Gang) -> None:
        gang.look()
        if gang.is_missed and not gang.is_told:
            gang.is_told = True
            self._say("ending", gang=gang.key[0], epoch=gang.key[1], codes=list(gang.codes.items()))
        if gang.end_s is not None and not gang.watches:
            self._finish(gang, gang.end_s)

    def _finish(self, gang: Gang, end_s: float) -> None:
        """Says that a gang is gone once its nodes have proved it, or cannot."""
        ready = [ref for ref in gang.reaping if _is_ready(ref)]
        if len(ready) < len(gang.reaping) and time.monotonic() < end_s + 2 * _REAP_S:
            return
        for ref in ready:
            with suppress(ray.exceptions.RayError):
                gang.unproved -= set(ray.get(ref, timeout=1))
        with suppress(ValueError):  # another service's sweep may have been quicker
            name = f"{self._prefix}{gang.key[0]}.{gang.key[1]}"
            remove_placement_group(ray.util.get_placement_group(name))
        del self._gangs[gang.key]
        self._say("gone", gang=gang.key[0], epoch=gang.key[1], is_proved=not gang.unproved)

    def _pulse(self) -> bool:
        """Says that all is well; False once the cluster's head was away for too long."""
        now_s = time.monotonic()
        try:
            socket.create_connection(self._head, timeout=1).close()
            self._heard_s = now_s
        except OSError as error:
            if now_s > self._heard_s + _GRACE_S:
                self._say("lost", reason=f"Ray's head at {self._head} is gone: {error}")
                return False
            self._say("pulse")
            return True
        self._say("nodes", nodes=_nodes())
        return True

    def _say(self, what: str, **more: Any) -> None:
        self._pipe.send({"say": what, **more})


def main(address: str, namespace: str) -> None:
    """Connects and serves; says why where it cannot connect."""
    pipe = LinePipe.of_child()  # Ray prints on stdout
    try:
        bridge = Bridge(address, namespace, pipe)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        reason = f"{error}; it looks the same where the token is wrong"
        pipe.send({"say": "lost", "reason": reason})
        return
    bridge.serve()


def _is_ready(ref: ray.ObjectRef) -> bool:
    ready, _ = ray.wait([ref], timeout=0)
    return bool(ready)


def _actors() -> list[str]:
    return [name for name in ray.util.list_named_actors() if name.startswith("gang.")]


def _nodes() -> list[dict[str, Any]]:
    return [
        {
            "id": node["NodeID"],
            "address": node["NodeManagerAddress"],
            "gpus": int(node["Resources"].get("GPU", 0)),
            "cpus": int(node["Resources"].get("CPU", 0)),
            "alive": node["Alive"],
        }
        for node in ray.nodes()
    ]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
    os._exit(0)
