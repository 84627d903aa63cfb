"""Looks after what nobody reports: silent gangs, machines that come and go, gangs of nobody."""

from __future__ import annotations

import math

from tlora_megatron.service.control.books.live import LiveGang
from tlora_megatron.service.control.books.machines import Machines
from tlora_megatron.service.control.carrying import Carrying
from tlora_megatron.service.control.desk import Desk
from tlora_megatron.service.control.faults.deaths import hung
from tlora_megatron.service.store.leases import MARGIN_S

_TIDY_S = 3600.0


class Watching:
    """Checks gangs and machines from time to time."""

    def __init__(self, desk: Desk, carrying: Carrying) -> None:
        self._desk = desk
        self._carrying = carrying
        self._last_s = self._tidied_s = -math.inf

    def due_s(self) -> float:
        """When it looks next."""
        return self._last_s + self._desk.settings.look_s

    def look(self) -> bool:
        """Looks if it is time; True if the cluster has changed, and the books must be made anew."""
        desk, now_s = self._desk, self._desk.clock()
        if now_s < self.due_s():
            return False
        self._last_s = now_s
        desk.wants_actions = True
        with desk.store.transaction():
            for gang in list(desk.books.gangs.values()):
                self._check(gang, now_s)
        self._strangers()
        self._tidy(now_s)
        self._carrying.renew()
        return self._machines()

    def _check(self, gang: LiveGang, now_s: float) -> None:
        settings = self._desk.settings
        if gang.no_proof is not None:
            self._bury(gang, now_s)
        elif gang.state == "stopping" and now_s - gang.since_s > settings.stop_s:
            self._kill(gang, f"did not stop within {settings.stop_s:.0f} s")
        elif gang.state != "stopping" and not gang.gpus:
            self._carrying.kill(gang, "one of its machines is gone")
        elif gang.state != "stopping" and now_s - self._silent_since(gang) > settings.hang_s:
            self._kill(gang, f"said nothing for {settings.hang_s:.0f} s")

    def _silent_since(self, gang: LiveGang) -> float:
        """When a gang that has something to say was last heard."""
        if gang.state == "starting" or gang.seats:
            return max(gang.heard_s, gang.since_s)
        return math.inf

    def end(self, name: str, why: str) -> None:
        """Ends a gang whose words make no sense, and lets it start again."""
        gang = self._desk.books.gangs.get(name)
        if gang is not None and gang.no_proof is None:
            with self._desk.store.transaction():
                self._kill(gang, why, what="event_lost")

    def _kill(self, gang: LiveGang, why: str, *, what: str = "hung") -> None:
        desk, was = self._desk, gang.state
        if was == "starting":
            held = desk.books.members(gang.name)
        else:
            held = [desk.books.jobs[job] for job in gang.seats if job in desk.books.jobs]
        proven = self._carrying.kill(gang, why)
        then = "it starts again" if proven else "its jobs wait until its lease has run out"
        desk.say(what, f"gang {gang.name} {why} and was killed: {then}", gang=gang.name)
        if proven and was != "stopping":
            hung(desk, gang, held, f"its gang {why}")

    def _bury(self, gang: LiveGang, now_s: float) -> None:
        """Asks again whether a killed gang is gone; past its lease it can harm nobody."""
        desk = self._desk
        if desk.engine.kill(gang.name, gang.epoch):
            desk.gone(gang, why=str(gang.no_proof))
        elif now_s > gang.lease_until_s + MARGIN_S:
            why = f"{gang.no_proof}; nobody can say that it is gone, but its lease has run out"
            desk.say("hung", f"gang {gang.name} {why}", gang=gang.name)
            desk.gone(gang, why=why)

    def _strangers(self) -> None:
        """Ends gangs that the store knows nothing of."""
        desk = self._desk
        known = {(gang.name, gang.epoch) for gang in desk.books.gangs.values()}
        for info in desk.engine.gangs():
            if info.alive and (info.gang, info.epoch) not in known:
                desk.engine.kill(info.gang, info.epoch)
                message = f"gang {info.gang} of epoch {info.epoch} belongs to nobody: it was killed"
                desk.say("stranger", message)

    def _tidy(self, now_s: float) -> None:
        """Has the store forget what is old, from time to time."""
        if now_s >= self._tidied_s + _TIDY_S:
            has_more = self._desk.store.events.forget_old()
            self._tidied_s = -math.inf if has_more else now_s

    def _machines(self) -> bool:
        """Ends what ran on machines that are gone; True if the cluster is another than before."""
        desk, books = self._desk, self._desk.books
        found = Machines.of(desk.engine.nodes())
        if found == books.machines:
            return False
        gone = set(found.down) - set(books.machines.down)
        back = set(books.machines.down) - set(found.down)
        with desk.store.transaction():
            for gang in list(books.gangs.values()):
                if not books.machines.nodes_of(gang.gpus).isdisjoint(gone):
                    self._carrying.kill(gang, "one of its machines is gone")
            for node in sorted(gone):
                message = f"machine {node} is gone: its gangs' jobs go on elsewhere"
                desk.say("node_down", message)
            for node in sorted(back):
                desk.say("node_up", f"machine {node} is back")
        return True
