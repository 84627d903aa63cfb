"""A service over HTTP that samples, with jobs that have ended."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

from tests.helpers.http_service import BASE, Api, open_api
from tests.helpers.stored_jobs import finish, put_job, serve_gang, start
from tlora_megatron.config.sections import plain
from tlora_megatron.files import write_json
from tlora_megatron.service.home import JOB_NAME, Home, make_folder
from tlora_megatron.service.sampling.own import OwnSampler, OwnSettings
from tlora_megatron.service.settings import base_section


@contextmanager
def open_sampling_api(root: Path) -> Iterator[Api]:
    """A service whose sampler is a process of ours, on the CPU."""
    home = Home.open(root)
    sampler = OwnSampler(
        home.root / "sampler", partial(base_section, home), OwnSettings(idle_s=60.0)
    )
    with open_api(root, sampler=sampler) as api:
        api.service.closers.append(sampler.close)
        serve_gang(api.store, api.home)
        yield api


def add_job(api: Api, tenant: str, name: str, adapter: Path | None) -> str:
    """Adds a job that has ended with an adapter, or one that runs; returns its id."""
    base = plain(asdict(api.service.bases()[BASE]))
    document = {"name": name, "base_model": base}
    job = put_job(api.store, name, tenant, document=document)
    start(api.store, job)
    write_json(make_folder(api.home.job(job)) / JOB_NAME, document)
    if adapter is not None:
        shutil.copytree(adapter, api.home.job(job) / "adapter")
        finish(api.store, job)
    return job
