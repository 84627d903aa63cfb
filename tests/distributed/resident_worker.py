"""One process of a resident super-model that takes schedules of commands from a test.

`resident_worker.py FOLDER`: see `tests.helpers.resident_case`.
"""

from __future__ import annotations

import json
import sys
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.helpers.variants import end_world
from tlora_megatron.config.job import LoraSpec
from tlora_megatron.config.load import fit_job, read_gang_config
from tlora_megatron.config.schema import RunConfig
from tlora_megatron.config.sections import read_job
from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.slab import AdapterSlab
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.quantisation import base_quantisation
from tlora_megatron.runtime.resident import open_resident
from tlora_megatron.training.data.tokenize import load_tokenizer
from tlora_megatron.training.formats.quantised import quantisation_card
from tlora_megatron.training.resident.staging import ReadOrder
from tlora_megatron.training.run.preparation import PreparedJob
from tlora_megatron.training.run.reading import prepare_for

_digest = PreparedJob.digest
_LEAVES = ("ended", "left", "refused")


class Script:
    """A source of commands that come at given looks into it, schedule after schedule.

    A job that is to come back is prepared again once it is reported to have left. A command with
    `behind_step` also waits until its job has reported that step.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._commands: list[tuple[int, Mapping[str, Any]]] = []
        self._present: set[str] = set()
        self._looks = 0
        self._is_answered = True
        self._events: list[tuple[str, str | None, Mapping[str, Any]]] = []
        self._lost: set[object] = set()
        self._steps: dict[object, int] = {}

    def may_write(self, name: str) -> bool:
        return name not in self._lost

    def emit(self, kind: str, job: str | None, body: Mapping[str, Any]) -> None:
        """Notes an event, but those of this process alone."""
        if kind == "progress":
            return
        self._events.append((kind, job, body))
        if kind == "stepped":
            self._steps[job] = body["step"]
        if kind in _LEAVES and job is not None:
            self._present.discard(job)

    def wait(self, seconds: float) -> None:
        """Waits for a job that is prepared, or for the next schedule; never for a command."""
        if self._commands or self._present:
            time.sleep(min(seconds, 0.002))
            return
        self._answer()
        with (self._folder / "schedules").open() as file:
            schedule = json.loads(file.readline())
        self._is_answered = False
        self._looks = 0
        self._commands = [(1, {"kind": "stop", "body": {"save": False}})]
        if schedule is not None:
            self._commands = sorted(schedule, key=lambda pair: pair[0])

    def take(self) -> list[Mapping[str, Any]]:
        """The commands that are due, each job's in their order."""
        self._looks += 1
        due: list[Mapping[str, Any]] = []
        waiting = []
        held: set[object] = set()
        for look, mail in self._commands:
            job = mail.get("job")
            comes_back = mail["kind"] == "prepare" and job in self._present
            is_early = self._steps.get(job, 0) < mail.get("behind_step", 0)
            if look > self._looks or job in held or comes_back or is_early:
                waiting.append((look, mail))
                held.add(job)
                continue
            if mail["kind"] == "take away":
                self._lost.add(job)
                continue
            due.append({key: value for key, value in mail.items() if key != "behind_step"})
            if mail["kind"] == "prepare":
                self._present.add(str(job))
        self._commands = waiting
        return due

    def _answer(self) -> None:
        if not self._is_answered:
            with (self._folder / "events").open("w") as file:
                file.write(json.dumps(self._events))
        self._is_answered, self._events = True, []


def note_slabs() -> list[weakref.ref[AdapterSlab]]:
    """Notes every adapter that is made, without keeping it."""
    slabs: list[weakref.ref[AdapterSlab]] = []
    make = AdapterBank.new_slab

    def new_slab(bank: AdapterBank, lora: LoraSpec) -> AdapterSlab:
        slab = make(bank, lora)
        slabs.append(weakref.ref(slab))
        return slab

    AdapterBank.new_slab = new_slab  # type: ignore[method-assign]
    return slabs


def digest_with_rank(prepared: PreparedJob) -> str:
    """A digest that says the ranks read unlike data, for jobs whose names ask for it."""
    rank = str(dist.get_rank()) if prepared.spec.name.startswith("unlike") else ""
    return (rank + _digest.fget(prepared))[:32]


def reads_files(config: RunConfig) -> ReadOrder:
    """Reads the files that an order's document names."""
    base = config.base_model
    spec, tokenizer = read_model_spec(base.config_file), load_tokenizer(base.folder)
    card = quantisation_card(base, spec, base_quantisation(base, spec))

    def read(order: Mapping[str, Any]) -> PreparedJob:
        document = {**order["document"], "name": order["job"]}
        job = fit_job(read_job(document, Path.cwd(), path=f"job {order['job']}"), config)
        return prepare_for(config, spec, job, tokenizer, quantisation=card, resuming=True)

    return read


def main() -> None:
    folder = Path(sys.argv[1])
    sections = json.loads((folder / "sections.json").read_text())
    config = read_gang_config(sections, folder, output_dir=folder / "out")
    script = Script(folder)
    slabs = note_slabs()
    PreparedJob.digest = property(digest_with_rank)  # type: ignore[method-assign]
    with open_resident(
        config, events=script, read_order=reads_files(config), may_write=script.may_write
    ) as loop:
        loop.serve(script if dist.get_rank() == 0 else None)
        left = [slab for slab in slabs if slab() is not None]
        assert not left, f"{len(left)} of {len(slabs)} adapters are still in memory"
    end_world()


if __name__ == "__main__":
    main()
