"""What the benchmark of a service beside `tlora train` refuses."""

from __future__ import annotations

import pytest
import torch

from scripts.bench.live import throughput


def test_a_gpu_that_is_not_there_is_refused_by_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit):
        throughput.arguments([])
    assert "--gpus must be 0 on a machine without a GPU, got 1" in capsys.readouterr().err
    assert throughput.arguments(["--gpus", "0"]).gpus == 0
