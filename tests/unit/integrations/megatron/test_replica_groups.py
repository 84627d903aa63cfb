"""Megatron's groups over replicas of unlike layouts, without making any."""

from __future__ import annotations

import pytest
from megatron.core import parallel_state

from tlora_megatron.integrations.megatron.process_groups import _grids_of, lay_out_replicas
from tlora_megatron.model.deployment import Deployment

DEPLOYMENT = Deployment.parse("1xTP2+CP2+PP2 + 1xTP2+PP3 + 2xTP1 + 1xCP2")
ORDER = "tp-cp-ep-dp-pp"


def generator(deployment: Deployment) -> parallel_state.RankGenerator:
    """The generator that Megatron makes in a call without sizes."""
    with _grids_of(deployment):
        return parallel_state.RankGenerator(
            tp=1, ep=1, dp=deployment.world_size, pp=1, cp=1, order=ORDER, rank_offset=0
        )


@pytest.mark.parametrize("token", ["tp", "pp", "cp", "dp", "dp-cp", "tp-pp", "tp-dp-cp", "tp-cp"])
def test_groups_divide_the_world_and_stay_within_a_replica(token: str) -> None:
    groups = generator(DEPLOYMENT).get_ranks(token)
    assert sorted(rank for ranks in groups for rank in ranks) == list(range(DEPLOYMENT.world_size))
    for ranks in groups:
        replica = DEPLOYMENT.placed(ranks[0])
        assert {DEPLOYMENT.placed(rank).index for rank in ranks} == {replica.index}
        sizes = {"tp": replica.layout.tp_size, "pp": replica.layout.pp_size}
        sizes |= {"cp": replica.layout.cp_size, "dp": 1}
        expected = 1
        for axis in token.split("-"):
            expected *= sizes[axis]
        assert len(ranks) == expected


def test_places_are_those_of_the_deployment() -> None:
    made = generator(DEPLOYMENT)
    for axis, token in enumerate(("tp", "pp", "cp")):
        for ranks in made.get_ranks(token):
            places = [DEPLOYMENT.placed(rank).place_of(rank)[axis] for rank in ranks]
            assert places == list(range(len(ranks)))


def test_one_grid_stays_what_it_is() -> None:
    before = parallel_state.RankGenerator
    generator(DEPLOYMENT)
    assert parallel_state.RankGenerator is before


def test_a_core_without_rank_generators_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(parallel_state, "RankGenerator")
    with pytest.raises(NotImplementedError, match=r"parallel.replicas must have a Megatron-core"):
        lay_out_replicas(DEPLOYMENT)
