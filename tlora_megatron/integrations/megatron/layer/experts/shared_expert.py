"""The expert that every row meets beside its routed ones, weighed by a sigmoid of the row (Qwen2).

    y[t] = sigmoid(x[t] w) * (swiglu(x[t] Wgu^T) Wd^T)

Its linears are parallel as those of a dense MLP and carry adapters as those do; the weight of the
sigmoid is whole on every rank, and frozen.

Shapes: T rows, H hidden features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from tlora_megatron.ops.frozen.parts import Vjp
from tlora_megatron.ops.frozen.swiglu import swiglu, swiglu_vjp
from tlora_megatron.ops.routing import MicroBatchView


class SharedExpert(nn.Module):
    """The shared expert of one layer, with Megatron's names of its weights.

    Args:
        config: Megatron's configuration of the model.
        ffn_size: of the whole expert.
    """

    linear_fc1: Any
    linear_fc2: Any

    def __init__(self, config: Any, ffn_size: int) -> None:
        super().__init__()
        common: dict[str, Any] = {
            "config": config,
            "bias": False,
            "skip_bias_add": True,
            "init_method": config.init_method,
            "tp_group": parallel_state.get_tensor_model_parallel_group(),
        }
        hidden = config.hidden_size
        self.linear_fc1 = ColumnParallelLinear(
            hidden, 2 * ffn_size, gather_output=False, stride=2, **common
        )
        self.linear_fc2 = RowParallelLinear(ffn_size, hidden, input_is_parallel=True, **common)
        place = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.gate_weight = nn.Parameter(torch.empty(1, hidden, **place))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[T, 1, H]` to the same, by autograd."""
        intermediate, _ = self.linear_fc1(hidden_states)
        out, _ = self.linear_fc2(swiglu(intermediate))
        return self._gate(hidden_states) * out

    def product_vjp(self, x_TH: Tensor, view: MicroBatchView) -> tuple[Tensor, Vjp]:
        """Computes this rank's rows `[T, H]`, gathered and reduced inside; returns the way back."""
        intermediate, fc1_back = self.linear_fc1.product_vjp(x_TH, view, None)
        inner, swiglu_back = swiglu_vjp(intermediate)
        out_TH, fc2_back = self.linear_fc2.product_vjp(inner, view, None)
        gate_T1 = self._gate(x_TH)

        def vjp(dy_TH: Tensor) -> Tensor:
            dgate_T1 = (dy_TH.float() * out_TH.float()).sum(-1, keepdim=True)
            dlogit_T1 = dgate_T1 * (gate_T1 * (1 - gate_T1)).float()
            dx_TH = fc1_back(swiglu_back(fc2_back(dy_TH * gate_T1)))
            return dx_TH + dlogit_T1.to(dx_TH.dtype) * self.gate_weight

        return gate_T1 * out_TH, vjp

    def _gate(self, x: Tensor) -> Tensor:
        return torch.sigmoid(F.linear(x, self.gate_weight))
