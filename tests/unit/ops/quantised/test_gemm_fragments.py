"""The loads of x in csrc/fp8_gemm.cuh, on paper: plain `ldmatrix` gives a product its operand."""

from __future__ import annotations

import numpy as np

from tests.unit.ops.quantised.test_dgrad_fragments import LANES, assert_no_bank_conflict, swizzled


def test_codes_of_rows_become_the_first_operand_as_they_are() -> None:
    x_TK = np.random.default_rng(0).integers(0, 256, (128, 128), dtype=np.uint8)
    memory = swizzled(x_TK)
    for warp in range(8):  # of 16 rows
        for step in range(4):  # of 32 k
            operand = np.zeros((16, 32), dtype=np.uint8)
            addresses = []
            for lane in LANES:
                row = lane % 16
                place = (warp * 16 + row) * 128 + (lane // 16 ^ row % 8) * 16
                addresses.append(place ^ step * 32)
            for matrix in range(4):
                rows = addresses[8 * matrix : 8 * matrix + 8]
                assert_no_bank_conflict(rows, 16)
                for lane in LANES:
                    # Register `matrix` of a lane: 4 bytes of row lane / 4 of the matrix.
                    value = memory[rows[lane // 4] + lane % 4 * 4 :][:4]
                    row, k = lane // 4 + matrix % 2 * 8, lane % 4 * 4 + matrix // 2 * 16
                    operand[row, k : k + 4] = value
            expected = x_TK[16 * warp : 16 * warp + 16, 32 * step : 32 * step + 32]
            np.testing.assert_array_equal(operand, expected)
