"""RMSNorm and rotary embedding over packed documents: our own, and those of built models.

Those of built models own nothing: weights and angles are read at every call, so that loading,
moving and quantising the model need nothing from here.

Shapes: T local rows, N heads, D head dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from tlora_megatron.integrations.megatron.layer.modules import built_class, does_more
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.frozen.parts import HeadNorms, NormWeight
from tlora_megatron.ops.frozen.rms_norm import add_rms_norm
from tlora_megatron.ops.frozen.rotary import inverse_frequencies, rotary_factor, rotate_halves
from tlora_megatron.ops.host_copy import to_device
from tlora_megatron.ops.lora.kernel_choice import runs_triton
from tlora_megatron.ops.routing import MicroBatchView, current_micro_batch


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, as Hugging Face's Llama computes it.

    Statistics are fp32; the normalised value is rounded to the input's dtype before the weight is
    multiplied in. Rows are independent, so a sequence-parallel shard needs no communication.
    Where calling the module does more than `forward`, `add` calls it, and autograd adds what the
    kernels otherwise add.
    The constructor is that of Megatron's `WrappedTorchNorm`, which refuses sequence parallelism.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        )
        # Megatron adds up gradients of parameters marked so over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    @property
    def norm_weight(self) -> NormWeight:
        """The weight, read now."""
        return NormWeight(self.weight, self.eps, rounds_once=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises `[..., hidden_size]`."""
        return add_rms_norm(x, None, self.weight, self.eps)[1]

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the residual stream with x added, or x itself, as it is and normalised."""
        if not does_more(self):
            return add_rms_norm(x, residual, self.weight, self.eps)
        total = x if residual is None else residual + x
        return total, self(total)


class PackedRotaryEmbedding:
    """Rotates queries and keys by each token's position in its own document.

    Core attention uses it in the place of Megatron's own embedding, which would compute cosine and
    sine anew in every layer and rotate in a dozen kernels. The arithmetic is Hugging Face's:
    cosine and sine in fp32, rounded to the activations' dtype, halves rotated.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._inv_freq = inverse_frequencies(spec)
        self._on_device: dict[torch.device, Tensor] = {}
        self._factor = rotary_factor(spec)

    def __call__(self, x_T1ND: Tensor, micro_batch: MicroBatchView) -> Tensor:
        """Rotates `[T, 1, N, D]`, the rows of this context-parallel rank."""
        run = _fused() if x_T1ND.is_cuda else rotate_halves
        return run(x_T1ND, *self.cos_sin(x_T1ND, micro_batch))

    def cos_sin(self, like: Tensor, micro_batch: MicroBatchView) -> tuple[Tensor, Tensor]:
        """Returns cosine and sine of the local rows, `[T, D]`, in the dtype of `like`."""

        def make() -> tuple[Tensor, Tensor]:
            positions_T = micro_batch.positions(like.device)
            if like.device not in self._on_device:
                self._on_device[like.device] = to_device(self._inv_freq, like.device)
            half = positions_T[:, None].float() * self._on_device[like.device]
            angles_TD = torch.cat([half, half], dim=-1)
            cos_TD, sin_TD = angles_TD.cos(), angles_TD.sin()
            if self._factor != 1.0:
                cos_TD, sin_TD = cos_TD * self._factor, sin_TD * self._factor
            return cos_TD.to(like.dtype), sin_TD.to(like.dtype)

        return micro_batch.cached(f"rotary:{like.dtype}@{like.device}", make)


@functools.cache
def _fused() -> Callable[..., Tensor]:
    """Compiles `rotate_halves` and its backward to one generated GPU kernel each."""
    return torch.compile(rotate_halves, dynamic=True)


_MAKERS = ("torch", "transformer_engine")
"""Packages with a class RMSNorm that rounds once."""


class BuiltNorm(NamedTuple):
    """The RMSNorm of a module: all of it, or what a linear of Transformer Engine begins with."""

    owner: nn.Module
    attribute: str
    """The weight's name in the owner."""

    @property
    def norm_weight(self) -> NormWeight:
        """The weight, read now; rounds once, as torch and Transformer Engine do."""
        owner: Any = self.owner
        zero_centered = getattr(owner, "zero_centered_gamma", False)
        return NormWeight(getattr(owner, self.attribute), owner.eps, zero_centered)


Norm = RMSNorm | BuiltNorm


def built_norm(module: Any) -> Norm | None:
    """Returns a norm module as our kernels take it; None for what they do not compute."""
    if isinstance(module, RMSNorm):
        return module
    weight, eps = getattr(module, "weight", None), getattr(module, "eps", None)
    kind = built_class(module)
    is_known = kind.__name__ == "RMSNorm" and kind.__module__.partition(".")[0] in _MAKERS
    return BuiltNorm(module, "weight") if is_known and None not in (weight, eps) else None


def norm_runs(norm: nn.Module) -> bool:
    """Returns True if the norm behind a decoder's layers may be computed by our kernels now."""
    agreed = norm.__dict__.get("tlora_agreed")  # by tensor-parallel ranks, see `AgreedParts`
    return not does_more(norm) if agreed is None else agreed


class BuiltHeadNorms(NamedTuple):
    """Norms of single query and key heads, which differ in their weights alone."""

    query: Norm
    key: Norm

    def weights(self) -> HeadNorms:
        """Returns the weights as they are now."""
        return HeadNorms(self.query.norm_weight, self.key.norm_weight)


def built_head_norms(attention: Any) -> BuiltHeadNorms | None:
    """Returns the norms of an attention for which `why_not_head_norms` gives None, if any."""
    query, key = built_norm(attention.q_layernorm), built_norm(attention.k_layernorm)
    return None if query is None or key is None else BuiltHeadNorms(query, key)


def why_not_head_norms(attention: Any) -> str | None:
    """Returns why the norms of queries and keys must be called; None if our kernels do them."""
    modules = (attention.q_layernorm, attention.k_layernorm)  # identities, or None by the release
    if all(isinstance(module, IdentityOp | None) for module in modules):
        return None
    norms = built_head_norms(attention)
    if norms is None:
        kinds = " and ".join({built_class(module).__name__: 0 for module in modules})
        return f"queries and keys are normed by {kinds}"
    shapes = {tuple(weight.weight_H.shape) for weight in norms.weights()}
    if shapes != {(attention.config.kv_channels,)}:
        return "queries and keys are not normed head by head"
    ways = {weight[1:] for weight in norms.weights()}
    return "queries and keys are normed in two ways" if len(ways) > 1 else None


class DocumentRotaryEmbedding(RotaryEmbedding):
    """Mixin of a built model's embedding: rows of the positions of tokens in their documents."""

    def forward(self, max_seq_len: int, *args: Any, **kwargs: Any) -> Any:
        """Returns angles of this rank's rows, `[T, 1, 1, D]`; with YaRN its factor too."""
        view = current_micro_batch()
        if view is None:
            return super().forward(max_seq_len, *args, **kwargs)
        return self.of_view(view)

    def of_view(self, view: MicroBatchView) -> Any:
        """Returns what `forward` does for a micro-batch, the same object at every call."""

        def make() -> tuple[Any, Any]:
            table = self.get_emb(max(document.length for document in view.documents))
            angles = table[0] if isinstance(table, tuple) else table
            rows = angles[view.positions(angles.device)]
            # The module is kept beside the result, so its id is not given to another one.
            return self, (rows, table[1]) if isinstance(table, tuple) else rows

        return view.cached(f"angles of {id(self)}", make)[1]


class BuiltRotary:
    """Cosine and sine of the model's own angles: its base, and its scaling of frequencies.

    Args:
        factor: of cosine and sine, which Megatron's attention takes from its config (YaRN).
    """

    def __init__(self, embedding: DocumentRotaryEmbedding, factor: float = 1.0) -> None:
        self._embedding = embedding
        self._factor = factor

    def cos_sin(self, like: Tensor, micro_batch: MicroBatchView) -> tuple[Tensor, Tensor]:
        """Returns cosine and sine of the local rows, `[T, D]`, or less if heads turn in part.

        In fp32 for kernels, which rotate in fp32; otherwise in the dtype of `like`.
        """
        dtype = torch.float32 if runs_triton(like) else like.dtype

        def make() -> tuple[BuiltRotary, Tensor, Tensor]:
            angles_TD = self.angles(micro_batch).flatten(1).float()
            cos_TD, sin_TD = angles_TD.cos() * self._factor, angles_TD.sin() * self._factor
            # Kept with what it is of: an id is given again.
            return self, cos_TD.to(dtype), sin_TD.to(dtype)

        return micro_batch.cached(f"cosines of {id(self)}: {dtype}", make)[1:]

    def angles(self, micro_batch: MicroBatchView) -> Tensor:
        """Returns what the embedding gives for the micro-batch, the same tensor at every call."""
        found = self._embedding.of_view(micro_batch)
        return found[0] if isinstance(found, tuple) else found

    def gives(self, angles: Tensor | None, micro_batch: MicroBatchView) -> bool:
        """True if a layer's argument is what the embedding gives for the micro-batch."""
        own = self.angles(micro_batch)
        if angles is own:
            return True
        # A recomputed layer gets its arguments detached.
        return (
            isinstance(angles, Tensor)
            and angles.data_ptr() == own.data_ptr()
            and angles.shape == own.shape
        )


Rotary = PackedRotaryEmbedding | BuiltRotary
