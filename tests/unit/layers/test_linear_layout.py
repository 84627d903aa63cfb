"""Which rows a rank holds of a linear's input and output, and who communicates what."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tlora_megatron.layers.linear import LinearLayout


@pytest.mark.parametrize(
    ("kind", "sequence_parallel", "input_rows", "output_rows"),
    [
        ("column", False, (0, 12), (0, 12)),
        ("column", True, (6, 9), (0, 12)),
        ("row", False, (0, 12), (0, 12)),
        ("row", True, (0, 12), (6, 9)),
    ],
)
def test_sequence_parallelism_splits_what_lies_outside_of_a_linear_pair(
    kind: str,
    sequence_parallel: bool,
    input_rows: tuple[int, int],
    output_rows: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda group: 2)
    layout = LinearLayout(kind=kind, tp_size=4, sequence_parallel=sequence_parallel)  # type: ignore[arg-type]
    assert layout.input_window(12) == input_rows
    assert layout.output_window(12) == output_rows
    assert layout.gathers_input == (input_rows != (0, 12))
    assert layout.scatters_output == (output_rows != (0, 12))
