"""How a plan divides the routed experts of a layer, and the rows that meet them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from tlora_megatron.config.job import EXPERT_TARGETS, FUSED_EXPERT_TARGETS
from tlora_megatron.model.experts import ExpertsSpec
from tlora_megatron.model.gpt_oss import refuse_gpt_oss
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.adapter_sizes import ALL_LINEARS, dense_linears
from tlora_megatron.planner.cost.experts.imbalance import fullest_share
from tlora_megatron.planner.workload import JobLoad


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSplit:
    """One rank's part of a layer's experts."""

    spec: ExpertsSpec
    hidden_size: int
    ep_size: int
    """Ranks that share the experts."""
    num_local: int
    """Experts of the rank."""
    inner: int
    """Hidden features of each of them on the rank."""
    expert_tp: int
    """Tensor-parallel ranks that cut each of them."""
    row_share: float
    """Share of a context-parallel rank's rows that the rank routes: with sequence parallelism and
    experts that are whole, a tensor-parallel rank routes its own rows alone."""

    @property
    def weights(self) -> int:
        """Elements of the router, which every rank has whole, and of the rank's experts."""
        router = self.spec.num_experts * self.hidden_size
        return router + self.num_local * 3 * self.inner * self.hidden_size

    @property
    def routed(self) -> float:
        """Rows that the mean rank's experts compute for each row of a context-parallel rank."""
        return self.row_share * self.spec.top_k

    def fullest(self, layers: int = 1) -> float:
        """Rows of the fullest rank over those of the mean one, in the sum over some layers."""
        return fullest_share(self.ep_size, self.num_local * layers)


def expert_split(spec: ModelSpec, plan: Plan) -> ExpertSplit | None:
    """Returns how a plan divides a model's experts; None if the model has none."""
    if spec.experts is None:
        return None
    return _split(spec, plan.tp_size, plan.ep_size, plan.expert_tp)


def check_predictable(spec: ModelSpec, jobs: Sequence[JobLoad]) -> None:
    """Refuses what no prediction knows of a base with routed experts.

    Raises:
        ValueError: for gpt-oss, or a job with a target that is neither on the attention linears nor
            on the experts that there are.
    """
    if spec.experts is None:
        return
    refuse_gpt_oss(spec.model_type, "the base of a prediction")
    known = [t for names in dense_linears(spec).values() for n in names for t in ALL_LINEARS[n]]
    known += EXPERT_TARGETS + FUSED_EXPERT_TARGETS
    for job in jobs:
        for target in job.targets:
            if target not in known:
                raise ValueError(
                    f"targets of job {job.name!r} must be among {', '.join(known)} for a "
                    f"prediction over routed experts, got {target}"
                )


@functools.lru_cache(maxsize=1024)
def _split(spec: ModelSpec, tp_size: int, ep_size: int, expert_tp: int) -> ExpertSplit:
    assert spec.experts is not None, "the model has experts"
    return ExpertSplit(
        spec=spec.experts,
        hidden_size=spec.hidden_size,
        ep_size=ep_size,
        num_local=spec.experts.num_experts // ep_size,
        inner=spec.ffn_size // expert_tp,
        expert_tp=expert_tp,
        row_share=1.0 if expert_tp == tp_size else 1 / tp_size,
    )
