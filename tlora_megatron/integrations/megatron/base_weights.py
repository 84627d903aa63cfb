"""Reads a rank's weights from a Hugging Face folder: plain, published in FP8, or of gpt-oss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from tlora_megatron.model.quantisation import BaseQuantisation
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.training.formats.base_reader import read_base
from tlora_megatron.training.formats.gpt_oss_experts import weight_source
from tlora_megatron.training.formats.hf_checkpoint import HFCheckpoint
from tlora_megatron.training.formats.hf_convert import check_weights, draw_base
from tlora_megatron.training.formats.quantised.source import QuantizedSource
from tlora_megatron.training.formats.rank_tensors import RankTensor
from tlora_megatron.training.formats.rounding import Rounding


def read_weights(
    directory: Path,
    spec: ModelSpec,
    quantisation: BaseQuantisation | None,
    tensors: Sequence[RankTensor],
    parameters: Mapping[str, Tensor],
    scales: Mapping[str, Tensor],
) -> Rounding:
    """Fills a rank's parameters from a Hugging Face folder, whatever form its weights have.

    Args:
        quantisation: the one that the model was built with.
        tensors: where in the folder each parameter's rows are.
        scales: those of the parameters that hold codes, by the same names.

    Returns:
        How far the codes of quantised linears are from their weights.

    Raises:
        ValueError: if the folder's weights are missing, corrupt, not finite, or of another
            architecture.
    """
    if quantisation is None or quantisation.published is None:
        checkpoint = HFCheckpoint(directory)
        if spec.gpt_oss is not None:
            return _read_gpt_oss(checkpoint, spec, tensors, parameters)
        check_weights(spec, checkpoint)
        return read_base(checkpoint, tensors, parameters, scales)
    source = QuantizedSource(directory, quantisation.published)
    check_weights(spec, source)
    source.check(spec, quantisation)
    rounding = read_base(source, tensors, parameters, scales)
    for tensor in tensors:
        if tensor.name in scales:
            source.put_scales(tensor, scales[tensor.name])
    return rounding


def _read_gpt_oss(
    checkpoint: HFCheckpoint,
    spec: ModelSpec,
    tensors: Sequence[RankTensor],
    parameters: Mapping[str, Tensor],
) -> Rounding:
    """Reads a base whose files hold all experts of a layer in one tensor, maybe in MXFP4."""
    device = next(iter(parameters.values())).device
    source = weight_source(spec, checkpoint, device)
    check_weights(spec, source)
    stored = set(checkpoint.keys())
    of_experts = [t for t in tensors if t.pieces[0].source not in stored]
    names = {tensor.name for tensor in of_experts}
    draw_base(source, of_experts, parameters, {})
    return read_base(checkpoint, [t for t in tensors if t.name not in names], parameters)
