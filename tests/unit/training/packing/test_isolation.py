"""The exact probe finds what crosses the borders of documents, either way, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tlora_megatron.ops.routing import current_micro_batch, use_micro_batch
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.training.packing.isolation import check_isolation, usual_difference
from tlora_megatron.training.packing.packing import PackedBatch

VOCAB = 4001
DTYPES = (torch.float32, torch.bfloat16)
Mixer = Callable[[Tensor], Tensor]


class Model(nn.Module):
    """An embedding, what mixes rows `[T, H]`, a linear, and an output layer."""

    def __init__(self, mixer: Mixer, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, 16)
        self.linear, self.head = nn.Linear(16, 16), nn.Linear(16, VOCAB)
        self.mixer = mixer
        self.to(dtype).requires_grad_(False)
        self.embedding.register_forward_hook(lambda _, __, output: output.requires_grad_())

    def forward_backward(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """As an engine: weighted losses."""
        return [self._train(batch) for batch in batches]

    def _train(self, batch: PackedBatch) -> Tensor:
        with use_micro_batch(batch.view):
            x_TH = self.embedding(batch.tokens[0])
            x_TH = x_TH + self.mixer(self.linear(x_TH))
            logits = self.head(x_TH).float()
        losses_T = F.cross_entropy(logits, batch.labels[0], reduction="none") * batch.weights
        losses_T.sum().backward()
        return losses_T.detach()


def probe(
    mixer: Mixer, groups: ParallelGroups, dtype: torch.dtype = torch.float32, **options: Any
) -> None:
    model = Model(mixer, dtype)
    given = {"name": "Model", "dtype": dtype, "has_experts": False, "vocab_size": VOCAB} | options
    check_isolation(model.forward_backward, [model.embedding], groups, **given)


def cumulative(x_TH: Tensor) -> Tensor:
    """Sums of each document's rows up to each, which is what attention does."""
    view = current_micro_batch()
    assert view is not None
    return torch.cat([part.cumsum(0) for part in x_TH.split([p.length for p in view.pieces])])


def convolution(*taps: float) -> Mixer:
    """A convolution over all rows, of which the middle tap is each row itself."""

    def mix(x_TH: Tensor) -> Tensor:
        weight = torch.tensor(taps, dtype=x_TH.dtype).expand(x_TH.shape[1], 1, -1)
        return F.conv1d(x_TH.T[None], weight, padding="same", groups=x_TH.shape[1])[0].T

    return mix


def state(x_TH: Tensor) -> Tensor:
    """A scan whose state goes on from document to document, from one row in 64 to the next."""
    ends = x_TH.split(64)
    starts = [torch.zeros_like(ends[0][:1]), *(end[-1:] for end in ends[:-1])]
    return torch.cat([end + 1e-3 * start for end, start in zip(ends, starts, strict=True)])


def scaled(x_TH: Tensor) -> Tensor:
    """Rounds by the largest value of all rows, whose gradient it does not know."""
    scale = x_TH.detach().abs().max() / 100
    return x_TH + ((x_TH.detach() / scale).round() * scale - x_TH.detach())


class _Back(torch.autograd.Function):
    """The identity, whose gradient leaks to the row before, or behind."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, shift: int) -> Tensor:
        ctx.shift = shift
        return x_TH.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient + 1e-3 * gradient.roll(ctx.shift, 0), None


def routed(x_TH: Tensor, most: int | None = None) -> Tensor:
    """Two of four experts a row; with `most`, each expert takes no more rows, the first ones."""
    choices_T2 = x_TH[:, :4].topk(2).indices
    out_TH = torch.zeros_like(x_TH)
    for expert in range(4):
        rows = (choices_T2 == expert).any(1).nonzero().flatten()[:most]
        # Sums of another number of rows round otherwise: here by a part of the last bits.
        noise = 1 + len(rows) * torch.finfo(x_TH.dtype).eps / 64
        out_TH = out_TH.index_add(0, rows, (expert - 1.5) * 20 * noise * x_TH[rows])
    return out_TH


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [4, 32, 96, 160, 512])
def test_apart_documents_pass(num_rows: int, dtype: torch.dtype, groups: ParallelGroups) -> None:
    probe(cumulative, groups, dtype, num_rows=num_rows, longest=33)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "mixer",
    [
        pytest.param(convolution(1e-2, 1, 0), id="from the row before"),
        pytest.param(convolution(0, 1, 1e-2), id="from the row behind"),
        pytest.param(convolution(1e-2, 1, 1e-2), id="both"),
        pytest.param(convolution(1e-2, 0, 0, 1, 0, 0, 0), id="from three rows before"),
        pytest.param(state, id="a state"),
        pytest.param(scaled, id="a scale of all rows"),
    ],
)
def test_losses_that_move(mixer: Mixer, dtype: torch.dtype, groups: ParallelGroups) -> None:
    rule = r"the model Model must keep the documents of a micro-batch apart, got losses of one doc"
    with pytest.raises(ValueError, match=rule + r"ument that move by \d\.\de-\d\d when another's"):
        probe(mixer, groups, dtype)


@pytest.mark.parametrize("has_experts", [False, True])
@pytest.mark.parametrize("shift", [-1, 1])
def test_a_leak_in_backward_alone(shift: int, has_experts: bool, groups: ParallelGroups) -> None:
    rule = r"got gradients of one document's losses at another's tokens, \d\.\de-\d\d of those"
    with pytest.raises(ValueError, match=rule):
        probe(lambda x: _Back.apply(x, shift), groups, has_experts=has_experts)


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_may_round_and_drop_nothing(dtype: torch.dtype, groups: ParallelGroups) -> None:
    probe(routed, groups, dtype, has_experts=True)
    with pytest.raises(ValueError, match="got losses of one document that move"):
        probe(lambda x: routed(x, most=80), groups, dtype, has_experts=True)
    with pytest.raises(ValueError, match="got gradients of one document's losses"):
        probe(lambda x: routed(convolution(1e-4, 1, 0)(x)), groups, dtype, has_experts=True)


def test_a_model_that_gives_other_bits_every_time_may_round(groups: ParallelGroups) -> None:
    calls: list[int] = []

    def rounds(x_TH: Tensor) -> Tensor:
        calls.append(1)
        return cumulative(x_TH * (1 + len(calls) * 2.0**-22))

    probe(rounds, groups)
    with pytest.raises(ValueError, match="got gradients of one document's losses"):
        probe(lambda x: rounds(convolution(1e-6, 1, 0)(x)), groups)


def test_a_first_run_of_its_own_does_not_count(groups: ParallelGroups) -> None:
    """ZeRO-3 learns the order of the weights in it."""
    calls: list[int] = []

    def learns(x_TH: Tensor) -> Tensor:
        calls.append(1)
        return cumulative(x_TH * (1 + (len(calls) == 1) * 2.0**-20))

    probe(learns, groups)
    assert len(calls) == 8


def test_an_embedding_without_gradient_is_refused(groups: ParallelGroups) -> None:
    model = Model(cumulative, torch.float32)
    with pytest.raises(ValueError, match="got no gradient at its embedding"):
        check_isolation(
            model.forward_backward, [], groups, name="Model", dtype=torch.float32,
            has_experts=False, vocab_size=VOCAB,
        )  # fmt: skip


def test_single_tokens_with_other_experts_do_not_count() -> None:
    losses = torch.full((9,), 2.0)
    flipped = losses.clone()
    flipped[:4] += 1.0
    assert usual_difference(flipped, losses) == 0.0
    assert usual_difference(losses + 1.0, losses) == pytest.approx(0.5)
