"""Bases, job files and the watch of the benchmark of whole commands."""

from __future__ import annotations

from pathlib import Path

from scripts.bench.around_training import base, command
from tlora_megatron.config.load import load_config
from tlora_megatron.model.spec import read_model_spec
from tlora_megatron.training.formats.hf_checkpoint import HFCheckpoint
from tlora_megatron.training.formats.hf_convert import check_weights


def test_a_base_can_be_read_and_is_written_once(tmp_path: Path) -> None:
    size = base.write_base("toy", tmp_path / "base")
    check_weights(
        read_model_spec(tmp_path / "base" / "config.json"), HFCheckpoint(tmp_path / "base")
    )
    (file,) = (tmp_path / "base").glob("*.safetensors")
    written = file.stat().st_mtime_ns
    assert base.write_base("toy", tmp_path / "base") == size == file.stat().st_size
    assert file.stat().st_mtime_ns == written


def test_every_job_steps_in_every_round(tmp_path: Path) -> None:
    base.write_base("toy", tmp_path / "base")
    for case in command.CASES:
        command.write_jobs(
            case, tmp_path / "base", command.TEXTS, tmp_path / "out", tmp_path / "run.yaml"
        )
        config = load_config(tmp_path / "run.yaml")
        assert len(config.jobs) == case.jobs
        longest = sum(job.batch_size * job.max_seq_len for job in config.jobs)
        assert longest <= config.run.micro_batch_tokens
        assert {job.max_steps for job in config.jobs} == {case.rounds}


def test_rounds_behind_a_save_are_held_against_those_before_the_next() -> None:
    rounds = [(2.0 if (number % 4) in (1, 2) else 1.0) for number in range(1, 15)]
    gaps = rounds[1:]  # between rounds 1 and 14
    assert command.beside_saves(gaps, every=4) == (2.0, 1.0)
    assert command.beside_saves(gaps, every=0) is None
    assert command.beside_saves(gaps, every=8) is None
