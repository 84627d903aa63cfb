"""The values that a search for plans must keep to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tlora_megatron.config.parallel_rules import MOST_TP, exact_shardings
from tlora_megatron.model.layout import LoraSharding
from tlora_megatron.model.recompute import Recompute
from tlora_megatron.planner.candidate import Plan, Runner


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSpace:
    """Values that the search must keep to; None: the search chooses."""

    tp_size: int | None = None
    pp_size: int | None = None
    vpp_size: int | None = None
    cp_size: int | None = None
    ep_size: int | None = None
    expert_tp_size: int | None = None
    """Tensor-parallel ranks that share each routed expert: 1, or all of them."""
    sequence_parallel: bool | None = None
    lora_sharding: LoraSharding | None = None
    recompute: Recompute | None = None
    micro_batch_tokens: int | None = None
    largest_portion: int | None = None
    """Tokens that each micro-batch must hold, as `portion_tokens` of a job asks."""
    runs_in: Runner | None = None
    """Keep only plans that this program can run."""
    shard_optimizer: Literal[True] | None = None
    """Replicas, where there are several, divide adapters' master weights and moments; None: not."""
    deterministic: Literal[True] | None = None
    """Keep only plans that `run.deterministic` does not refuse."""

    def __post_init__(self) -> None:
        names = ("tp_size", "pp_size", "vpp_size", "cp_size", "ep_size", "expert_tp_size")
        for name in (*names, "micro_batch_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def wants(self, runner: Runner) -> bool:
        """True if plans of a program are looked for."""
        return self.runs_in in (None, runner)

    @property
    def shards_states(self) -> bool:
        """True if replicas divide optimizer states; written for DeepSpeed, plans have ZeRO-1."""
        return bool(self.shard_optimizer) or self.runs_in == "deepspeed"

    def allows(self, plan: Plan) -> bool:
        """True if the plan keeps to the fixed values."""
        most_tp = 1 if self.runs_in == "deepspeed" else MOST_TP
        if self.deterministic and (plan.tp_size > most_tp or plan.cp_size > 1):
            return False
        if self.expert_tp_size not in (None, plan.expert_tp):
            return False
        fixed = ("tp_size", "pp_size", "vpp_size", "cp_size", "ep_size", "sequence_parallel")
        return all(getattr(self, name) in (None, getattr(plan, name)) for name in fixed)

    def can_run(self, plan: Plan) -> bool:
        """True if `runs_in` can run the plan, whose recompute and sharding have been chosen."""
        exact = plan.tp_size == 1 or plan.lora_sharding in exact_shardings(plan.sequence_parallel)
        if self.deterministic and not exact:
            return False
        return self.runs_in is None or self.runs_in in plan.runs_in
