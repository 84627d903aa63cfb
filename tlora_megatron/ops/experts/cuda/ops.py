"""Linears of routed experts on Hopper: one GEMM computes the base and its adapters' outputs."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tlora_megatron.ops.experts.branch import ExpertArenas, ExpertFactors, ExpertRuns, PlacedRows
from tlora_megatron.ops.experts.cuda.sums import ExpertSums
from tlora_megatron.ops.experts.cuda.units import Units, make_units
from tlora_megatron.ops.experts.triton.ops import TritonExpertOps
from tlora_megatron.ops.experts.triton.products import down
from tlora_megatron.ops.experts.triton.tiles import tiles_of
from tlora_megatron.ops.lora.cuda.arguments import ExpertGemmArguments, packer
from tlora_megatron.ops.lora.cuda.calls import device_index, launch, multiprocessors

_GEMM = packer(ExpertGemmArguments)


class CudaExpertOps:
    """Computes experts' linears whole; never waits for the device.

    Args:
        beside: kernels of what a GEMM does not compute.
    """

    def __init__(self, beside: TritonExpertOps) -> None:
        self._beside = beside
        self._sums = ExpertSums()
        self._units: WeakKeyDictionary[ExpertRuns, dict[tuple[int, int], Units]] = (
            WeakKeyDictionary()
        )

    @staticmethod
    def takes(x_QK: Tensor, weight_LNK: Tensor) -> bool:
        """Returns True if the GEMM can compute a linear: rows of 16 bytes."""
        sizes = weight_LNK.shape[1] | weight_LNK.shape[2]
        return x_QK.dtype == torch.bfloat16 and not sizes % 8 and len(x_QK) > 0

    def product(
        self,
        x_QK: Tensor,
        x: PlacedRows,
        weight_LNK: Tensor,
        runs: ExpertRuns,
        factors: ExpertFactors | None,
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Returns `x W_e^T` with the adapters' outputs `[Q, N]`, and what backward needs.

        Args:
            x: the same rows, as adapters read them.
        """
        y_QN = x_QK.new_empty(len(x_QK), weight_LNK.shape[1])
        if factors is None or factors.arenas is None:
            self._gemm(x_QK, weight_LNK, y_QN, runs, None, None, None, transposed=True)
            if factors is None:
                return y_QN, ()
            return y_QN, self._beside.forward(x, y_QN, runs, factors)
        tables, arenas = self._beside.tables_of(factors), factors.arenas
        wide_QR = x_QK.new_zeros(len(x_QK), arenas.lora_a.shape[1])
        tiles = tiles_of(runs, len(x_QK), x_QK.device)
        s_QW = down(x, tables.lora_a, tables, tiles, wide_QR)
        self._gemm(x_QK, weight_LNK, y_QN, runs, wide_QR, arenas.lora_b, arenas, transposed=True)
        return y_QN, (s_QW,)

    def dgrad(
        self,
        dy_QN: Tensor,
        dy: PlacedRows,
        weight_LNK: Tensor,
        saved: Sequence[Tensor],
        runs: ExpertRuns,
        factors: ExpertFactors | None,
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Returns dx `[Q, K]` and dS, and adds to the gradients of B.

        Args:
            dy: the same rows, as adapters read them.
            saved: from `product`.
        """
        dx_QK = dy_QN.new_empty(len(dy_QN), weight_LNK.shape[2])
        if factors is None or factors.arenas is None:
            self._gemm(dy_QN, weight_LNK, dx_QK, runs, None, None, None, transposed=False)
            if factors is None:
                return dx_QK, ()
            return dx_QK, self._beside.input_backward(dy, dx_QK, saved, runs, factors)
        tables, arenas = self._beside.tables_of(factors), factors.arenas
        tiles, (s_QW,) = tiles_of(runs, len(dy_QN), dy_QN.device), saved
        wide_QR = dy_QN.new_zeros(len(dy_QN), arenas.lora_a.shape[1])
        ds_QW = down(dy, tables.lora_b, tables, tiles, wide_QR)
        self._sums.add(tables.grad_b, s_QW, dy, tables, tiles)
        self._gemm(dy_QN, weight_LNK, dx_QK, runs, wide_QR, arenas.lora_a, arenas, transposed=False)
        return dx_QK, (ds_QW,)

    def input_sums(
        self, ds: Sequence[Tensor], x: PlacedRows, runs: ExpertRuns, factors: ExpertFactors
    ) -> None:
        """Adds to the gradients of A.

        Args:
            ds: from `dgrad`.
        """
        (ds_QW,), tables = ds, self._beside.tables_of(factors)
        tiles = tiles_of(runs, len(ds_QW), ds_QW.device)
        self._sums.add(tables.grad_a, ds_QW, x, tables, tiles)

    def _gemm(
        self,
        x_QK: Tensor,
        weight: Tensor,
        out_QN: Tensor,
        runs: ExpertRuns,
        wide_QR: Tensor | None,
        factors: Tensor | None,
        arenas: ExpertArenas | None,
        *,
        transposed: bool,
    ) -> None:
        units = self._units_of(runs, len(x_QK), out_QN.shape[1], arenas)
        arguments = _GEMM.pack(  # in the order of `ExpertGemmArguments`
            x_QK.data_ptr(),
            weight.data_ptr(),
            0 if wide_QR is None else wide_QR.data_ptr(),
            0 if factors is None else factors.data_ptr(),
            out_QN.data_ptr(),
            units.units.data_ptr(),
            units.number.data_ptr(),
            len(x_QK),
            out_QN.shape[1],
            x_QK.shape[1],
            len(weight),
            0 if factors is None else factors.shape[1],
            int(transposed),
            multiprocessors(x_QK.device) // 2 * 2,
            device_index(x_QK),
        )
        launch("expert_gemm", arguments, x_QK)

    def _units_of(
        self, runs: ExpertRuns, num_rows: int, columns_out: int, arenas: ExpertArenas | None
    ) -> Units:
        known = self._units.setdefault(runs, {})
        key = columns_out, id(arenas)
        if key not in known:
            begins = tiles_of(runs, num_rows, runs.counts_LS.device).begins
            positions = None if arenas is None else arenas.positions
            experts = len(runs.counts_LS)
            known[key] = make_units(begins, experts, num_rows, columns_out, positions)
        return known[key]
