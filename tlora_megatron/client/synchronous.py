"""A client with plain calls."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx

from tlora_megatron.client import calls, values
from tlora_megatron.client.values import Event, Job, Page, Submitted
from tlora_megatron.config.job_rows import Acted, Action
from tlora_megatron.training.data.contents import opened_as_lines

T = TypeVar("T")


class Client:
    """A service over HTTP. Any number of threads may use one.

    Args:
        address: `http://host:8017`.
        token: None = from the variable TLORA_TOKEN or the file `~/.tlora/token`.
        retries: How often a request that got no answer is sent again.
        transport: For tests.
    """

    def __init__(
        self,
        address: str,
        token: str | None = None,
        *,
        retries: int = 5,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.address = calls.check_address(address)
        self._retries = retries
        self._http = httpx.Client(**calls.connection(self.address, token), transport=transport)

    def submit(self, document: Mapping[str, Any] | str, *, key: str | None = None) -> Submitted:
        """Submits the jobs of a document, all or none.

        Args:
            document: What `tlora train` reads, as a mapping or as text in YAML; its base is one of
                the service's by name, its data are ids of uploaded files.
            key: The same key makes the same jobs once; None = one for this call and its retries.
        """
        return self._send(calls.submit(document, key))

    def upload(self, path: str | Path) -> str:
        """Sends a file of training data as JSON lines, unless the tenant has one like it.

        Returns:
            The file's id.

        Raises:
            ValueError: for a gzipped file, an array or a Parquet table that is damaged.
        """
        source = Path(path)
        with opened_as_lines(source) as file:
            digest = calls.digest_of(file)

            def send() -> httpx.Response:
                # Asked before each attempt: the one before may have arrived.
                found = self._http.get("/v1/files", params={"sha256": digest})
                if found.is_error or calls.file_id(found) is not None:
                    return found
                file.seek(0)
                sent = {"file": (source.name, file)}
                return self._http.post("/v1/files", data={"purpose": "fine-tune"}, files=sent)

            return str(calls.file_id(self._answer(send)))

    def jobs(
        self,
        states: Sequence[str] | None = None,
        tenant: str | None = None,
        *,
        disk: bool | None = None,
    ) -> Iterator[Job]:
        """All jobs in these states (None: in any), the first submitted first.

        Administrators may name another tenant than their own, or `*`. With `disk` jobs say what
        they have on the service's disk.
        """
        after: str | None = None
        while True:
            page = self._send(calls.page(states, after, calls.PAGE, tenant=tenant, disk=disk))
            yield from page.jobs
            after = page.next
            if after is None:
                return

    def page(
        self,
        states: Sequence[str] | None = None,
        *,
        after: str | None = None,
        limit: int = 100,
        newest_first: bool = False,
    ) -> Page:
        """A page of jobs, behind the one of id `after`."""
        return self._send(calls.page(states, after, limit, newest_first=newest_first))

    def job(self, name: str) -> Job:
        """The job of an id or a name."""
        return self._send(calls.job(name))

    def cancel(self, name: str) -> Job:
        """Asks to end a job before its time."""
        return self._send(calls.request_action(name, "cancel"))

    def pause(self, name: str) -> Job:
        """Asks to save a job and hold it."""
        return self._send(calls.request_action(name, "pause"))

    def resume(self, name: str) -> Job:
        """Asks to let a paused job go on."""
        return self._send(calls.request_action(name, "resume"))

    def act(self, action: Action, jobs: Sequence[str]) -> Acted[Job]:
        """Asks something of jobs by their ids, or removes them; each on its own."""
        acted: Acted[Job] = Acted([], {})
        for begin in range(0, len(jobs), calls.PAGE):
            part = self._send(calls.act(action, jobs[begin : begin + calls.PAGE]))
            acted.jobs.extend(part.jobs)
            acted.refused.update(part.refused)
        return acted

    def wait(self, name: str) -> Job:
        """The job of an id or a name when it is over."""
        for _ in self.events(name):
            pass
        return self.job(name)

    def events(
        self, name: str, *, after: str | None = None, follow: bool = True
    ) -> Iterator[Event]:
        """Tells what happened to a job and its steps, and what comes, until it is over.

        Args:
            name: Id or name.
            after: `id` of the last event that is known.
            follow: False = what there is now.
        """
        reader = calls.EventReader(self.address, self._retries, after)
        job = self.job(name).id  # a name may come to mean another job
        while True:
            call = calls.events(job, reader.last, follow=follow)
            try:
                with self._open(call, timeout=calls.STREAM) as answer:
                    yield from filter(None, map(reader.feed, answer.iter_lines()))
                if not follow or reader.is_over or self.job(job).state.is_over:
                    return
            except calls.FAILURES as error:
                reader.cut(error)
            time.sleep(reader.pause_s())

    def metrics(self, name: str, *, tail: int = 10_000) -> list[dict[str, Any]]:
        """The last steps and evaluations of a job."""
        return self._send(calls.metrics(name, tail))

    def adapter(self, name: str, out: str | Path) -> Path:
        """Downloads the adapter of a finished job into a new folder, which PEFT and vLLM load."""
        folder = Path(out)
        values.check_target(folder)
        with tempfile.NamedTemporaryFile(dir=folder.absolute().parent, suffix=".zip") as file:

            def send() -> httpx.Response:
                file.seek(0)
                file.truncate()
                with self._open(calls.adapter(name)) as answer:
                    for part in answer.iter_bytes():
                        file.write(part)
                    return answer

            self._answer(send)
            file.flush()
            values.unpack(Path(file.name), folder)
        return folder

    def submit_sweep(
        self, document: Mapping[str, Any], *, key: str | None = None
    ) -> dict[str, Any]:
        """Submits the trials of a sweep, as `tlora sweep` reads it; returns how it stands."""
        return self._send(calls.submit_sweep(document, key))

    def sweep(self, name: str) -> dict[str, Any]:
        """How a sweep of an id or a name stands: its rungs, and its trials, the best first."""
        return self._send(calls.view(f"sweeps/{calls.quoted(name)}"))

    def sweeps(self) -> list[dict[str, Any]]:
        """All sweeps, the newest first."""
        return list((self._send(calls.view("sweeps")))["sweeps"])

    def cluster(self) -> dict[str, Any]:
        """Machines and GPUs, and what holds them."""
        return self._send(calls.view("cluster"))

    def groups(self) -> dict[str, Any]:
        """Who trains beside whom, and how fast."""
        return self._send(calls.view("groups"))

    def decisions(self, limit: int = 50) -> dict[str, Any]:
        """The decisions of the scheduler and their reasons, the newest first."""
        return self._send(calls.view("decisions", {"limit": limit}))

    def close(self) -> None:
        """Closes connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _open(self, call: calls.Call[Any], **options: Any) -> Iterator[httpx.Response]:
        with self._http.stream(**call.words(), **options) as answer:
            if answer.is_error:
                answer.read()
                raise calls.refusal(answer)
            yield answer

    def _send(self, call: calls.Call[T]) -> T:
        def send() -> httpx.Response:
            return self._http.request(**call.words())

        return call.read(self._answer(send))

    def _answer(self, send: Callable[[], httpx.Response]) -> httpx.Response:
        """The answer, after as many attempts as it takes."""
        attempts = calls.Attempts(self.address, self._retries)
        while True:
            try:
                answer = send()
                if answer.is_error:
                    raise calls.refusal(answer)
                return answer
            except calls.FAILURES as error:
                time.sleep(attempts.pause_s(error))
