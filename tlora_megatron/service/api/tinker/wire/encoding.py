"""Writes results as Tinker's protobuf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tlora_megatron.service.api.tinker.wire.proto import messages

if TYPE_CHECKING:
    from tlora_megatron.runtime.sampling.values import Answer, TokenLogprob

MEDIA_TYPE = "application/x-protobuf"
_NO_LOGPROB = -99999.0
"""Fills the cells of a table of likely tokens that have none."""


def encode_pass(
    logprobs: np.ndarray, lengths: Sequence[int], metrics: Mapping[str, float]
) -> bytes:
    """The result of a forward pass.

    Args:
        logprobs: of all targets, one datum behind the other.
        lengths: tokens of each datum.
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
    """The result of sampling from one prompt.

    Args:
        last_n: number of the prompt's last tokens whose log-probabilities are told; None = all.
    """
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
