"""The output layer and the loss, run of rows by run of rows, against torch's cross-entropy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tlora_megatron.layers import vocabulary_head as head_module
from tlora_megatron.layers.vocabulary_head import VocabularyHead
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.ops.exactness import Exactness
from tlora_megatron.parallel.groups import ParallelGroups

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS, HIDDEN, VOCABULARY, COLUMNS = 48, 24, 60, 64


class Case:
    """A head of one rank whose last columns only fill the vocabulary up."""

    def __init__(self, dtype: torch.dtype, num_targets: int) -> None:
        torch.manual_seed(0)
        weight = torch.randn(COLUMNS, HIDDEN, device=DEVICE).to(dtype)
        self.hidden = torch.randn(ROWS, 1, HIDDEN, device=DEVICE).to(dtype).requires_grad_()
        self.labels = torch.randint(VOCABULARY, (ROWS,), device=DEVICE)
        self.rows = torch.randperm(ROWS)[:num_targets].sort().values.to(DEVICE)
        self.upstream = torch.rand(ROWS, device=DEVICE)
        groups: Any = ParallelGroups(
            layout=ParallelLayout(),
            tp_rank=0, pp_rank=0, cp_rank=0, dp_rank=0,
            tp_group=None, dp_cp_group=None, model_group=None,  # type: ignore[arg-type]
            device=DEVICE,
        )  # fmt: skip
        self.head = VocabularyHead(SimpleNamespace(weight=weight), VOCABULARY, groups)
        self.logits = (self.hidden[:, 0].detach().double() @ weight.double().t())[:, :VOCABULARY]

    def expected(self) -> tuple[Tensor, Tensor]:
        weight = self.head.weight_VH.double()[:VOCABULARY]
        hidden = self.hidden.detach().double().requires_grad_()
        logits = hidden[:, 0] @ weight.t()
        losses = torch.zeros(ROWS, dtype=torch.float64, device=DEVICE)
        picked = F.cross_entropy(logits[self.rows], self.labels[self.rows], reduction="none")
        losses = losses.index_put((self.rows,), picked)
        (losses * self.upstream).sum().backward()
        assert hidden.grad is not None
        return losses.detach(), hidden.grad


@pytest.mark.parametrize("fills", [True, False], ids=["filled", "as long as needed"])
@pytest.mark.parametrize("at_once", [16, 1024], ids=["three runs", "one run"])
@pytest.mark.parametrize("num_targets", [0, 1, 33, ROWS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_losses_and_gradient(
    dtype: torch.dtype,
    num_targets: int,
    at_once: int,
    fills: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(head_module, "ROWS_AT_ONCE", at_once)
    case = Case(dtype, num_targets)
    case.head.fills_runs = fills
    losses = case.head.losses(case.hidden, case.rows, case.labels)
    (losses * case.upstream).sum().backward()
    expected_losses, expected_grad = case.expected()
    assert losses.dtype == torch.float32
    loss_error, grad_error = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (0.05, 0.02)}[dtype]
    torch.testing.assert_close(losses.double(), expected_losses, rtol=loss_error, atol=loss_error)
    assert case.hidden.grad is not None
    largest = max(expected_grad.abs().max().item(), 1e-9)
    error = (case.hidden.grad.double() - expected_grad).abs().max().item() / largest
    assert error < grad_error, f"dhidden: {error}"


@pytest.mark.parametrize("at_once", [16, 1024], ids=["three runs", "one run"])
def test_score(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_module, "ROWS_AT_ONCE", at_once)
    case = Case(torch.float32, 33)
    case.labels[case.rows[::2]] = case.logits.argmax(1)[case.rows[::2]]
    with torch.no_grad():
        losses, right = case.head.score(case.hidden, case.rows, case.labels)
        trained = case.head.losses(case.hidden, case.rows, case.labels)
    expected = torch.zeros(ROWS, dtype=torch.bool, device=DEVICE)
    expected[case.rows] = (case.logits.argmax(1) == case.labels)[case.rows]
    assert expected.sum() > len(case.rows) // 2
    assert torch.equal(right, expected)
    torch.testing.assert_close(losses, trained)


def test_a_row_s_bits_do_not_depend_on_the_number_of_targets() -> None:
    few, many = Case(torch.float32, 5), Case(torch.float32, ROWS)
    few.head.fills_runs = many.head.fills_runs = True
    losses = [c.head.losses(c.hidden, c.rows, c.labels) for c in (few, many)]
    for case, loss in zip((few, many), losses, strict=True):
        (loss * case.upstream).sum().backward()
    assert torch.equal(few.hidden, many.hidden)
    rows = few.rows
    assert torch.equal(losses[0][rows], losses[1][rows])
    assert torch.equal(few.hidden.grad[rows], many.hidden.grad[rows])


def test_gemms_have_one_height_whatever_the_micro_batch_has() -> None:
    """cuBLAS divides the sum over the vocabulary by the height, which is a row's own otherwise."""
    case, exactness = Case(torch.float32, 33), Exactness(head_rows=40)
    for rows in (8, ROWS):
        hidden, labels = case.hidden.detach()[:rows, 0], case.labels[:rows]
        chosen = case.rows[case.rows < rows]
        found = case.head.chunks(hidden, chosen, labels, exactness)
        heights = [len(chunk.logits_nV) for chunk in found]
        assert heights == [40]
    plain = case.head.losses(case.hidden, case.rows, case.labels)
    fixed = case.head.losses(case.hidden, case.rows, case.labels, exactness)
    torch.testing.assert_close(plain, fixed)
