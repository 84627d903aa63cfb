"""Adds to a pass what is known of the samples that its targets are from, by their sequence ids.

For `stable_reinforce` that is what was recorded when they were drawn, which the answer to a request
for samples holds: of every token the likeliest ones of the sampler. For all losses it is how far
the model was trained when it published the weights that they were drawn from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from tlora_megatron.service.api.tinker.bodies import RECORDED_TOKENS
from tlora_megatron.service.api.tinker.context import TenantContext
from tlora_megatron.service.api.tinker.names import (
    BY,
    ModelId,
    Refused,
    RequestId,
    UnknownId,
)
from tlora_megatron.service.api.tinker.protobuf import Pass, decode_sample
from tlora_megatron.service.api.tinker.sampling import files_of
from tlora_megatron.training.driven_requests import SAMPLED_STEPS, UNKNOWN_LOGPROB, Request


def with_steps(context: TenantContext, taken: Pass, request: Request) -> Request:
    """The request with the step of each version of the model that its data say they are from.

    What else they name is passed over, such as samples of a base or of another model.
    """
    spans = [span.sampled_tokens for of_datum in taken.spans for span in of_datum]
    if not spans:
        return request
    model = context.open_model(taken.model_id)
    log = context.request_log(model)

    @cache
    def step_of(version: str) -> int | None:
        found = re.fullmatch(rf"{model.job}@(\d{{1,9}})", version)
        saved = None if found is None else log.read_answer(int(found[1]))
        return None if saved is None else saved.values.get("step")

    found = [step_of(span.sequence_id.partition(BY)[2]) for span in spans if span.length]
    steps = [step for step in found if step is not None]
    return replace(request, params={**request.params, SAMPLED_STEPS: steps}) if steps else request


class _Sampled(NamedTuple):
    """One sequence: its tokens, and the likeliest ones of each place."""

    tokens_N: np.ndarray
    likely_NK: np.ndarray
    logprob_NK: np.ndarray


_Find = Callable[[str], _Sampled]


def with_recorded(context: TenantContext, taken: Pass) -> Request:
    """The request of a pass with the likeliest tokens beside each target, a sequence for each.

    Raises:
        Refused: naming the datum, if it does not say of which samples its targets are.
    """
    request = taken.request
    for name in ("logprobs", "advantages"):
        if name not in request.arrays:
            raise Refused(f"stable_reinforce must have {name} for every token, got none")

    @cache
    def find(sequence_id: str) -> _Sampled:
        return _find(context, ModelId.parse(taken.model_id).session, sequence_id)

    parts: dict[str, list[np.ndarray]] = {name: [] for name in request.arrays}
    begin = 0
    for index, length in enumerate(request.arrays["lengths"].tolist()):
        rows = slice(begin, begin + length)
        begin += length
        own = {name: array[rows] for name, array in request.arrays.items() if name != "lengths"}
        found = _widened(own, taken.spans[index], find, f"data[{index}]")
        found["lengths"] = np.full(RECORDED_TOKENS, length, np.int32)
        for name, array in found.items():
            parts[name].append(array.ravel())
    runs = [RECORDED_TOKENS] * len(request.arrays["lengths"])
    arrays = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    return replace(request, params={**request.params, "runs": runs}, arrays=arrays)


def _widened(
    own: dict[str, np.ndarray], spans: Any, find: _Find, where: str
) -> dict[str, np.ndarray]:
    """The arrays of one datum `[RECORDED_TOKENS, N]`; the first rows are its own."""
    found = {name: np.tile(array, (RECORDED_TOKENS, 1)) for name, array in own.items()}
    targets_KN, logprobs_KN = found["targets"], found["logprobs"]
    logprobs_KN[1:] = UNKNOWN_LOGPROB
    begin, count = 0, targets_KN.shape[1]
    for span in spans:
        part = getattr(span, span.WhichOneof("span") or "prompt_tokens")
        place = slice(begin, begin + part.length)
        begin += part.length
        if not 0 <= part.length <= count or begin > count:
            break
        if not span.HasField("sampled_tokens"):
            if own["advantages"][place].any():
                raise Refused(f"{where}.advantages must be 0 where no token was sampled, got more")
            continue
        sequence, rows = find(part.sequence_id), slice(part.offset, part.offset + part.length)
        tokens_N = sequence.tokens_N[rows] if part.offset >= 0 else sequence.tokens_N[:0]
        if not np.array_equal(tokens_N, targets_KN[0, place]):
            rule = f"be the tokens of {part.sequence_id[:200]!r} that loss_fn_input_spans names"
            raise Refused(f"{where}.target_tokens must {rule}, got others")
        others = _others(sequence, rows)
        targets_KN[1:, place] = others.likely_NK.T
        logprobs_KN[1:, place] = others.logprob_NK.T
    if begin != count:
        rule = f"name where each of the {count} targets is from (Datum.with_provenance)"
        raise Refused(f"{where}.loss_fn_input_spans must {rule}, got {begin}")
    return found


def _others(sequence: _Sampled, rows: slice) -> _Sampled:
    """The likeliest tokens of some places but for those that were drawn, one fewer."""
    tokens_N, likely_NK, logprob_NK = (array[rows] for array in sequence)
    is_drawn_NK = likely_NK == tokens_N[:, None]
    order_NK = np.argsort(is_drawn_NK, axis=1, kind="stable")[:, : RECORDED_TOKENS - 1]
    known_NK = np.where(is_drawn_NK, UNKNOWN_LOGPROB, logprob_NK)
    return _Sampled(
        tokens_N,
        np.take_along_axis(likely_NK, order_NK, 1),
        np.maximum(np.take_along_axis(known_NK, order_NK, 1), UNKNOWN_LOGPROB),
    )


def _find(context: TenantContext, session: str, sequence_id: str) -> _Sampled:
    """What was recorded of a sequence, which is kept for a day more then.

    Raises `UnknownId` if there is none in the session.
    """
    id, _, number = sequence_id.partition(BY)[0].rpartition(":")
    rule = f"a sequence_id must be of a sample of session {session} of the last day, drawn with "
    how = "record_stability_info, at temperature 1 and from all tokens"
    unknown = UnknownId(f"{rule}{how}, got {sequence_id[:200]!r}")
    request = RequestId.parse(id)
    if request.of.session != session or not re.fullmatch(r"\d{1,9}", number):
        raise unknown
    files = files_of(context, request)
    asked, answer = files.asked(), files.result()
    sequences = decode_sample(answer) if isinstance(answer, bytes) else []
    if asked is None or not _is_recorded(asked["body"]) or int(number) >= len(sequences):
        raise unknown
    files.keep_longer()
    tokens, likely, logprobs = sequences[int(number)]
    if len(likely) != len(tokens) or likely.shape[1] < RECORDED_TOKENS:
        raise unknown
    return _Sampled(tokens, likely[:, :RECORDED_TOKENS], logprobs[:, :RECORDED_TOKENS])


def _is_recorded(body: Mapping[str, Any]) -> bool:
    params = body["sampling_params"]
    is_whole = params["temperature"] == params["top_p"] == 1 and params["top_k"] <= 0
    return bool(body["record_stability_info"]) and is_whole
