"""A service over HTTP that samples, with jobs that have ended."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

from tests.helpers.http_service import BASE, Door, open_door
from tests.helpers.stored_jobs import finish, serve_gang, start
from tlora_megatron.config.sections import plain
from tlora_megatron.files import write_json
from tlora_megatron.service.home import JOB_NAME, Home, make_folder
from tlora_megatron.service.sampling.own import OwnSampler, OwnSettings
from tlora_megatron.service.settings import base_section
from tlora_megatron.service.store import NewJob


@contextmanager
def open_sampling_door(root: Path) -> Iterator[Door]:
    """A service whose sampler is a process of ours, on the CPU."""
    home = Home.open(root)
    sampler = OwnSampler(
        home.root / "sampler", partial(base_section, home), OwnSettings(idle_s=60.0)
    )
    with open_door(root, sampler=sampler) as door:
        door.service.closers.append(sampler.close)
        serve_gang(door.store, door.home)
        yield door


def add_job(door: Door, tenant: str, name: str, adapter: Path | None) -> str:
    """Adds a job that has ended with an adapter, or one that runs; returns its id."""
    base = plain(asdict(door.service.bases()[BASE]))
    new = NewJob(name=name, document={"name": name, "base_model": base}, base="b", key=name)
    job = door.store.jobs.submit([new], tenant=tenant)[0].id
    start(door.store, job)
    write_json(make_folder(door.home.job(job)) / JOB_NAME, {"name": name, "base_model": base})
    if adapter is not None:
        shutil.copytree(adapter, door.home.job(job) / "adapter")
        finish(door.store, job)
    return job
