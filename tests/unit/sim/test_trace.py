"""Traces of every format, cut to a cluster; job mixes; cluster files."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from tlora_megatron.config.reader import ConfigError
from tlora_megatron.sim.cluster import load_cluster
from tlora_megatron.sim.trace import Trace, TraceRow, TraceShape, offered_gpus, read_trace, shaped
from tlora_megatron.sim.workload import MixDraw, load_mix, shipped_mixes

ACME = """\
job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,duration,queue
a,u1,1,8,16,SFT,COMPLETED,2023-03-01 00:10:00+08:00,x,y,600,10
b,u2,1,0,16,CPU,COMPLETED,2023-03-01 00:00:00+08:00,x,y,600,10
c,u2,1,1,16,SFT,CANCELLED,2023-03-01 00:00:00+08:00,x,y,60,10
d,u2,1,1,16,SFT,NODE_FAIL,2023-03-01 00:00:30+08:00,x,y,60,10
"""
PLAIN = "name,submit_s,duration_s,num_gpus,priority,tenant\nx,5,10,2,1,t\ny,7,,1,0,t\n"
PHILLY = [
    {
        "jobid": "application_1",
        "status": "Killed",
        "vc": "v",
        "user": "u",
        "submitted_time": "2017-10-09 07:01:00",
        "attempts": [
            {
                "start_time": "2017-10-09 07:02:00",
                "end_time": "2017-10-09 07:03:00",
                "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}, {"ip": "m2", "gpus": ["gpu0"]}],
            },
            {"start_time": "2017-10-09 07:04:00", "end_time": "None", "detail": []},
        ],
    }
]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_acme(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "trace_seren.csv", ACME))
    assert trace.name == "trace_seren"
    assert [(r.name, r.submit_s, r.num_gpus, r.end) for r in trace.rows] == [
        ("c", 0, 1, "cancelled"),
        ("d", 30, 1, "failed"),
        ("a", 600, 8, "completed"),
    ]
    assert trace.rows[2].tenant == "u1"
    assert trace.dropped == {"no GPUs": 1}


def test_plain_csv_and_gzip(tmp_path: Path) -> None:
    plain = read_trace(write(tmp_path / "t.csv", PLAIN))
    expected = TraceRow(name="x", submit_s=0, duration_s=10, num_gpus=2, priority=1, tenant="t")
    assert plain.rows == (expected,)
    assert plain.dropped == {"no duration": 1}
    (tmp_path / "u.csv.gz").write_bytes(gzip.compress(PLAIN.encode()))
    packed = read_trace(tmp_path / "u.csv.gz")
    assert (packed.name, packed.rows) == ("u", plain.rows)


def test_philly_json(tmp_path: Path) -> None:
    (row,) = read_trace(write(tmp_path / "cluster_job_log", json.dumps(PHILLY))).rows
    assert (row.num_gpus, row.duration_s, row.end, row.tenant) == (3, 60, "cancelled", "v")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", r"--trace \S+ must have a column submit_time or .*, got 'a, b'$"),
        ("submit_s,duration_s,num_gpus\n", "trace must hold at least one job"),
        ("submit_s,duration_s,num_gpus\n0,x,1\n", "row 1 of .* must hold numbers, got .*'x'"),
        ("submit_s,duration_s,num_gpus\nnan,1,1\n", "row 1 of .* must hold numbers"),
        ("submit_s,duration_s,num_gpus\n0,inf,1\n", "row 1 of .* must hold numbers"),
        ("[1, 2]", "must be Philly's job log"),
    ],
)
def test_bad_traces_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_trace(write(tmp_path / "t.csv", text))


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trace must be a readable text file, got .*none\.csv"):
        read_trace(tmp_path / "none.csv")


def rows(*num_gpus: int) -> Trace:
    made = (
        TraceRow(name=str(i), submit_s=10.0 * i, duration_s=100, num_gpus=num)
        for i, num in enumerate(num_gpus)
    )
    return Trace(name="t", rows=tuple(made), dropped={})


def test_cutting_to_a_cluster() -> None:
    trace = rows(8, 64, 1, 2)
    assert offered_gpus(trace.rows) == 75 * 100 / 30
    cut = shaped(trace, TraceShape(gpu_divisor=4), 8, seed=0)
    assert [(row.num_gpus, row.submit_s) for row in cut.rows] == [(2, 0), (1, 20), (1, 30)]
    assert cut.dropped == {"more GPUs than the cluster has": 1}
    clamped = shaped(trace, TraceShape(oversize="clamp", most_jobs=2), 8, seed=0)
    assert [row.num_gpus for row in clamped.rows] == [8, 8]
    assert clamped.dropped == {"after the first so many": 2}


def test_a_load_is_what_jobs_ask_for_of_the_gpus_time() -> None:
    cut = shaped(rows(8, 64, 1, 2), TraceShape(gpu_divisor=4, load=2.0), 8, seed=0)
    # 2 + 1 + 1 GPUs for 100 s each, of 8 GPUs: half of what there is in 100 s, twice that of 25 s.
    assert [(row.num_gpus, row.submit_s) for row in cut.rows] == [
        (2, 0),
        (1, pytest.approx(25 * 2 / 3)),
        (1, pytest.approx(25)),
    ]
    assert offered_gpus(cut.rows) == pytest.approx(2 * 8)
    with pytest.raises(ValueError, match=r"--load must be left out .* come at once, got 2\.0"):
        shaped(rows(1), TraceShape(load=2.0), 8, seed=0)


def test_only_completed(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t.csv", ACME))
    cut = shaped(trace, TraceShape(only_completed=True), 8, seed=0)
    assert [row.name for row in cut.rows] == ["a"]
    assert cut.dropped == {"cancelled in the trace": 1, "failed in the trace": 1, "no GPUs": 1}


def test_samples_are_the_seeds() -> None:
    trace = rows(*[1] * 400)
    kept = [len(shaped(trace, TraceShape(sample=0.25), 8, seed=s).rows) for s in (0, 0, 1)]
    assert kept[0] == kept[1]
    assert all(60 < number < 140 for number in kept)
    with pytest.raises(ValueError, match="trace must keep at least one job"):
        shaped(rows(64), TraceShape(), 8, seed=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"load": 0.0}, "load must be positive and finite, got 0.0"),
        ({"load": float("nan")}, "load must be positive"),
        ({"sample": 1.5}, r"sample must be in \(0, 1\], got 1.5"),
        ({"gpu_divisor": 0.5}, "--gpu-divisor must be at least 1, got 0.5"),
        ({"most_jobs": 0}, "jobs must be at least 1, got 0"),
    ],
)
def test_bad_shapes_are_refused(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TraceShape(**fields)  # type: ignore[arg-type]


def test_the_papers_draw() -> None:
    mix, specs = load_mix("paper")
    assert {name: spec.num_layers for name, spec in specs.items()} == {
        "Llama-3-8B": 32,
        "Qwen3-8B": 36,
    }
    draw = MixDraw(mix, seed=1)
    drawn = [draw.next(num_gpus=4) for _ in range(2000)]
    assert [draw_again.next(num_gpus=4) for draw_again in [MixDraw(mix, seed=1)]] == drawn[:1]
    ranks, batches = (
        Counter(getattr(load, f) for _, load in drawn) for f in ("rank", "batch_size")
    )
    assert ranks.keys() == {2, 4, 8, 16}
    assert batches.keys() == {1, 2, 4, 8}
    assert all(400 < count < 600 for count in [*ranks.values(), *batches.values()])
    assert {load.lengths.pairs for _, load in drawn} == {((1024, 1.0),)}


def test_batches_per_gpu() -> None:
    mix, _ = load_mix("paper_per_gpu")
    draw = MixDraw(mix, seed=0)
    assert {draw.next(num_gpus=16)[1].batch_size for _ in range(100)} == {16, 32, 64, 128}


def test_every_shipped_mix_loads() -> None:
    assert shipped_mixes() == ("measured", "paper", "paper_per_gpu")
    for name in shipped_mixes():
        mix, specs = load_mix(name)
        assert mix.name == name
        assert specs.keys() == {base.name for base in mix.bases}


def test_bad_mixes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a file or one of measured, paper"):
        load_mix("papers")
    with pytest.raises(ConfigError, match=r"mix\.rank is not a known key; did you mean ranks"):
        load_mix(str(write(tmp_path / "m.yaml", "name: x\nrank: []\n")))


def test_bases_with_routed_experts_are_refused(repo: Path, tmp_path: Path) -> None:
    mix = (repo / "tlora_megatron/sim/mixes/paper.yaml").read_text()
    config = repo / "configs/models/qwen3-30b-a3b.json"
    mix = mix.replace("llama-3-8b.json", str(config)).replace("qwen3-8b.json", str(config))
    file = write(tmp_path / "m.yaml", mix)
    with pytest.raises(ValueError, match="base Llama-3-8B of --mix must have no routed experts"):
        load_mix(str(file))


@pytest.mark.parametrize("name", ["cluster-128xA100", "cluster-128xH100"])
def test_shipped_clusters(repo: Path, name: str) -> None:
    cluster, profile = load_cluster(repo / "configs" / "hardware" / f"{name}.yaml")
    assert cluster.shape.num_gpus == 128
    assert profile.inter_node == cluster.inter_node
    assert name.removeprefix("cluster-128x").lower() in profile.name


def test_a_cluster_beyond_its_profile_is_refused(repo: Path, tmp_path: Path) -> None:
    folder = repo / "configs" / "hardware"
    text = (folder / "cluster-128xA100.yaml").read_text()
    text = text.replace("gpus_per_node: 8", "gpus_per_node: 64")
    text = text.replace("profile: a100-80g", f"profile: {folder / 'a100-80g.json'}")
    with pytest.raises(ConfigError, match=r"cluster\.gpus_per_node must be at most 8, .* got 64"):
        load_cluster(write(tmp_path / "c.yaml", text))
