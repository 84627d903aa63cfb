"""The benchmark of one linear: its checks and arithmetic, at tiny sizes on a CPU."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.bench.linear import __main__ as linear
from scripts.bench.linear import baselines, check, fused, measure, results, workload

CPU = torch.device("cpu")
BASELINES = ("grouped_mm", "concat", "bridge_method", "peft_eager", "loop")


def _error(provider: str, adapters: int, dropout: float, spoil: str = "", by: float = 1.1) -> float:
    """The checked error of a provider on a tiny fused linear in fp32."""
    shape = workload.SHAPES["tiny_qkv"]
    made_of = workload.make_workload(shape, 48, device=CPU, dtype=torch.float32)
    versions = measure.versions(CPU, "abc")
    measurer = measure.CellMeasurer(made_of, versions, rounds=7)
    sets = measure.AdapterSets(made_of, workload.adapter_mix(48, adapters))
    made = measurer._provider(provider, sets, dropout)
    forward = made.forward(0)
    backward = made.backward(0, forward)
    spoiled = {
        "y": lambda: forward.y_TN.detach()[47:],
        "dx": lambda: backward.dx_TK[:1],
        "factor": lambda: made.gradients(backward)[-1][0].lora_b_RN,
    }
    if spoil:
        spoiled[spoil]().mul_(by)
    frozen, results = measurer._frozen_rows(provider), (forward, backward)
    return check.worst_error(made, made_of.sets[0], frozen, sets.mix.ends, results)


FP8_ADAPTERS = [name for name in fused.FP8 if name != "frozen_fp8"]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("adapters", [1, 5])
@pytest.mark.parametrize("provider", ["tlora", "tlora_torch", *FP8_ADAPTERS, *BASELINES])
def test_every_provider_computes_the_definition(
    provider: str, adapters: int, dropout: float
) -> None:
    if provider in BASELINES:
        why = baselines.why_not(provider, workload.adapter_mix(48, adapters), dropout)
        assert (why is None) == (
            (provider != "peft_eager" or adapters == 1)
            and (provider != "bridge_method" or dropout == 0)
        )
        if why:
            return
    assert _error(provider, adapters, dropout) < 1e-5


@pytest.mark.parametrize("provider", ["frozen", "frozen_fp8"])
def test_the_frozen_linear_is_checked_too(provider: str) -> None:
    assert _error(provider, 3, 0.0) < 1e-5
    assert _error(provider, 3, 0.0, "y") == pytest.approx(0.1, rel=0.01)


@pytest.mark.parametrize("spoil", ["y", "dx", "factor"])
def test_one_wrong_row_or_factor_is_an_error(spoil: str) -> None:
    """Not averaged away over those that are right."""
    assert _error("tlora", 3, 0.3, spoil) == pytest.approx(0.1, rel=0.01)
    assert _error("tlora", 3, 0.3, spoil, by=torch.nan) == torch.inf


def _cells(provider: str, **values: Any) -> dict[str, Any]:
    cell = {"shape": "8b_o", "tokens": 8192, "adapters": 4, "dropout": 0.0, "ratio": 1.0}
    return {"provider": provider, **cell, **values}


def test_the_summary_is_a_geometric_mean_over_shapes() -> None:
    rows = [
        _cells("tlora", ratio=1.0),
        _cells("tlora", shape="8b_qkv", ratio=1.21),
        _cells("concat", ratio=1.5),
    ]
    concat, tlora = results.summary(rows)
    assert (concat["provider"], concat["ratio"], concat["shapes"]) == ("concat", 1.5, 1)
    assert (tlora["ratio"], tlora["shapes"]) == (pytest.approx(1.1), 2)
    table = results.summary_table(results.summary(rows))
    assert "1.500*" in table
    assert "1.100 " in table + " "


def test_a_run_measures_writes_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    csv = tmp_path / "rows.csv"
    options = ["--shapes", "tiny_o,tiny_gate_up", "--tokens", "40", "--adapters", "1,3"]
    options += ["--providers", "frozen,tlora,concat", "--rounds", "7", "--commit", "abc"]
    assert linear.main([*options, "--csv", str(csv)]) == 0
    assert csv.read_text().splitlines()[0] == (
        "gpu,torch,triton,commit,shape,tokens,adapters,dropout,provider,"
        "fwd_us,bwd_us,frozen_fwd_us,frozen_bwd_us,ratio,rel_error"
    )
    rows = results.read_csv([csv])
    cells = itertools.product(("tiny_o", "tiny_gate_up"), (1, 3), (0.0, 0.1))
    found = [(r["shape"], r["adapters"], r["dropout"]) for r in rows if r["provider"] == "tlora"]
    assert found == list(cells)
    for r in rows:
        us = [r[f"{frozen}{way}_us"] for frozen in ("", "frozen_") for way in ("fwd", "bwd")]
        assert r["ratio"] == pytest.approx(sum(us[:2]) / sum(us[2:]), rel=1e-3)
        assert 0 < r["rel_error"] < 2e-2
    assert {r["commit"] for r in rows} == {"abc"}
    assert "geometric mean" in capsys.readouterr().out


def test_a_wrong_or_broken_provider_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    csv = tmp_path / "rows.csv"
    options = ["--shapes", "tiny_o", "--tokens", "40", "--adapters", "2", "--csv", str(csv)]
    wrong = lambda self, backward: ()  # noqa: E731
    monkeypatch.setattr(fused.FusedLinear, "gradients", wrong)
    assert linear.main(options) == 1
    assert not csv.exists()


def test_a_kernel_that_cannot_run_is_a_problem_not_a_crash(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--shapes", "tiny_o", "--tokens", "40", "--adapters", "2", "--device", "cpu"]
    assert linear.main([*options, "--providers", "tlora_cuda"]) == 1
    assert "TLORA_KERNELS must name kernels that run here, got cuda" in capsys.readouterr().out
