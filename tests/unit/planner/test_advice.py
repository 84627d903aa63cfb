"""Advice where no plan fits: each change is planned with, or a reason is given."""

from __future__ import annotations

from dataclasses import replace

from tests.helpers.planner_case import HARDWARE, LARGE, SPEC, job, memory_use
from tlora_megatron.planner.advice import Advice, advise, larger_numbers
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.layouts import Question, SearchSpace
from tlora_megatron.planner.search import search
from tlora_megatron.planner.workload import LengthHistogram

LONG = LengthHistogram.from_counts([(64, 9), (4096, 1)])


def check(advice: Advice) -> list[str]:
    """The texts of changes, after a whole search with each of them."""
    for remedy in advice.remedies:
        asked = remedy.question
        found = search(asked.spec, asked.jobs, asked.hardware, asked.num_gpus, asked.space)
        assert remedy.plan in {ranked.plan for ranked in found.plans}, remedy.text
    return [remedy.text for remedy in advice.remedies]


def test_fewer_jobs_more_gpus_or_larger_ones() -> None:
    heavy = [job(f"job{i}", rank=1024, batch_size=2) for i in range(3)]
    plan = Plan(micro_batch_tokens=1024, recompute="full")
    two = memory_use(LARGE, heavy[:2], plan, HARDWARE).total_bytes
    small = replace(HARDWARE, memory_bytes=two)
    result = search(LARGE, heavy, small, 1)
    assert result.plans == ()
    assert result.dropped[0].reason.startswith("memory: at least ")
    others = [replace(HARDWARE, name=f"x{f}", memory_bytes=f * two) for f in (4, 0.5, 2)]
    texts = check(advise(Question(LARGE, heavy, small, 1), others))
    assert texts[0] == "run 2 of the 3 jobs at once, without job2"
    assert texts[-2] == "use 2 GPUs"
    assert texts[-1].startswith("use GPUs like profile x2: round numbers, ")


def test_shorter_sequences_or_what_is_fixed() -> None:
    long = [job(lengths=LONG)]
    need = memory_use(SPEC, long, Plan(micro_batch_tokens=4096, recompute="full"), HARDWARE)
    small = replace(HARDWARE, memory_bytes=0.9 * need.total_bytes)
    texts = check(advise(Question(SPEC, long, small, 1)))
    assert any(text.startswith("cut sequences to ") for text in texts)
    enough = replace(HARDWARE, memory_bytes=1.1 * need.total_bytes)
    fixed = SearchSpace(recompute="none", micro_batch_tokens=65536)
    first, *more = check(advise(Question(SPEC, long, enough, 1, fixed)))
    assert first.startswith("leave recompute free: TP1 PP1 DP1, 65536 tokens, ")
    assert not any("recompute" in text for text in more), "the smaller change is enough"


def test_states_that_replicas_divide() -> None:
    heavy = [job(f"job{i}", rank=1024, batch_size=4) for i in range(3)]
    plan = Plan(dp_size=4, micro_batch_tokens=1024, recompute="full", shard_optimizer=True)
    need = memory_use(LARGE, heavy, plan, HARDWARE).total_bytes
    small, fixed = replace(HARDWARE, memory_bytes=need), SearchSpace(tp_size=1, pp_size=1)
    texts = check(advise(Question(LARGE, heavy, small, 4, fixed)))
    (text,) = (text for text in texts if "shard" in text)
    assert text.startswith("set parallel.shard_optimizer: true: TP1 PP1 ")
    assert text.endswith(", 1024 tokens, sharded optimizer, recompute full fits")
    alone = check(advise(Question(LARGE, heavy, small, 1)))
    assert not any("shard" in text for text in alone)


def test_two_changes_where_one_is_not_enough() -> None:
    lengths = LengthHistogram.single(4096)
    heavy = [job(f"job{i}", rank=1024, batch_size=1, lengths=lengths) for i in range(3)]
    one = Plan(micro_batch_tokens=4096, recompute="full")
    small = replace(HARDWARE, memory_bytes=memory_use(LARGE, heavy[:1], one, HARDWARE).total_bytes)
    fixed = SearchSpace(recompute="none")
    alone = replace(small, inter_node=None, gpus_per_node=1)
    texts = check(advise(Question(LARGE, heavy, alone, 1, fixed)))
    first = "leave layout, recompute and micro_batch_tokens free, and "
    assert texts == [
        f"{first}run 1 of the 3 jobs at once, without job1, job2",
        f"{first}write inter_node, the link between nodes, into profile round, and use 2 GPUs "
        "(2 nodes)",
    ]


def test_another_machine_and_more_of_its_gpus_together() -> None:
    heavy = [job(f"job{i}", rank=1024, batch_size=2) for i in range(3)]
    plan = Plan(micro_batch_tokens=1024, recompute="full")
    one = memory_use(LARGE, heavy[:1], plan, HARDWARE).total_bytes
    tiny = replace(HARDWARE, memory_bytes=one / 4, inter_node=None, gpus_per_node=1)
    other = replace(HARDWARE, name="roomy", memory_bytes=1.2 * one, gpus_per_node=8)
    texts = check(advise(Question(LARGE, heavy, tiny, 1), [other]))
    first = "use GPUs like profile roomy: round numbers, "
    assert all(text.startswith(first) for text in texts)
    assert texts[0].endswith("each, and run 1 of the 3 jobs at once, without job1, job2")
    assert texts[1].endswith("each, and use 2 GPUs")


def test_gpus_of_several_nodes_without_a_link() -> None:
    alone = replace(HARDWARE, inter_node=None, gpus_per_node=2)
    assert check(advise(Question(SPEC, [job()], alone, 4))) == [
        "use the 2 GPUs of a node",
        "write inter_node, the link between nodes, into profile round",
    ]
    joined = replace(HARDWARE, name="joined", gpus_per_node=2)
    assert check(advise(Question(SPEC, [job()], alone, 4), [joined])) == [
        "use the 2 GPUs of a node",
        "use profile joined, the same GPUs with a network between nodes",
    ]


def test_more_gpus_are_the_next_number_that_has_a_layout() -> None:
    # On three GPUs ten heads cannot be cut; on four they can, by two.
    mix = [job(rank=4, batch_size=4, lengths=LengthHistogram.from_counts([(64, 3), (512, 1)]))]
    space = SearchSpace(pp_size=1)
    need = memory_use(LARGE, mix, Plan(tp_size=2, dp_size=2, micro_batch_tokens=1024), HARDWARE)
    small = replace(HARDWARE, memory_bytes=need.total_bytes, gpus_per_node=8)
    assert search(LARGE, mix, small, 3, space).plans == ()
    assert check(advise(Question(LARGE, mix, small, 3, space)))[-1] == "use 4 GPUs"
    assert [*larger_numbers(5, replace(small, inter_node=None))] == [6, 7, 8]
    alone = replace(small, inter_node=None, gpus_per_node=2)
    joined = replace(small, name="joined", gpus_per_node=2)
    assert check(advise(Question(LARGE, mix, alone, 2), [joined]))[-1] == (
        "use profile joined, the same GPUs with a network between nodes, and use 4 GPUs (2 nodes)"
    )
    across = replace(small, inter_node=small.intra_node)
    assert [*larger_numbers(5, across)][:8] == [6, 7, 8, 16, 24, 32, 48, 64]
    assert [*larger_numbers(3000, across)] == [3072, 4096]


def test_that_nothing_helps_is_said_with_the_reason() -> None:
    advice = advise(Question(SPEC, [job("a"), job("b")], replace(HARDWARE, memory_bytes=1e5), 1))
    assert advice.remedies == ()
    assert str(advice).startswith(
        "nothing that was tried helps (other choices; fewer jobs; sequences cut down to 256 tokens;"
    )
    assert "came nearest (TP" in advice.why_none
    assert ": memory: at least 0." in advice.why_none
