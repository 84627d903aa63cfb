"""Tinker's protobuf: reads the body of `forward_backward`, and writes results.

The generated messages are loaded without an import of the SDK, which would load torch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tlora_megatron.service.api.tinker.names import Refused, WireError
from tlora_megatron.training.driven_requests import Answer as PassAnswer
from tlora_megatron.training.driven_requests import Op, Request

if TYPE_CHECKING:
    from tlora_megatron.runtime.sampling.values import Answer, TokenLogprob
    from tlora_megatron.service.api.tinker.bodies import Sample, TargetIds

_NAME = "tinker.proto.tinker_public_pb2"
INSTALL = "Tinker's protocol needs its messages: pip install 'tlora-megatron[tinker]'"
MOST_BYTES = 64 * 1024 * 1024
"""A body may unpack to; the SDK sends chunks of about 5 MB."""
_TARGETS = "target_tokens"
_TOKEN, _INDEX = np.dtype("<i4"), np.dtype("<i8")
MOST_RUNS = 128
"""Targets of a token."""
MOST_TARGETS = 1 << 22
"""Of all data of a pass: some 100 MB in the request log."""
MEDIA_TYPE = "application/x-protobuf"
_NO_LOGPROB = -99999.0
"""Fills the cells of a table of likely tokens that have none."""


def is_installed() -> bool:
    """True if the package `tinker` is there."""
    return find_spec("tinker") is not None


@cache
def messages() -> Any:
    """The module of the generated message classes; an `ImportError` without the package."""
    if _NAME in sys.modules:
        return sys.modules[_NAME]
    package = find_spec("tinker")
    if package is None or not package.submodule_search_locations:
        raise ImportError(INSTALL)
    file = Path(package.submodule_search_locations[0]) / "proto" / "tinker_public_pb2.py"
    # Under a name of its own: a later import of the SDK finds its own module, and equal messages.
    spec = spec_from_file_location("tlora_megatron_tinker_messages", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ImportError(INSTALL)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One forward pass, with or without its backward pass, as a client asks for it."""

    model_id: str
    seq_id: int
    """Its number among the requests of the model, from 1."""
    request: Request
    spans: Sequence[Sequence[Any]]
    """Messages of each datum that say of which samples its targets are."""


def decode_pass(body: bytes, encoding: str | None = None) -> Pass:
    """Reads a request in protobuf, `zstd` or plain as the header `Content-Encoding` says.

    Raises:
        WireError: if the body is no such request.
        Refused: naming the datum and its field, if a request log could not hold it.
    """
    message = _parse(_unpack(body, encoding))
    if not message.data:
        raise Refused("data must hold at least one datum, got none")
    params: dict[str, Any] = {"loss_fn": message.loss_fn, "loss_fn_config": _config(message)}
    arrays, runs = _arrays(message.data)
    if runs is not None:
        if message.loss_fn != "cross_entropy":
            raise Refused(
                f"target_tokens must have one dimension under {message.loss_fn!r:.80}, got two"
            )
        params["runs"] = runs
    op: Op = "forward" if message.forward_only else "forward_backward"
    return Pass(
        model_id=message.model_id,
        seq_id=message.seq_id,
        request=Request(op=op, params=params, arrays=arrays),
        spans=[datum.loss_fn_input_spans for datum in message.data],
    )


def _unpack(body: bytes, encoding: str | None) -> bytes:
    if encoding in (None, "", "identity"):
        return body
    if encoding != "zstd":
        raise WireError(f"Content-Encoding must be zstd or identity, got {encoding!r:.80}")
    import zstandard

    try:
        with zstandard.ZstdDecompressor(max_window_size=MOST_BYTES).stream_reader(body) as reader:
            unpacked: bytes = reader.read(MOST_BYTES + 1)
    except zstandard.ZstdError as error:
        raise WireError(
            f"the body must be packed by zstd, got {len(body)} bytes: {error}"
        ) from error
    if len(unpacked) > MOST_BYTES:
        raise WireError(f"the body must unpack to at most {MOST_BYTES} bytes, got more")
    return unpacked


def _parse(body: bytes) -> Any:
    from google.protobuf.message import DecodeError

    try:
        return messages().ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise WireError(
            f"the body must be a ForwardBackwardRequest in protobuf, got {len(body)} bytes that "
            "are none"
        ) from error


def _config(message: Any) -> dict[str, float | str]:
    if message.loss_fn_config_v2:
        items = message.loss_fn_config_v2.items()
        return {key: getattr(value, value.WhichOneof("value") or "number") for key, value in items}
    return dict(message.loss_fn_config)


def _arrays(data: Sequence[Any]) -> tuple[dict[str, np.ndarray], list[int] | None]:
    """The arrays of a request; and of how many sequences each datum is, unless all are of one.

    One whose tokens have several targets each is a sequence for each of them.
    """
    names = set(data[0].loss_fn_inputs)
    tokens, columns = [], {name: [] for name in sorted(names)}  # type: ignore[var-annotated]
    runs, room, has_tables = [], MOST_TARGETS, False
    for index, datum in enumerate(data):
        where = f"data[{index}]"
        row = _tokens(datum.model_input, where)
        _check_names(datum.loss_fn_inputs, names, where)
        shape = [len(row), *_targets_of_a_token(datum.loss_fn_inputs[_TARGETS], where)]
        has_tables = has_tables or len(shape) > 1
        runs.append(shape[1] if len(shape) > 1 else 1)
        room -= runs[-1] * len(row)
        if room < 0:
            raise Refused(f"data must have at most {MOST_TARGETS:,} targets together, got more")
        tokens += [row] * runs[-1]
        for name, column in columns.items():
            what = f"{where}.loss_fn_inputs[{name!r:.80}]"
            column.append(_row(datum.loss_fn_inputs[name], name, shape, what))
    arrays = {
        "lengths": np.array([len(row) for row in tokens], np.int32),
        "tokens": np.concatenate(tokens),
    }
    for name, column in columns.items():
        arrays["targets" if name == _TARGETS else name] = np.concatenate(column)
    return arrays, runs if has_tables else None


def _targets_of_a_token(tensor: Any, where: str) -> list[int]:
    """How many targets each token has, if they are a table; else nothing."""
    found = list(tensor.shape)[1:2]
    if found and not 1 <= found[0] <= MOST_RUNS:
        rule = f"have 1 to {MOST_RUNS} targets a token"
        raise Refused(f"{where}.loss_fn_inputs[{_TARGETS!r}] must {rule}, got {found[0]}")
    return found


def _check_names(inputs: Mapping[str, Any], names: set[str], where: str) -> None:
    if _TARGETS not in inputs:
        raise Refused(f"{where}.loss_fn_inputs must hold {_TARGETS}, got {_listed(inputs)}")
    if set(inputs) != names:
        raise Refused(
            f"{where}.loss_fn_inputs must hold the names of data[0], {_listed(names)}, got "
            f"{_listed(inputs)}"
        )


def _listed(names: Mapping[str, Any] | set[str]) -> str:
    return ", ".join(f"{name!r:.80}" for name in sorted(names)[:16]) or "nothing"


def _tokens(chunks: Sequence[Any], where: str) -> np.ndarray:
    rows = []
    for chunk in chunks:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise Refused(f"{where}.model_input must be tokens of text, got {kind or 'nothing'}")
        rows.append(_flat(chunk.encoded_text.tokens, _TOKEN, f"{where}.model_input"))
    if not rows or not sum(map(len, rows)):
        raise Refused(f"{where}.model_input must hold at least one token, got none")
    return rows[0] if len(rows) == 1 else np.concatenate(rows)


def _row(tensor: Any, name: str, shape: list[int], what: str) -> np.ndarray:
    """The values of a datum's tokens; of several targets a token, those of the first ones first."""
    dtype, wanted = _dtype_of(tensor, name, what)
    if list(tensor.shape) not in ([], shape):
        got = str(list(tensor.shape)[:8])
        rule = "a value a token" if len(shape) == 1 else "a value a target"
        raise Refused(f"{what} must have {rule}, {shape}, got {got}")
    if tensor.WhichOneof("encoding") == "sparse_csr":
        row = _dense(tensor.sparse_csr, dtype, shape, what)
    else:
        row = _flat(tensor.dense, dtype, what)
    if len(row) != math.prod(shape):
        raise Refused(f"{what} must have a value a token, {math.prod(shape)}, got {len(row)}")
    return row.reshape(shape).T.ravel().astype(wanted, copy=False)


def _dense(csr: Any, dtype: np.dtype, shape: list[int], what: str) -> np.ndarray:
    """A sparse table with 0 in all cells that it leaves out."""
    values = _flat(csr.values, dtype, what)
    ends, columns = (_flat(raw, _INDEX, what) for raw in (csr.crow_indices, csr.col_indices))
    is_whole = len(shape) == 2 and len(ends) == shape[0] + 1 and len(columns) == len(values)
    counts = np.diff(ends)
    if not is_whole or ends[0] != 0 or ends[-1] != len(values) or (counts < 0).any():
        raise Refused(f"{what} must be a whole sparse table, got {len(values)} values")
    if len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]:
        raise Refused(f"{what} must have columns below {shape[1]}, got {columns.max()}")
    table = np.zeros(shape, dtype)
    table[np.repeat(np.arange(shape[0]), counts), columns] = values
    return table.ravel()


def _dtype_of(tensor: Any, name: str, what: str) -> tuple[np.dtype, np.dtype]:
    """The dtype that a tensor has on the wire, and that of the request log."""
    module = messages()
    integers: dict[int, np.dtype] = {
        module.DTYPE_INT64: np.dtype("<i8"),
        module.DTYPE_INT32: np.dtype("<i4"),
    }
    floats: dict[int, np.dtype] = {module.DTYPE_FLOAT32: np.dtype("<f4")}
    known = integers if name == _TARGETS else floats
    if tensor.dtype not in known:
        got = dict(zip(module.DType.values(), module.DType.keys(), strict=True))
        rule = " or ".join(got[value] for value in known)
        raise Refused(f"{what} must be {rule}, got {got.get(tensor.dtype, tensor.dtype)}")
    return known[tensor.dtype], np.dtype(np.int64 if name == _TARGETS else np.float32)


def _flat(raw: bytes, dtype: np.dtype, what: str) -> np.ndarray:
    if len(raw) % dtype.itemsize:
        raise Refused(
            f"{what} must be whole values of {dtype.itemsize} bytes, got {len(raw)} bytes"
        )
    return np.frombuffer(raw, dtype)


def encode_pass(answer: PassAnswer) -> bytes:
    """The result of a forward pass; its metrics have names `NAME:REDUCTION`, by which the SDK
    joins those of several chunks."""
    assert answer.logprobs is not None, "a pass has log-probabilities"
    assert answer.lengths is not None, "a pass has sequences"
    module, place, begin = messages(), 0, 0
    output = module.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    runs = answer.values.get("runs")
    lengths = answer.lengths.tolist()
    if runs is None:
        _add_record(output, answer.logprobs, lengths)
    for count in runs or ():
        length = lengths[place]
        table = answer.logprobs[begin : begin + count * length].reshape(count, length)
        if answer.values.get("loss_fn") == "cross_entropy":
            _add_record(output, table.T, [length], count)
        else:  # the others are its own business
            _add_record(output, table[0], [length])
        place, begin = place + count, begin + count * length
    for name, value in answer.metrics.items():
        output.metrics[name] = value
    bytes_: bytes = output.SerializeToString()
    return bytes_


def _add_record(output: Any, values: np.ndarray, lengths: Sequence[int], *trailing: int) -> None:
    """Adds the log-probabilities of some data, which have so many tokens each."""
    record = output.loss_fn_outputs.add()
    record.num_datums = len(lengths)
    field = record.fields["logprobs"]
    field.dtype = messages().DTYPE_FLOAT32
    field.trailing_shape.extend(trailing)
    field.data = np.ascontiguousarray(values, "<f4").tobytes()
    sizes = np.cumsum([0, *lengths], dtype="<i8") * 4 * math.prod(trailing)
    field.offsets = sizes.astype("<i8").tobytes()


def encode_sample(answer: Answer, asked: Sample) -> bytes:
    """The result of sampling."""
    module, last_n = messages(), asked.prompt_logprobs_last_n
    output = module.SampleResponse()
    for sampled in answer.sequences:
        sequence = output.sequences.add()
        is_stopped = sampled.stop_reason == "stop"
        sequence.stop_reason = module.STOP_REASON_STOP if is_stopped else module.STOP_REASON_LENGTH
        sequence.tokens = np.array(sampled.tokens, "<i4").tobytes()
        sequence.logprobs = np.array(sampled.logprobs, "<f4").tobytes()
        if sampled.top_logprobs:
            _fill_table(sequence.topk_sampled_logprobs, sampled.top_logprobs)
    if answer.prompt_logprobs is not None:
        values = [np.nan if value is None else value for value in answer.prompt_logprobs]
        if last_n is not None:
            values[: max(0, len(values) - last_n)] = [np.nan] * max(0, len(values) - last_n)
        output.prompt_logprobs = np.array(values, "<f4").tobytes()
    if answer.top_prompt_logprobs is not None:
        _fill_table(output.topk_prompt_logprobs, answer.top_prompt_logprobs)
    if asked.target_prompt_logprobs is not None:
        _fill_targets(output.target_prompt_logprobs, asked.target_prompt_logprobs, answer)
    bytes_: bytes = output.SerializeToString()
    return bytes_


def _fill_targets(tensor: Any, asked: TargetIds, answer: Answer) -> None:
    """Writes a table with the layout of what was asked, and 0 where that asked for nothing."""
    told = chain.from_iterable(answer.target_logprobs)
    found = np.array([next(told) if token >= 0 else 0.0 for token in asked.data], "<f4")
    tensor.dtype = messages().DTYPE_FLOAT32
    tensor.shape.extend(asked.shape)
    if asked.sparse_crow_indices is None:
        tensor.dense = found.tobytes()
        return
    csr = tensor.sparse_csr
    csr.values = found.tobytes()
    csr.crow_indices = np.array(asked.sparse_crow_indices, _INDEX).tobytes()
    csr.col_indices = np.array(asked.sparse_col_indices or [], _INDEX).tobytes()


def decode_sample(content: bytes) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Reads the tokens `[N]` of each sequence again, and the likeliest `[N, k]` of each place."""
    found = []
    for sequence in messages().SampleResponse.FromString(content).sequences:
        table = sequence.topk_sampled_logprobs
        shape = (table.length, table.k)
        likely = np.frombuffer(table.token_ids, "<i4").reshape(shape)
        logprobs = np.frombuffer(table.logprobs, "<f4").reshape(shape)
        found.append((np.frombuffer(sequence.tokens, "<i4"), likely, logprobs))
    return found


def _fill_table(table: object, rows: Sequence[Sequence[TokenLogprob] | None]) -> None:
    width = max((len(row) for row in rows if row), default=0)
    tokens = np.zeros((len(rows), width), "<i4")
    logprobs = np.full((len(rows), width), _NO_LOGPROB, "<f4")
    for index, row in enumerate(rows):
        for column, (token, logprob) in enumerate(row or ()):
            tokens[index, column], logprobs[index, column] = token, logprob
    table.length, table.k = len(rows), width  # type: ignore[attr-defined]
    table.token_ids, table.logprobs = tokens.tobytes(), logprobs.tobytes()  # type: ignore[attr-defined]
