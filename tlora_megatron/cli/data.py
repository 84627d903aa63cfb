"""`tlora data`: shows what a job learns from its files, and fetches data sets from the Hub.

`tlora inspect CONFIG --data` shows the same of a configuration's jobs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from tlora_megatron.cli.tables import make_table, open_console
from tlora_megatron.config.documents import apply_override
from tlora_megatron.config.job import JobSpec
from tlora_megatron.config.reader import must
from tlora_megatron.config.schema import RunConfig
from tlora_megatron.config.sections import read_job
from tlora_megatron.files import replacing
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.service.logs import listen_to_warnings

if TYPE_CHECKING:
    from tlora_megatron.training.data.tokenize import TokenSequence

_CHECK = "tlora data check chats.jsonl --base models/Qwen3-8B --set data.learn=each"
_IMPORT = "tlora data import HuggingFaceH4/no_robots --out no_robots.jsonl"
_COLUMNS = ("rows", "eval rows", "tokens", "learnt", "median", "longest")
_OF_STEPS = ("steps", "epochs", "steps an epoch")
_MOST_BAD_LINES = 5
_MOST_TOKENS = 400
"""Tokens of a row that is shown."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "data",
        help="show what is learnt from data files, or fetch a data set",
        description="Shows what a job learns from its files, or fetches a data set from the Hub.",
        epilog=f"examples:\n  {_CHECK}\n  {_IMPORT}\n",
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    check = actions.add_parser(
        "check",
        help="show counts, rows as they are learnt, and warnings",
        description="Shows counts, rows as they are learnt, and warnings; or the first bad lines.",
        epilog=f"example:\n  {_CHECK}\n",
    )
    check.add_argument("files", nargs="+", metavar="FILE", help="data file")
    check.add_argument(
        "--base", required=True, metavar="DIR", help="folder of a model, for its tokenizer"
    )
    check.add_argument("--rows", type=int, default=2, metavar="N", help="rows shown (default: 2)")
    check.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="PATH=VALUE",
        help="set a key of the job: max_seq_len=4096 or data.chat_template=qwen3 (repeatable)",
    )
    check.add_argument("--json", action="store_true", help="print JSON")
    check.set_defaults(command=run_check)
    fetch = actions.add_parser(
        "import",
        help="write a data set of the Hub to a file",
        description="Writes a data set of the Hub to a file, once: training downloads nothing.",
        epilog=f"example:\n  {_IMPORT}\n",
    )
    fetch.add_argument("name", metavar="ORG/NAME", help="data set, or a folder of one")
    fetch.add_argument("--out", required=True, metavar="FILE", help="JSON lines to write")
    fetch.add_argument("--split", default="train", help="split (default: train)")
    fetch.add_argument("--config", metavar="NAME", help="configuration of the data set")
    fetch.add_argument("--revision", metavar="REV", help="branch, tag or commit")
    fetch.add_argument(
        "--format",
        metavar="F",
        help="messages, completion, text, sharegpt or alpaca (default: as its columns are); other "
        "columns are left out",
    )
    fetch.add_argument("--skip-bad", action="store_true", help="leave out rows that are refused")
    fetch.set_defaults(command=run_import)


def run_check(args: argparse.Namespace) -> int:
    """Shows files as a job would learn them; returns 1 for bad data."""
    # Not at the top: it needs the extra [train].
    from tlora_megatron.training.data.job_data import TokenizerFolder

    document: dict[str, Any] = {"name": "data", "data": {"train": args.files}, "max_steps": 1}
    for override in args.overrides:
        apply_override(document, override)
    job, base = read_job(document, Path.cwd()), Path(args.base)
    spec = read_model_spec(base / "config.json")
    tokenizer = TokenizerFolder(base).tokenizer
    with listen_to_warnings() as told:
        found = describe_job(job, tokenizer, spec.vocab_size, num_shown=args.rows)
    for key in _keys(("eval rows", *_OF_STEPS)):
        found.pop(key, None)
    found["warnings"] = [warning.getMessage() for warning in told]
    if args.json:
        print(json.dumps({"kind": "data", **found}, indent=2))
    else:
        print_data(open_console(), {"data": found})
    return int("errors" in found)


def run_import(args: argparse.Namespace) -> int:
    """Writes rows of a data set of the Hub that a job can learn."""
    try:
        import datasets
    except ImportError as error:
        install = "pip install 'tlora-megatron[data]'"
        raise ImportError(f"tlora data import needs datasets: {install}") from error
    from tlora_megatron.training.data.contents import without_nulls
    from tlora_megatron.training.data.rows import FORMS, keys_of, parse_row

    rows = datasets.load_dataset(args.name, args.config, split=args.split, revision=args.revision)
    columns = rows.column_names
    forms = [form for form, keys in FORMS.items() if set(keys) <= set(columns)]
    form = args.format or next(iter(forms), None)
    if form not in forms:
        rule = f"be one of {', '.join(forms) or 'none'}, whose columns are there"
        raise must("--format", rule, form, f"the columns are {', '.join(columns)}")
    kept, bad = [column for column in columns if column in keys_of(form)], []
    with replacing(Path(args.out), mode=0o666) as file:
        for number, row in enumerate(map(without_nulls, rows.select_columns(kept)), start=1):
            try:
                parse_row(row, f"{args.name} row {number}")
            except ValueError as error:
                if not args.skip_bad:
                    raise
                bad.append(str(error))
            else:
                file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        if len(bad) == len(rows):
            raise must(args.name, "have a row that can be learnt", bad[0] if bad else "none")
    told, left = f"{len(rows) - len(bad):,} rows of the form {form}", set(columns) - set(kept)
    told += f"; columns left out: {', '.join(sorted(left))}" if left else ""
    told += f"; {len(bad):,} rows left out, the first since {bad[0]}" if bad else ""
    open_console().print(f"{args.out}: {told}")
    return 0


def describe_data(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Describes the data of each job that has some, by name; of bad data, the first bad lines."""
    from tlora_megatron.training.data.job_data import TokenizerFolder

    tokenizer = TokenizerFolder(config.base_model.folder).tokenizer
    vocab_size = read_model_spec(config.base_model.config_file).vocab_size
    return {
        job.name: describe_job(replace(job, seed=job.seed + config.run.seed), tokenizer, vocab_size)
        for job in config.jobs
        if not job.driven
    }


def describe_job(
    job: JobSpec, tokenizer: Any, vocab_size: int, num_shown: int | None = None
) -> dict[str, Any]:
    """Describes a job's data.

    Args:
        num_shown: rows that are shown from the start of the data; None: the first one trained.
    """
    import numpy as np

    from tlora_megatron.training.data.job_data import BatchPlan, load_job_data
    from tlora_megatron.training.data.mapped_tokens import lengths_of

    try:
        data = load_job_data(job, tokenizer, vocab_size)
    except ValueError as error:
        return {"errors": list(islice(_bad_lines(job), _MOST_BAD_LINES)) or [str(error)]}
    plan, lengths = BatchPlan.for_job(job, len(data.train)), lengths_of(data.train)
    sides = job.num_sides
    found = {
        "rows": plan.num_sequences,
        "eval_rows": len(data.eval) // sides,
        "cut": data.num_truncated,
        "left_out": data.num_dropped,
        "tokens": int(lengths.sum()),
        "learnt": sum(int(sequence.is_target.sum()) for sequence in data.train),
        "median": int(np.median(lengths)),
        "longest": int(lengths.max()),
        "steps_an_epoch": -(-plan.num_sequences // job.batch_size),
        "steps": plan.num_steps,
        "epochs": round(plan.num_epochs, 2),
    }

    def row(index: int) -> list[dict[str, Any]]:
        own = data.train[index * sides : (index + 1) * sides]
        return [part for sequence in own for part in _parts(sequence, tokenizer)]

    if num_shown is None:
        return {**found, "row": row(plan.indices(0)[0])}
    return {**found, "shown": [*map(row, range(min(num_shown, plan.num_sequences)))]}


def print_data(console: Console, jobs: dict[str, dict[str, Any]]) -> None:
    """Prints the result of `describe_data`: a row for each job, then a row of each one's data."""
    columns = [*_COLUMNS, *_OF_STEPS]
    for data in jobs.values():
        if "errors" not in data:
            columns = [column for column in columns if _keys([column])[0] in data]
    table = make_table("job", *columns, right=columns, words=("job",))
    for name, data in jobs.items():
        if "errors" not in data:
            numbers = [data[key] for key in _keys(columns)]
            table.add_row(name, *(f"{number:,}" for number in numbers))
    if table.row_count:
        console.print(table, soft_wrap=False)
    for name, data in jobs.items():
        for error in data.get("errors", ()):
            console.print(f"error: {error}", style="red")
        shown = [data["row"]] if "row" in data else data.get("shown", [])
        which = "the first row that it trains on" if "row" in data else "its first rows"
        if shown:
            console.print(f"{name}: {which}; ⟦what is learnt⟧", style="bold")
        for parts in shown:
            row = Text()
            for part in parts:
                learnt = (f"⟦{part['text']}⟧", "green")
                row.append(*(learnt if part["learnt"] else (part["text"], "")))
            console.print(row)


def _keys(columns: Any) -> list[str]:
    return [column.replace(" ", "_") for column in columns]


def _bad_lines(job: JobSpec) -> Iterator[str]:
    """What is wrong with each line that is no row."""
    from tlora_megatron.training.data.jsonl_file import files_of

    for file in filter(None, files_of(job)):
        try:
            for raw in file.raw_rows(file.read()):
                try:
                    file.parse(*raw)
                except ValueError as error:
                    yield str(error)
        except ValueError as error:  # of a file as a whole
            yield str(error)


def _parts(sequence: TokenSequence, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """The text of a sequence in parts that are learnt or are not."""
    tokens, learnt = sequence.tokens[:_MOST_TOKENS], sequence.is_target[:_MOST_TOKENS]
    pairs = zip(tokens.tolist(), learnt.tolist(), strict=True)
    for is_learnt, own in groupby(pairs, itemgetter(1)):
        yield {"text": tokenizer.decode([token for token, _ in own]), "learnt": is_learnt}
    if len(sequence.tokens) > _MOST_TOKENS:
        rest = len(sequence.tokens) - _MOST_TOKENS
        yield {"text": f" ... and {rest:,} tokens", "learnt": False}
