"""A HybridModel's layers without Transformer Engine: `--spec hybrid_local_spec spec`.

Attention and MLP of Megatron's local linears; its own hybrid specs need Transformer Engine. For
Megatron-LM from 0.20 on.
"""

from __future__ import annotations

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from tlora_megatron.integrations.megatron.layer.norm_and_rotary import RMSNorm

# The norm behind the last layer, which no spec names.
hybrid_block.TENorm = RMSNorm

_ATTENTION = TransformerLayerSubmodules(
    input_layernorm=RMSNorm,
    self_attention=ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=LocalSpecProvider().core_attention(),
            linear_proj=RowParallelLinear,
        ),
    ),
    self_attn_bda=get_bias_dropout_add,
)
_MLP = TransformerLayerSubmodules(
    pre_mlp_layernorm=RMSNorm,
    mlp=ModuleSpec(
        module=MLP,
        submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
    ),
    mlp_bda=get_bias_dropout_add,
)

spec = ModuleSpec(
    module=HybridStack,
    submodules=HybridStackSubmodules(
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=_ATTENTION),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=_MLP),
    ),
)
