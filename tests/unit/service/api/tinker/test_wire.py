"""Tinker's protobuf, written by the SDK itself and read here, and the other way round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.response_conv import deserialize_proto_response

from tests.helpers.launch import imported
from tests.helpers.tinker.raw import MODEL, datum, message
from tlora_megatron.runtime.sampling.values import Answer, Sampled, TokenLogprob
from tlora_megatron.service.api.tinker.bodies import Sample, as_prompt, check_sample
from tlora_megatron.service.api.tinker.names import Refused, WireError
from tlora_megatron.service.api.tinker.protobuf import (
    MOST_BYTES,
    decode_pass,
    encode_pass,
    encode_sample,
)
from tlora_megatron.training.driven_requests import Answer as PassAnswer
from tlora_megatron.training.driven_requests import check_request


def test_a_pass_is_read_as_the_sdk_wrote_it() -> None:
    data = [datum(1, 2, 3, weights=[0.0, 1.0, 0.5]), datum(9, weights=[1.0])]
    found = decode_pass(message(*data).SerializeToString())
    assert (found.model_id, found.seq_id, found.request.op) == (MODEL, 7, "forward_backward")
    assert found.request.params == {"loss_fn": "cross_entropy", "loss_fn_config": {}}
    arrays = {name: array.tolist() for name, array in found.request.arrays.items()}
    assert arrays == {
        "lengths": [3, 1],
        "tokens": [1, 2, 3, 9],
        "targets": [2, 3, 4, 10],
        "weights": [0.0, 1.0, 0.5, 1.0],
    }
    check_request(found.request)


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        ("importance_sampling", None),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
        ("cispo", {"clip_low_threshold": 0.0}),
        ("dro", {"beta": 0.05}),
    ],
)
def test_losses_of_reinforcement_bring_their_arrays_and_settings(loss: str, config: Any) -> None:
    inputs = {"logprobs": [-1.0, -2.0], "advantages": [1.0, -1.0]}
    found = decode_pass(
        message(datum(1, 2, **inputs), loss=loss, config=config).SerializeToString()
    )
    assert found.request.params == {"loss_fn": loss, "loss_fn_config": config or {}}
    check_request(found.request)


def test_a_forward_pass_and_a_config_of_an_older_sdk_are_read() -> None:
    written = message(datum(1), loss="dro", config={"beta": 0.1})
    written.forward_only = True
    written.ClearField("loss_fn_config_v2")
    found = decode_pass(written.SerializeToString())
    assert found.request.op == "forward"
    assert found.request.params["loss_fn_config"] == {"beta": 0.1}


def test_a_packed_body_is_unpacked_but_no_bomb() -> None:
    body = message(datum(1, 2)).SerializeToString()
    packed = zstandard.ZstdCompressor().compress(body)
    assert decode_pass(packed, "zstd").request.arrays["tokens"].tolist() == [1, 2]
    bomb = zstandard.ZstdCompressor().compress(bytes(MOST_BYTES + 1))
    with pytest.raises(WireError, match="must unpack to at most"):
        decode_pass(bomb, "zstd")
    with pytest.raises(WireError, match="must be packed by zstd, got"):
        decode_pass(body, "zstd")
    with pytest.raises(WireError, match="Content-Encoding must be zstd or identity, got 'gzip'"):
        decode_pass(body, "gzip")


WEIGHTS = "data[0].loss_fn_inputs['weights']"
TARGETS = "data[0].loss_fn_inputs['target_tokens']"
ONE = "target_tokens must have one dimension under 'ppo', got two"
UNLIKE = "data.add().CopyFrom(written.data[0]); del written.data[1].loss_fn_inputs['weights']"


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (
            f"{WEIGHTS}.sparse_csr.values = b'abcd'",
            r"data\[0\].loss_fn_inputs\['weights'\] must be a whole sparse table, got 1 values",
        ),
        (f"{TARGETS}.shape[:] = [2, 1]", r"'weights'\] must have a value a target, \[2, 1\], got"),
        (f"{TARGETS}.shape[:] = [2, 999]", "must have 1 to 128 targets a token, got 999"),
        (f"{TARGETS}.shape[:] = written.{WEIGHTS}.shape[:] = [2, 1]; written.loss_fn = 'ppo'", ONE),
        (
            "data[0].model_input.add().image.data = b'png'",
            r"data\[0\].model_input must be tokens of text, got image",
        ),
        (
            f"{TARGETS}.dtype = {pb.DTYPE_FLOAT32}",
            "must be DTYPE_INT64 or DTYPE_INT32, got DTYPE_FLOAT32",
        ),
        (f"{WEIGHTS}.dtype = {pb.DTYPE_INT64}", "must be DTYPE_FLOAT32, got DTYPE_INT64"),
        (f"{WEIGHTS}.dtype = 99", "must be DTYPE_FLOAT32, got 99"),
        (f"{WEIGHTS}.dense = b'abc'", "must be whole values of 4 bytes, got 3 bytes"),
        (
            f"{WEIGHTS}.dense = b'abcd'; del written.{WEIGHTS}.shape[:]",
            "must have a value a token, 2, got 1",
        ),
        ("data[0].loss_fn_inputs.pop('target_tokens')", "must hold target_tokens, got 'weights'"),
        (UNLIKE, r"data\[1\].loss_fn_inputs must hold the names of data\[0\]"),
        ("data[0].ClearField('model_input')", "must hold at least one token, got none"),
        ("ClearField('data')", "data must hold at least one datum, got none"),
    ],
)
def test_a_wrong_datum_is_refused_by_its_place(spoil: str, sentence: str) -> None:
    written = message(datum(1, 2, weights=[1.0, 1.0]))
    exec(f"written.{spoil}", {"written": written})
    with pytest.raises(Refused, match=sentence):
        decode_pass(written.SerializeToString())


ASKED: dict[str, Any] = {"prompt": {"chunks": [{"tokens": [1, 2, 3]}]}, "sampling_params": {}}
TABLE = torch.tensor([[3, 0, 4, 0, 0, 0], [0, 0, 0, 0, 5, 0], [7, 0, 0, 0, 0, 8]])


@pytest.mark.parametrize("width", [2, 6])
def test_tokens_with_several_targets_are_sequences_and_answered_as_tables(width: int) -> None:
    """The SDK sends the wide table sparse."""
    table = TABLE[:, :width]
    inputs = {"target_tokens": table, "weights": table / 10}
    model_input = types.ModelInput.from_ints([1, 2, 3])
    written = message(types.Datum(model_input=model_input, loss_fn_inputs=inputs))
    is_sparse = written.data[0].loss_fn_inputs["weights"].WhichOneof("encoding") == "sparse_csr"
    assert is_sparse == (width == 6)
    found = decode_pass(written.SerializeToString()).request
    check_request(found)
    assert found.params["runs"] == [width]
    arrays = {name: array.reshape(width, -1) for name, array in found.arrays.items()}
    assert arrays["targets"].T.tolist() == table.tolist()
    assert arrays["tokens"].tolist() == [[1, 2, 3]] * width
    np.testing.assert_allclose(arrays["weights"].T, table / 10)
    logprobs = -found.arrays["targets"].astype(np.float32)
    values = {"runs": [width], "loss_fn": "cross_entropy"}
    answer = PassAnswer(values=values, logprobs=logprobs, lengths=found.arrays["lengths"])
    told: Any = deserialize_proto_response(encode_pass(answer), types.ForwardBackwardOutput)
    assert told.loss_fn_outputs[0]["logprobs"].to_torch().tolist() == (-table).tolist()


@pytest.mark.parametrize("width", [2, 6])
def test_the_sdk_reads_scores_of_targets_as_it_asked_for_them(width: int) -> None:
    table = TABLE[:2, :width] - 1
    sent = types.TensorData.from_torch_sparse(table, pad_value=-1)
    fields = ("shape", "sparse_crow_indices", "sparse_col_indices")
    targets = {"data": sent.data, **{name: getattr(sent, name) for name in fields}}
    asked = Sample.model_validate({**ASKED, "target_prompt_logprobs": targets})
    prompt = as_prompt(asked, None, 0)
    assert prompt.targets == tuple(tuple(t for t in row if t >= 0) for row in table.tolist())
    scores = tuple(tuple(-float(t) for t in row) for row in prompt.targets)
    answer = Answer(sequences=(), target_logprobs=scores)
    found: Any = deserialize_proto_response(encode_sample(answer, asked), types.SampleResponse)
    wanted = torch.where(table < 0, 0, -table).float()
    assert found.target_prompt_logprobs.to_torch().tolist() == wanted.tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [2, 3]},
        {"shape": [10**8, 10**8]},
        {"shape": [10**8, 0], "data": []},
        {"sparse_crow_indices": [0, 3, 2, 4]},
        {"sparse_crow_indices": [0, 1]},
    ],
)
def test_targets_that_are_no_table_of_the_prompt_are_refused(changes: dict[str, Any]) -> None:
    targets = {"data": [1, 2, 3, 4], "shape": [2, 2], **changes}
    asked = Sample.model_validate({**ASKED, "target_prompt_logprobs": targets})
    with pytest.raises(Refused, match="target_prompt_logprobs must be a whole table of"):
        check_sample(asked)


def test_the_sdk_reads_samples() -> None:
    sampled = Sampled(
        tokens=(5, 2),
        logprobs=(-0.25, -0.5),
        stop_reason="stop",
        text="x",
        stopped_by=2,
        top_logprobs=((TokenLogprob(5, -0.25), TokenLogprob(7, -3.0)), (TokenLogprob(2, -0.5),)),
    )
    answer = Answer(
        sequences=(sampled,), prompt_logprobs=(None, -1.0, -2.0), top_prompt_logprobs=None
    )
    asked = Sample.model_validate({**ASKED, "prompt_logprobs_last_n": 1})
    found: Any = deserialize_proto_response(encode_sample(answer, asked), types.SampleResponse)
    (sequence,) = found.sequences
    assert (sequence.stop_reason, sequence.tokens) == ("stop", [5, 2])
    assert sequence.logprobs == [-0.25, -0.5]
    assert sequence.topk_logprobs_np.token_ids.tolist() == [[5, 7], [2, 0]]
    assert found.prompt_logprobs == [None, None, -2.0]


def test_the_messages_are_read_without_the_sdk_and_torch() -> None:
    code = (
        "import tlora_megatron.service.api.server\n"
        "from tlora_megatron.service.api.tinker.protobuf import messages\n"
        "messages().ForwardBackwardRequest()"
    )
    assert not imported(code, "torch", "tinker", "transformers")
