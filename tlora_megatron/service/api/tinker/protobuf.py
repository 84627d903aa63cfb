"""Tinker's protobuf: reads the body of `forward_backward`, and writes results.

The generated messages are loaded without an import of the SDK, which would load torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tlora_megatron.service.api.tinker.names import Refused, WireError
from tlora_megatron.training.driven_requests import Request

if TYPE_CHECKING:
    from tlora_megatron.runtime.sampling.values import Answer, TokenLogprob

_NAME = "tinker.proto.tinker_public_pb2"
INSTALL = "Tinker's protocol needs its messages: pip install 'tlora-megatron[tinker]'"
MOST_BYTES = 64 * 1024 * 1024
"""A body may unpack to; the SDK sends chunks of about 5 MB."""
_TARGETS = "target_tokens"
_TOKEN = np.dtype("<i4")
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


def decode_pass(body: bytes, encoding: str | None = None) -> Pass:
    """Reads a request in protobuf, `zstd` or plain as the header `Content-Encoding` says.

    Raises:
        WireError: if the body is no such request.
        Refused: naming the datum and its field, if a request log could not hold it.
    """
    message = _parse(_unpack(body, encoding))
    if not message.data:
        raise Refused("data must hold at least one datum, got none")
    return Pass(
        model_id=message.model_id,
        seq_id=message.seq_id,
        request=Request(
            op="forward" if message.forward_only else "forward_backward",
            params={"loss_fn": message.loss_fn, "loss_fn_config": _config(message)},
            arrays=_arrays(message.data),
        ),
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


def _arrays(data: Sequence[Any]) -> dict[str, np.ndarray]:
    names = set(data[0].loss_fn_inputs)
    tokens, columns = [], {name: [] for name in sorted(names)}  # type: ignore[var-annotated]
    for index, datum in enumerate(data):
        where = f"data[{index}]"
        tokens.append(_tokens(datum.model_input, where))
        _check_names(datum.loss_fn_inputs, names, where)
        for name, column in columns.items():
            what = f"{where}.loss_fn_inputs[{name!r:.80}]"
            column.append(_row(datum.loss_fn_inputs[name], name, len(tokens[-1]), what))
    arrays = {
        "lengths": np.array([len(row) for row in tokens], np.int32),
        "tokens": np.concatenate(tokens),
    }
    for name, column in columns.items():
        arrays["targets" if name == _TARGETS else name] = np.concatenate(column)
    return arrays


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


def _row(tensor: Any, name: str, length: int, what: str) -> np.ndarray:
    dtype, wanted = _dtype_of(tensor, name, what)
    if tensor.WhichOneof("encoding") == "sparse_csr":
        raise Refused(f"{what} must be dense, got a sparse tensor")
    if list(tensor.shape) not in ([], [length]):
        got = str(list(tensor.shape)[:8])
        raise Refused(f"{what} must have a value a token, [{length}], got {got}")
    row = _flat(tensor.dense, dtype, what)
    if len(row) != length:
        raise Refused(f"{what} must have a value a token, {length}, got {len(row)}")
    return row.astype(wanted, copy=False)


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


def encode_pass(
    logprobs: np.ndarray, lengths: Sequence[int], metrics: Mapping[str, float]
) -> bytes:
    """The result of a forward pass.

    Args:
        logprobs: of all targets, one datum behind the other; `lengths` are tokens of each datum.
        metrics: by names `NAME:REDUCTION`, as the SDK joins those of several chunks.
    """
    module = messages()
    output = module.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    record = output.loss_fn_outputs.add()
    record.num_datums = len(lengths)
    field = record.fields["logprobs"]
    field.dtype = module.DTYPE_FLOAT32
    field.data = np.ascontiguousarray(logprobs, "<f4").tobytes()
    field.offsets = (np.cumsum([0, *lengths], dtype="<i8") * 4).astype("<i8").tobytes()
    for name, value in metrics.items():
        output.metrics[name] = value
    bytes_: bytes = output.SerializeToString()
    return bytes_


def encode_sample(answer: Answer, last_n: int | None = None) -> bytes:
    """The result of sampling, with log-probabilities of the prompt's last tokens; None = of all."""
    module = messages()
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
    bytes_: bytes = output.SerializeToString()
    return bytes_


def _fill_table(table: object, rows: Sequence[Sequence[TokenLogprob] | None]) -> None:
    width = max((len(row) for row in rows if row), default=0)
    tokens = np.zeros((len(rows), width), "<i4")
    logprobs = np.full((len(rows), width), _NO_LOGPROB, "<f4")
    for index, row in enumerate(rows):
        for column, (token, logprob) in enumerate(row or ()):
            tokens[index, column], logprobs[index, column] = token, logprob
    table.length, table.k = len(rows), width  # type: ignore[attr-defined]
    table.token_ids, table.logprobs = tokens.tobytes(), logprobs.tobytes()  # type: ignore[attr-defined]
