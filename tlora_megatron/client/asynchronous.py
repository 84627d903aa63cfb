"""A client for programs with an event loop."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx

from tlora_megatron.client import calls, values
from tlora_megatron.client.values import Event, Job, Page, Submitted
from tlora_megatron.config.job_rows import Acted, Action
from tlora_megatron.training.data.contents import opened_as_lines

T = TypeVar("T")


class AsyncClient:
    """A service over HTTP, with the arguments and calls of `Client`, which are awaited here."""

    def __init__(
        self,
        address: str,
        token: str | None = None,
        *,
        retries: int = 5,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.address = calls.check_address(address)
        self._retries = retries
        self._http = httpx.AsyncClient(**calls.connection(self.address, token), transport=transport)

    async def submit(
        self, document: Mapping[str, Any] | str, *, key: str | None = None
    ) -> Submitted:
        """Submits the jobs of a document, all or none."""
        return await self._send(calls.submit(document, key))

    async def upload(self, path: str | Path) -> str:
        """Sends a file of training data as JSON lines, unless the tenant has one like it.

        Returns:
            The file's id.

        Raises:
            ValueError: for a gzipped file, an array or a Parquet table that is damaged.
        """
        source = Path(path)
        with ExitStack() as stack:
            file = await asyncio.to_thread(stack.enter_context, opened_as_lines(source))
            digest = await asyncio.to_thread(calls.digest_of, file)

            async def send() -> httpx.Response:
                # Asked before each attempt: the one before may have arrived.
                found = await self._http.get("/v1/files", params={"sha256": digest})
                if found.is_error or calls.file_id(found) is not None:
                    return found
                file.seek(0)
                sent = {"file": (source.name, file)}
                return await self._http.post("/v1/files", data={"purpose": "fine-tune"}, files=sent)

            return str(calls.file_id(await self._answer(send)))

    async def jobs(
        self,
        states: Sequence[str] | None = None,
        tenant: str | None = None,
        *,
        disk: bool | None = None,
    ) -> AsyncIterator[Job]:
        """All jobs in these states (None: in any), the first submitted first."""
        after: str | None = None
        while True:
            page = await self._send(calls.page(states, after, calls.PAGE, tenant=tenant, disk=disk))
            for job in page.jobs:
                yield job
            after = page.next
            if after is None:
                return

    async def page(
        self,
        states: Sequence[str] | None = None,
        *,
        after: str | None = None,
        limit: int = 100,
        newest_first: bool = False,
    ) -> Page:
        """A page of jobs, behind the one of id `after`."""
        return await self._send(calls.page(states, after, limit, newest_first=newest_first))

    async def job(self, name: str) -> Job:
        """The job of an id or a name."""
        return await self._send(calls.job(name))

    async def cancel(self, name: str) -> Job:
        """Asks to end a job before its time."""
        return await self._send(calls.request_action(name, "cancel"))

    async def pause(self, name: str) -> Job:
        """Asks to save a job and hold it."""
        return await self._send(calls.request_action(name, "pause"))

    async def resume(self, name: str) -> Job:
        """Asks to let a paused job go on."""
        return await self._send(calls.request_action(name, "resume"))

    async def act(self, action: Action, jobs: Sequence[str]) -> Acted[Job]:
        """Asks something of jobs by their ids, or removes them; each on its own."""
        acted: Acted[Job] = Acted([], {})
        for begin in range(0, len(jobs), calls.PAGE):
            part = await self._send(calls.act(action, jobs[begin : begin + calls.PAGE]))
            acted.jobs.extend(part.jobs)
            acted.refused.update(part.refused)
        return acted

    async def wait(self, name: str) -> Job:
        """The job of an id or a name when it is over."""
        async for _ in self.events(name):
            pass
        return await self.job(name)

    async def events(
        self, name: str, *, after: str | None = None, follow: bool = True
    ) -> AsyncIterator[Event]:
        """Tells what happened to a job and its steps, and what comes, until it is over."""
        reader = calls.EventReader(self.address, self._retries, after)
        job = (await self.job(name)).id  # a name may come to mean another job
        while True:
            call = calls.events(job, reader.last, follow=follow)
            try:
                async with self._open(call, timeout=calls.STREAM) as answer:
                    async for line in answer.aiter_lines():
                        if (event := reader.feed(line)) is not None:
                            yield event
                if not follow or reader.is_over or (await self.job(job)).state.is_over:
                    return
            except calls.FAILURES as error:
                reader.cut(error)
            await asyncio.sleep(reader.pause_s())

    async def metrics(self, name: str, *, tail: int = 10_000) -> list[dict[str, Any]]:
        """The last steps and evaluations of a job."""
        return await self._send(calls.metrics(name, tail))

    async def adapter(self, name: str, out: str | Path) -> Path:
        """Downloads the adapter of a finished job into a new folder, which PEFT and vLLM load."""
        folder = Path(out)
        values.check_target(folder)
        with tempfile.NamedTemporaryFile(dir=folder.absolute().parent, suffix=".zip") as file:

            async def send() -> httpx.Response:
                file.seek(0)
                file.truncate()
                async with self._open(calls.adapter(name)) as answer:
                    async for part in answer.aiter_bytes():
                        file.write(part)
                    return answer

            await self._answer(send)
            file.flush()
            await asyncio.to_thread(values.unpack, Path(file.name), folder)
        return folder

    async def submit_sweep(
        self, document: Mapping[str, Any], *, key: str | None = None
    ) -> dict[str, Any]:
        """Submits the trials of a sweep, as `tlora sweep` reads it; returns how it stands."""
        return await self._send(calls.submit_sweep(document, key))

    async def sweep(self, name: str) -> dict[str, Any]:
        """How a sweep of an id or a name stands: its rungs, and its trials, the best first."""
        return await self._send(calls.view(f"sweeps/{calls.quoted(name)}"))

    async def sweeps(self) -> list[dict[str, Any]]:
        """All sweeps, the newest first."""
        return list((await self._send(calls.view("sweeps")))["sweeps"])

    async def cluster(self) -> dict[str, Any]:
        """Machines and GPUs, and what holds them."""
        return await self._send(calls.view("cluster"))

    async def groups(self) -> dict[str, Any]:
        """Who trains beside whom, and how fast."""
        return await self._send(calls.view("groups"))

    async def decisions(self, limit: int = 50) -> dict[str, Any]:
        """The decisions of the scheduler and their reasons, the newest first."""
        return await self._send(calls.view("decisions", {"limit": limit}))

    async def close(self) -> None:
        """Closes connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @asynccontextmanager
    async def _open(self, call: calls.Call[Any], **options: Any) -> AsyncIterator[httpx.Response]:
        async with self._http.stream(**call.words(), **options) as answer:
            if answer.is_error:
                await answer.aread()
                raise calls.refusal(answer)
            yield answer

    async def _send(self, call: calls.Call[T]) -> T:
        async def send() -> httpx.Response:
            return await self._http.request(**call.words())

        return call.read(await self._answer(send))

    async def _answer(self, send: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
        """The answer, after as many attempts as it takes."""
        attempts = calls.Attempts(self.address, self._retries)
        while True:
            try:
                answer = await send()
                if answer.is_error:
                    raise calls.refusal(answer)
                return answer
            except calls.FAILURES as error:
                await asyncio.sleep(attempts.pause_s(error))
