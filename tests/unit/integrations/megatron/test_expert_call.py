"""Counts of rows by expert and adapter, and the order of rows that come from several ranks."""

from __future__ import annotations

import itertools

import pytest
import torch

from tlora_megatron.integrations.megatron.built.expert_call import (
    ExpertCall,
    SentRows,
    Sources,
    count_rows,
    own_window,
)
from tlora_megatron.ops.experts.branch import ExpertRuns
from tlora_megatron.ops.routing import Document, pack_micro_batch

EXPERTS, SLOTS = 5, 3


@pytest.mark.parametrize("ranks", [1, 4])
def test_rows_are_counted_by_expert_and_adapter(ranks: int) -> None:
    lengths = (11, 0, 6)
    documents = [Document(slot=s, length=n) for s, n in enumerate(lengths) if n]
    view = pack_micro_batch(documents, num_slots=SLOTS, num_tokens=24)
    routing_map = torch.rand(24, EXPERTS) < 0.4
    slots = [slot for slot, n in enumerate((*lengths, 24 - sum(lengths))) for _ in range(n)]
    total = torch.zeros(EXPERTS, SLOTS + 1, dtype=torch.int64)
    for rank, rows in enumerate(torch.arange(24).chunk(ranks)):
        expected = torch.zeros_like(total)
        for row, expert in itertools.product(rows.tolist(), range(EXPERTS)):
            expected[expert, slots[row]] += int(routing_map[row, expert])
        found = count_rows(routing_map[rows], view, own_window(view, len(rows), rank))
        assert torch.equal(found, expected), rank
        total += found
    assert torch.equal(total.sum(1), routing_map.sum(0))


def test_rows_of_several_ranks_are_put_adapter_by_adapter() -> None:
    counts = torch.randint(0, 4, (3, 2, SLOTS + 1))  # sources, experts, slots
    counts[1] = 0
    call = ExpertCall(runs=ExpertRuns(counts.sum(0)), factors={}, arriving_PLS=counts)
    arriving = [
        (expert, slot, source, row)
        for expert, source, slot in itertools.product(range(2), range(3), range(SLOTS + 1))
        for row in range(int(counts[source, expert, slot]))
    ]
    order = call.order(len(arriving))
    assert order is not None
    assert [arriving[place] for place in order.tolist()] == sorted(arriving)
    assert ExpertCall(runs=ExpertRuns(counts[0]), factors={}).order(5) is None


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_rows_at_experts_are_found_again_from_those_that_were_sent(share: float) -> None:
    routing_map = torch.rand(9, EXPERTS) < share
    x = torch.randn(9, 4)
    expected = torch.cat([x[routing_map[:, expert]] for expert in range(EXPERTS)])
    assert torch.equal(SentRows(x, routing_map).placed(len(expected)).spread(), expected)


def test_dispatchers_order_sources_differently() -> None:
    by_rank = torch.arange(6).view(6, 1, 1)  # three ranks of experts, cut by two each
    kinds = {is_by_part: _sources(is_by_part) for is_by_part in (False, True)}
    assert kinds[False].in_row_order(by_rank).flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert kinds[True].in_row_order(by_rank).flatten().tolist() == [0, 2, 4, 1, 3, 5]


def _sources(is_by_part: bool) -> Sources:
    group: object = None
    return Sources(group=group, expert_tp=2, is_by_part=is_by_part, experts=range(1))  # type: ignore[arg-type]
