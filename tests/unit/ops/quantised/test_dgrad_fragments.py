"""The byte moves of csrc/fp8_dgrad.cuh on paper: ldmatrix, the byte permutations and the store."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
LANES = range(32)


def swizzled(tile: Bytes) -> Bytes:
    """Shared memory after a bulk tensor copy of rows of 128 bytes: 16-byte chunks change places."""
    chunks = tile.reshape(len(tile), 8, 16)
    place = np.arange(8)[None, :] ^ (np.arange(len(tile)) % 8)[:, None]
    out = np.empty_like(chunks)
    np.put_along_axis(out, place[:, :, None], chunks, axis=1)
    return out.reshape(-1)


def word(memory: Bytes, at: int) -> int:
    return int.from_bytes(memory[at : at + 4].tobytes(), "little")


def byte_perm(low: int, high: int, selector: int) -> int:
    pool = (high << 32 | low).to_bytes(8, "little")
    return int.from_bytes(bytes(pool[selector >> 4 * i & 7] for i in range(4)), "little")


def assert_no_bank_conflict(addresses: list[int], size: int) -> None:
    """Fails if two accesses that a warp makes in one pass share a bank of 4 bytes."""
    banks = [(at // 4 + k) % 32 for at in addresses for k in range(size // 4)]
    assert len(set(banks)) == len(banks), addresses


def weight_row(lane: int) -> int:
    """`n` of Consumer::load_codes."""
    place = lane % 8
    even = (place // 4 * 5 + place % 4 // 2 * 2) * 2
    swap = 0 if lane // 8 % 2 == 0 else 2 if place < 4 else -2
    return even + swap + place % 2 + lane // 16 * 16


def load_transposed(memory: Bytes, addresses: list[int]) -> NDArray[np.int64]:
    """`ldmatrix.x4.trans.b16`: registers `[lane, 4]`."""
    registers = np.zeros((32, 4), dtype=np.int64)
    for matrix in range(4):
        rows = addresses[8 * matrix : 8 * matrix + 8]
        assert_no_bank_conflict(rows, 16)
        for lane in LANES:
            pairs = [
                int.from_bytes(memory[at + lane // 4 * 2 :][:2].tobytes(), "little")
                for at in rows[lane % 4 * 2 : lane % 4 * 2 + 2]
            ]
            registers[lane, matrix] = pairs[0] | pairs[1] << 16
    return registers


def test_codes_become_the_first_operand() -> None:
    weight_NK = np.random.default_rng(0).integers(0, 256, (128, 128), dtype=np.uint8)
    memory = swizzled(weight_NK)
    for chunk in range(8):  # of 16 features: a warp
        for step in range(4):  # of 32 n
            addresses = [
                (32 * step + weight_row(lane)) * 128 + (chunk ^ weight_row(lane) % 8) * 16
                for lane in LANES
            ]
            r = load_transposed(memory, addresses).tolist()
            operand = np.zeros((16, 32), dtype=np.uint8)
            for lane in LANES:
                low = 0x6420 if lane % 4 < 2 else 0x2064
                for i in range(4):
                    value = byte_perm(*r[lane][i // 2 * 2 :][:2], low + i % 2 * 0x1111)
                    row, n = lane // 4 + i % 2 * 8, lane % 4 * 4 + i // 2 * 16
                    operand[row, n : n + 4] = list(value.to_bytes(4, "little"))
            mine = weight_NK[32 * step : 32 * step + 32, 16 * chunk : 16 * chunk + 16].T
            # Row g is feature 2 g, row g + 8 is feature 2 g + 1.
            np.testing.assert_array_equal(operand, np.concatenate([mine[0::2], mine[1::2]]))


@pytest.mark.parametrize("warp", range(4))
def test_ranks_become_the_first_operand_in_the_same_order(warp: int) -> None:
    lora_a = np.arange(16 * 64, dtype=np.uint16).reshape(16, 64)  # a chunk of a panel
    memory = swizzled(lora_a.view(np.uint8))
    operand = np.zeros((16, 16), dtype=np.uint16)
    pairs = np.zeros((32, 4), dtype=np.int64)
    for i in range(4):
        addresses = []
        for lane in LANES:
            g, q = divmod(lane, 4)
            rank = q * 2 + i % 2 + i // 2 * 8
            addresses.append(rank * 128 + ((warp * 2 + g // 4) ^ rank % 8) * 16 + g % 4 * 4)
            pairs[lane, i] = word(memory, addresses[-1])
        assert_no_bank_conflict(addresses, 4)
    for lane in LANES:
        for i in range(4):
            two = [int(v) for v in pairs[lane, i // 2 * 2 :][:2]]
            value = byte_perm(two[0], two[1], 0x7632 if i % 2 else 0x5410)
            row, rank = lane // 4 + i % 2 * 8, lane % 4 * 2 + i // 2 * 8
            operand[row, rank : rank + 2] = value & 0xFFFF, value >> 16
    mine = lora_a[:, 16 * warp : 16 * warp + 16].T
    np.testing.assert_array_equal(operand, np.concatenate([mine[0::2], mine[1::2]]))


def test_results_are_stored_row_by_row() -> None:
    """Accumulators of 64 features x 64 rows become a panel `[64 rows][64 features]` of bf16."""
    expected = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64)  # [row, feature]
    memory = np.zeros(64 * 128, dtype=np.uint8)
    for warp in range(4):
        for i in range(8):
            for odd in range(2):
                addresses = []
                for lane in LANES:
                    g, q = divmod(lane, 4)
                    row, feature = i * 8 + q * 2 + odd, warp * 16 + 2 * g
                    at = (q * 2 + odd + i * 8) * 128 + g % 4 * 4
                    at += ((warp * 2 + g // 4) ^ (q * 2 + odd)) * 16
                    # d[4 i + odd] and d[4 i + odd + 2]: rows g and g + 8 of the product.
                    pair = expected[row, feature : feature + 2]
                    memory[at : at + 4] = pair.view(np.uint8)
                    addresses.append(at)
                assert_no_bank_conflict(addresses, 4)
    np.testing.assert_array_equal(memory, swizzled(expected.view(np.uint8)))
