"""Gangs as processes of this host, in sessions of their own: they outlive whoever started them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tlora_megatron.service.engines.local.gang import LocalGang, Member
from tlora_megatron.service.engines.local.seats import Seats
from tlora_megatron.service.engines.local.spares import COMMAND as SPARE_COMMAND
from tlora_megatron.service.engines.local.spares import Spares
from tlora_megatron.service.engines.past import PastGangs, gang_folders
from tlora_megatron.service.engines.present import check_places, infos
from tlora_megatron.service.engines.protocol import Cursor, GangInfo, NodeInfo
from tlora_megatron.service.engines.rank_process import RANK_COMMAND, inherited_environment
from tlora_megatron.service.home import Home
from tlora_megatron.service.mail.folder import EventReader, GangFolder
from tlora_megatron.service.messages import Command, GangEvent, GangSpec
from tlora_megatron.service.processes import Life

_ASKED = "the service has ended it"
_HALF_STARTED = "its start was broken off, since the service ended in the middle of it"


class LocalEngine:
    """`GangEngine` on this host, without a thread: what is due is done within `poll`.

    Gangs that an earlier engine has started on the same folder are taken up; those that are not
    whole are ended, and `died` is among their events.

    Args:
        root: the service's folder.
        gpus: GPUs to use; None = all that this process may see, 0 = none.
        seats: places for processes on a host without GPUs; None = one a core.
        standby: spare processes; None = one a GPU, or one that forks, where memory allows;
            0 = none.
        rank_command, spare_command: for tests.
    """

    shares_gpus = True

    def __init__(
        self,
        root: Path | str,
        gpus: int | None = None,
        *,
        seats: int | None = None,
        standby: int | None = None,
        rank_command: Sequence[str] = RANK_COMMAND,
        spare_command: Sequence[str] = SPARE_COMMAND,
    ) -> None:
        self._home = Home.open(root)
        self._seats = Seats.of_host(gpus, seats)
        self._rank_command = tuple(rank_command)
        self._environment = inherited_environment()
        self.spares = Spares(
            self._home.standby, self._seats, self._environment, standby, spare_command
        )
        """The processes that wait to become ranks."""
        self._gangs: dict[tuple[str, int], LocalGang] = {}
        """Those that are not over, and those that are and were not told of since."""
        self._past = PastGangs(self._home.root)
        self._adopt()
        self._replenish()

    def start(self, spec: GangSpec) -> None:
        """Starts the processes of a gang; a second call with the same epoch does nothing."""
        key = (spec.gang, spec.epoch)
        folder = GangFolder(self._home.root, spec.gang, spec.epoch)
        if key in self._gangs or folder.has_spec:
            return
        check_places(spec, [self._seats.count])
        folder.create(spec)
        members: list[Member] = []
        error = self._seat_all(folder, spec, members)
        gang = self._gangs[key] = LocalGang(folder, spec, members)
        if error is not None:
            gang.kill(f"its processes could not be started: {error}")

    def post(self, command: Command) -> None:
        """Leaves a command in a gang's folder; one for a gang that is over is dropped."""
        gang = self._gangs.get((command.gang, command.epoch))
        if gang is not None:
            gang.post(command)

    def poll(self, since: Cursor) -> Sequence[GangEvent]:
        """Events after the cursor; deaths are seen and acted on here, so call it often.

        Gangs that were over before this engine was made are read only if the cursor names them.
        """
        events: list[GangEvent] = []
        events += self._past.events(since, self._gangs)
        for key, gang in list(self._gangs.items()):
            gang.look()
            events += gang.events(since.get(key, 0))
            if gang.is_over:
                del self._gangs[key]
        self._past.sweep(self._gangs)
        self._replenish()
        return events

    def kill(self, gang: str, epoch: int) -> bool:
        """Ends all processes of a gang by SIGKILL; True with proof that they are gone.

        Its last event is `died`, unless it was `stopped`.
        """
        known = self._gangs.get((gang, epoch))
        return known is None or known.kill(_ASKED)

    def gangs(self) -> Sequence[GangInfo]:
        """Gangs with processes, started here or taken up."""
        for gang in self._gangs.values():
            gang.look()
        return infos(self._gangs)

    def nodes(self) -> Sequence[NodeInfo]:
        """This host."""
        return (NodeInfo(node=0, address="127.0.0.1", gpus=self._seats.count),)

    def close(self) -> None:
        """Ends the spare processes and lets go of the gangs, which go on."""
        self.spares.close()
        for gang in self._gangs.values():
            gang.release()
        self._gangs.clear()

    def _seat_all(
        self, folder: GangFolder, spec: GangSpec, members: list[Member]
    ) -> OSError | None:
        """Adds the ranks that could be started to `members`; returns why there are no more."""
        try:
            for rank, (_, gpu) in enumerate(spec.gpus):
                members.append(self._seat(folder, rank, gpu))
        except OSError as error:
            return error
        return None

    def _seat(self, folder: GangFolder, rank: int, gpu: int) -> Member:
        """Starts one rank, in a spare process if there is one."""
        environment = self._seats.environment(gpu)
        spare = self.spares.take(gpu)
        if spare is None:
            return self._start(folder, rank, environment)
        is_taken = spare.order(folder, rank, environment)
        if self.spares.forks:
            if is_taken:
                return Member(rank=rank, parent=spare.life)
        elif is_taken:
            spare.close()
            return Member(rank=rank, life=spare.life, process=spare.process)
        else:
            spare.end()
        return self._start(folder, rank, environment)

    def _start(self, folder: GangFolder, rank: int, environment: Mapping[str, str]) -> Member:
        descriptor = os.open(folder.log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "wb") as log:
            process = subprocess.Popen(
                [*self._rank_command, str(folder.path), str(rank)],
                env={**self._environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return Member(rank=rank, life=Life.of(process.pid), process=process)

    def _adopt(self) -> None:
        """Takes up the gangs of the folder that are not over."""
        for folder in gang_folders(self._home):
            self._take_up(folder)
        self._past.remove_old(self._gangs)

    def _take_up(self, folder: GangFolder) -> None:
        """Takes a gang up, unless nothing is left of it and its last event is written."""
        last = EventReader(folder).last()
        if not folder.has_spec or (last is not None and last.kind == "died"):
            return
        spec = folder.spec()
        members = [Member(rank=rank, life=_life(folder, rank)) for rank in range(spec.world_size)]
        gang = LocalGang(folder, spec, members)
        if any(member.life is None for member in members):
            gang.kill(_HALF_STARTED)
        if last is not None and last.kind == "stopped":
            gang.look()
            if gang.is_over:
                return
        self._gangs[spec.gang, spec.epoch] = gang

    def _replenish(self) -> None:
        """Starts spare processes while no gang is starting."""
        if all(gang.has_spoken or gang.is_over for gang in self._gangs.values()):
            self.spares.replenish()


def _life(folder: GangFolder, rank: int) -> Life | None:
    """A rank that has said who it is; None if it has not."""
    try:
        return Life.known_as(folder.pid(rank).read_text())
    except FileNotFoundError:
        return None
