"""Resolves names in a tenant's document: a base, an uploaded file, a path below its folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any

from tlora_megatron.config.jobs import as_job_list, plain
from tlora_megatron.config.reader import must
from tlora_megatron.service.below import UserFiles
from tlora_megatron.service.home import Home
from tlora_megatron.service.store import NotFound, Store
from tlora_megatron.training.saving.writer import FOLDER, published_folder

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_UPLOAD = re.compile(r"file-[0-9a-f]{24}")
_JOB = re.compile(r"jobs/(j[0-9a-z]{1,31})((?:/[A-Za-z0-9_][A-Za-z0-9._-]*){0,3})")


class References:
    """Finds what a tenant names, and nothing of anybody else's."""

    def __init__(self, home: Home, store: Store, bases: Mapping[str, Any], *, tenant: str) -> None:
        self._home = home
        self._store = store
        self._bases = bases
        self._tenant = tenant

    def resolve(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """The document with the sections of bases and the paths of files instead of names.

        Raises:
            ConfigError: for the first name that means nothing to this tenant.
        """
        found = as_job_list(document)
        found["base_model"] = self.base(document.get("base_model"))
        if "defaults" in found:
            found["defaults"] = self._entry(found["defaults"], "defaults")
        jobs = found.get("jobs")
        if isinstance(jobs, list):
            found["jobs"] = [self._entry(job, f"jobs[{i}]") for i, job in enumerate(jobs)]
        return found

    def base(self, named: Any) -> dict[str, Any]:
        """The section `base_model` of a base that the service offers.

        Args:
            named: its name, or `{path: NAME}`; None: the only one.
        """
        if isinstance(named, dict) and set(named) <= {"path"}:
            named = named.get("path")
        if named is None and len(self._bases) == 1:
            named = next(iter(self._bases))
        if not isinstance(named, str) or named not in self._bases:
            known = ", ".join(sorted(self._bases)) or "none: `tlora serve --base NAME=DIR`"
            raise must("base_model", f"name a base of the service ({known})", named)
        section: dict[str, Any] = plain(asdict(self._bases[named]))
        return section

    def file(self, value: str, what: str) -> str:
        """The absolute path of a file: `file-...` of an upload, or a path below the own folder."""
        if _UPLOAD.fullmatch(value):
            try:
                self._store.uploads.get(value, tenant=self._tenant)
            except NotFound:
                raise must(what, "be the id of one of your files", value) from None
            return str(self._home.upload(self._tenant, value))
        path = self._below(value, what)
        self._try(what, value, lambda: self._files.open_file(path, what).close())
        return str(path)

    def folder(self, value: str, what: str) -> str:
        """The absolute path of a folder: `jobs/ID/...` of an own job, or below the own folder."""
        match = _JOB.fullmatch(value)
        if match is None:
            path = self._below(value, what)
            files = self._files
        else:
            path, files = self._of_job(match, value, what)

        def look() -> None:
            with files.open_folder(path, what):
                pass

        self._try(what, value, look)
        return str(path)

    def _of_job(self, match: re.Match[str], value: str, what: str) -> tuple[Path, UserFiles]:
        try:
            job = self._store.jobs.get(match[1])
        except NotFound:
            job = None
        if job is None or job.tenant != self._tenant:
            raise must(what, "be in the folder of one of your jobs, as jobs/ID/adapter", value)
        path = self._home.job(job.id).joinpath(*match[2].split("/")[1:])
        # Links are followed nowhere; a published name, which is one of ours, stands for its folder.
        is_name = path.parent == self._home.job(job.id) / FOLDER
        return published_folder(path) if is_name else path, UserFiles(self._home.jobs)

    @property
    def _files(self) -> UserFiles:
        return UserFiles(self._home.tenant(self._tenant))

    def _entry(self, entry: Any, path: str) -> Any:
        """An entry of `jobs`, or `defaults`; whatever is of another type is left to its reader."""
        if not isinstance(entry, dict):
            return entry
        found = dict(entry)
        data = entry.get("data")
        if isinstance(data, dict):
            found["data"] = dict(data)
            for key in ("train", "eval"):
                if isinstance(data.get(key), str):
                    found["data"][key] = self.file(data[key], f"{path}.data.{key}")
        for key in ("init_from", "resume_from"):
            if isinstance(entry.get(key), str):
                found[key] = self.folder(entry[key], f"{path}.{key}")
        return found

    def _below(self, value: str, what: str) -> Path:
        """A path below the tenant's folder, by its words alone."""
        if _URL.match(value):
            raise must(what, "be the id of a file or a path: nothing is fetched", value)
        parts = PurePosixPath(value).parts
        if value.startswith(("/", "~")) or ".." in parts or not parts or not value.isprintable():
            rule = "be the id of a file, or a path below your folder of the service"
            raise must(what, rule, value)
        return self._home.tenant(self._tenant).joinpath(*parts)

    @staticmethod
    def _try(what: str, value: str, look: Callable[[], None]) -> None:
        """Opens what is named; the reason why it cannot be would tell of other folders."""
        try:
            look()
        except (ValueError, OSError):
            rule = "be there, in your folder of the service, and be reached by no link"
            raise must(what, rule, value) from None
