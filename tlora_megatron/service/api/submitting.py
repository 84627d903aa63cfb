"""Jobs that come over the network: their documents, what these may name, and their submit."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import yaml

from tlora_megatron.config.documents import mistake_words, parse_document
from tlora_megatron.config.reader import ConfigError, must
from tlora_megatron.config.rules import shipped_templates
from tlora_megatron.config.sections import as_job_list, plain
from tlora_megatron.files import UserFiles
from tlora_megatron.service.api.gate import Caller
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.home import Home
from tlora_megatron.service.prepare.submission import ASKED, split_submissions
from tlora_megatron.service.store import Job, NewJob, NotFound, Store
from tlora_megatron.training.saving.writer import FOLDER, published_folder

MOST_JSON_BYTES = 4 << 20
MOST_YAML_BYTES = 256 << 10
"""PyYAML reads about 100 KB a second."""
MOST_SETTING = 512
"""Characters of one setting."""
_DEEPEST = 32
WHAT = "the body"


def read_body(content: bytes, content_type: str) -> dict[str, Any]:
    """The mapping in a body of JSON if its type says so, else of YAML, or a `ConfigError`."""
    is_json = "json" in content_type.lower()
    most, kind = (MOST_JSON_BYTES, "JSON") if is_json else (MOST_YAML_BYTES, "YAML")
    if len(content) > most:
        raise must(WHAT, f"have at most {most:,} bytes of {kind}", len(content))
    if not is_json:
        _check_yaml(content)
    document = parse_document(content, WHAT, is_json=is_json)
    _check_depth(document)
    return document


def check_setting(text: str, what: str) -> None:
    """Refuses a setting in YAML that would unfold, nest deeply or take long to read."""
    if len(text) > MOST_SETTING:
        raise must(what, f"have at most {MOST_SETTING} characters", len(text))
    _check_yaml(text.encode("utf-8", "replace"), what)


def _check_yaml(content: bytes, what: str = WHAT) -> None:
    """Refuses aliases, of which a few lines make billions of values, and deep nesting."""
    depth = 0
    for event in _events(content, what):
        if isinstance(event, yaml.AliasEvent):
            raise must(
                what,
                "have no YAML aliases",
                f"*{event.anchor} in line {event.start_mark.line + 1}",
                "write the values out, or send JSON",
            )
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _DEEPEST:
            raise _too_deep(what)


def _events(content: bytes, what: str) -> Iterator[Any]:
    try:
        yield from yaml.parse(content, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        said = mistake_words(error, content)
        raise ConfigError(f"{what} must be well-formed YAML, got {said}") from error


def _check_depth(document: Any) -> None:
    values = [document]
    for _ in range(_DEEPEST):
        inner = [value for value in values if isinstance(value, dict | list)]
        values = [
            v for value in inner for v in (value.values() if isinstance(value, dict) else value)
        ]
        if not values:
            return
    raise _too_deep()


def _too_deep(what: str = WHAT) -> ConfigError:
    return ConfigError(f"{what} must be nested at most {_DEEPEST} deep, got more")


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
        self._files_found: dict[str, str] = {}

    def resolve(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """The document with sections of bases and paths of files instead of the tenant's names."""
        found = as_job_list(document)
        found["base_model"] = self.base(document.get("base_model"))
        if "defaults" in found:
            found["defaults"] = self._entry(found["defaults"], "defaults")
        jobs = found.get("jobs")
        if isinstance(jobs, list):
            found["jobs"] = [self._entry(job, f"jobs[{i}]") for i, job in enumerate(jobs)]
        return found

    def base(self, named: Any) -> dict[str, Any]:
        """The section `base_model` of a base by its name or by a path; None: of the only one."""
        if isinstance(named, dict) and set(named) <= {"path"}:
            named = named.get("path")
        if named is None and len(self._bases) == 1:
            named = next(iter(self._bases))
        if not isinstance(named, str) or named not in self._bases:
            known = ", ".join(sorted(self._bases)) or "none: `tlora serve --base NAME=DIR`"
            raise must("base_model", f"name a base of the service ({known})", named)
        section: dict[str, Any] = plain(self._bases[named])
        return section

    def file(self, value: str, what: str) -> str:
        """The absolute path of a file: `file-...` of an upload, or a path below the own folder."""
        if value not in self._files_found:  # the jobs of a document share few files
            self._files_found[value] = self._find_file(value, what)
        return self._files_found[value]

    def _find_file(self, value: str, what: str) -> str:
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
        if job is None or job.tenant != self._tenant or job.removed_at is not None:
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
                if key in data:
                    found["data"][key] = self._data(data[key], f"{path}.data.{key}")
            template, names = data.get("chat_template"), shipped_templates()
            if isinstance(template, str) and template not in names:  # one is a program
                rule = f"be one of {', '.join(names)}"
                raise must(f"{path}.data.chat_template", rule, template)
        for key in ("init_from", "resume_from"):
            if isinstance(entry.get(key), str):
                found[key] = self.folder(entry[key], f"{path}.{key}")
        return found

    def _data(self, named: Any, what: str) -> Any:
        """A file, or the files of a list; whatever is of another type is left to its reader."""
        if isinstance(named, list):
            return [self._data(each, what) for each in named]
        return self.file(named, what) if isinstance(named, str) else named

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


_LONGEST_KEY = 200


class Accepted(NamedTuple):
    """The jobs of one submit."""

    jobs: list[Job]
    """`is_new` is False of all where the key came before."""
    notes: tuple[str, ...]
    """A sentence for each setting that has no effect."""


async def submit(
    service: Service,
    caller: Caller,
    document: Mapping[str, Any],
    *,
    key: str | None = None,
    asked: Mapping[str, Any] | None = None,
    also: Callable[[Sequence[Job]], None] | None = None,
) -> Accepted:
    """Submits all jobs of a document, or none.

    Args:
        document: a file of `tlora train`, or one job beside its `base_model`; see `References`.
        key: the same key with the same document gives the jobs that it made; None: always new ones.
        asked: what an API wants to remember in the rows' documents.
        also: called with the jobs in their transaction; if it raises there are no jobs.

    Raises:
        ConfigError: for the first mistake in the document.
        KeyReused: if the key came before with another document.
        NameTaken, OverLimit: as `Jobs.submit`.
    """
    if key is not None and (not key.isprintable() or not 0 < len(key.strip()) <= _LONGEST_KEY):
        raise must("Idempotency-Key", f"be 1 to {_LONGEST_KEY} characters of text", key)
    await service.read(service.quota.check_disk, caller.tenant)
    new, notes = await service.read(_read, service, caller, document, key, asked)
    most = caller.limits.jobs

    def make() -> list[Job]:
        jobs = service.store.jobs.submit(new, tenant=caller.tenant, most_unfinished=most)
        if also is not None:
            also(jobs)
        return jobs

    return Accepted(await service.change(make), notes)


def _read(
    service: Service,
    caller: Caller,
    document: Mapping[str, Any],
    key: str | None,
    asked: Mapping[str, Any] | None,
) -> tuple[list[NewJob], tuple[str, ...]]:
    references = References(service.home, service.store, service.bases(), tenant=caller.tenant)
    folder = service.home.tenant(caller.tenant)
    try:
        submissions, notes = split_submissions(references.resolve(document), folder)
    except ConfigError as error:
        raise ConfigError(service.outward(str(error), caller.tenant)) from error
    # Of the whole document, so that a key means all of its jobs.
    text = json.dumps(document, sort_keys=True, default=str)
    remembered = {**(asked or {}), "submit": hashlib.sha256(text.encode()).hexdigest()}
    key = key or uuid.uuid4().hex
    new, most = [], caller.limits.gpus
    base = submissions[0].base_key  # one for all of a document
    for index, entry in enumerate(submissions):
        schedule = dict(entry.document["service"])
        if most is not None and schedule["gpus"] > most:
            what = f"service.gpus of job {entry.name!r}"
            raise must(what, f"be at most your limit, {most}", schedule["gpus"])
        row = {**replace(entry, tenant=caller.tenant).row(), ASKED: remembered}
        made = NewJob(
            name=entry.name,
            document=row,
            base=base,
            key=f"{key}/{index}",
            schedule=schedule,
        )
        new.append(made)
    return new, tuple(service.outward(note, caller.tenant) for note in notes)
