"""`tlora convert`: flags, refusals, and what lies on the disk; loading is in distributed/."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader

from tests.helpers.tiny_models import make_tiny_model
from tlora_megatron.cli.main import main
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.training.formats.fingerprint import read_fingerprint
from tlora_megatron.training.formats.hf_checkpoint import HFCheckpoint
from tlora_megatron.training.formats.megatron_checkpoint import (
    plan_megatron_checkpoint,
    write_megatron_checkpoint,
)
from tlora_megatron.training.formats.megatron_flags import megatron_arguments, megatron_flags
from tlora_megatron.training.run.fingerprint import relative_error


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "qwen2", "qwen2", tied=True)


LLAMA = Path(__file__).parents[4] / "configs" / "models" / "llama-3.1-8b.json"


def read_spec(tmp_path: Path, **fields: Any) -> ModelSpec:
    """Llama-3.1-8B's shape with some fields replaced."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(LLAMA.read_text()) | fields))
    return read_model_spec(path)


class TestFlags:
    def test_llama_3_1_8b(self, tmp_path: Path) -> None:
        assert " ".join(megatron_flags(read_spec(tmp_path))) == (
            "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
            "--group-query-attention --num-query-groups 8 --kv-channels 128 "
            "--max-position-embeddings 131072 --position-embedding-type rope --rotary-base 500000 "
            "--rotary-percent 1.0 --use-rope-scaling --rope-scaling-factor 8.0 "
            "--normalization RMSNorm --norm-epsilon 1e-05 --swiglu --disable-bias-linear "
            "--untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 "
            "--vocab-size 128256 --padded-vocab-size 128256"
        )

    def test_switches(self, tmp_path: Path) -> None:
        spec = read_spec(
            tmp_path, model_type="qwen3", num_key_value_heads=32, rope_scaling=None,
            tie_word_embeddings=True, vocab_size=1000,
        )  # fmt: skip
        words = megatron_flags(spec)
        assert "--qk-layernorm" in words
        assert words[-2:] == ["--padded-vocab-size", "1024"]
        for absent in ("group-query-attention", "num-query-groups", "use-rope-scaling"):
            assert f"--{absent}" not in words
        assert "--untie-embeddings-and-output-weights" not in words
        assert "--add-qkv-bias" not in words

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"rope_theta": 10000.5}, r"rope_theta must be whole for .*--rotary-base, got 10000.5"),
            ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 2.0, "original_max_position_embeddings": 8192}},
             r"rope_scaling.high_freq_factor must be 4.0 for .*--use-rope-scaling, got 2.0"),
        ],
    )  # fmt: skip
    def test_what_has_no_flag(self, tmp_path: Path, fields: dict[str, Any], message: str) -> None:
        with pytest.raises(NotImplementedError, match=message):
            megatron_flags(read_spec(tmp_path, **fields))


class TestFiles:
    def test_what_is_written(self, tiny: Path, tmp_path: Path) -> None:
        out = tmp_path / "some" / "out"
        assert main(["convert", str(tiny), str(out), "--dtype", "bfloat16"]) == 0
        assert (out / "latest_checkpointed_iteration.txt").read_text() == "release"
        release = out / "release"
        assert (
            json.loads((release / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
        )
        assert sorted(file.name for file in tmp_path.glob("some/.*")) == []
        layers, output = 4, 1
        assert len(list(release.glob("*.distcp"))) == 1 + layers + output

        common = torch.load(release / "common.pt", weights_only=False)
        spec = read_model_spec(tiny / "config.json")
        assert vars(common["args"]).items() >= megatron_arguments(spec).items()
        assert common["checkpoint_version"] == 3.0

        stored = FileSystemReader(release).read_metadata().state_dict_metadata
        tensors = {key: entry for key, entry in stored.items() if "_extra_state" not in key}
        assert {key: list(entry.size) for key, entry in tensors.items()} == {
            "embedding.word_embeddings.weight": [128, 64],
            "decoder.layers.self_attention.linear_qkv.weight": [4, 128, 64],
            "decoder.layers.self_attention.linear_qkv.bias": [4, 128],
            "decoder.layers.self_attention.linear_qkv.layer_norm_weight": [4, 64],
            "decoder.layers.self_attention.linear_proj.weight": [4, 64, 64],
            "decoder.layers.mlp.linear_fc1.layer_norm_weight": [4, 64],
            "decoder.layers.mlp.linear_fc1.weight": [4, 192, 64],
            "decoder.layers.mlp.linear_fc2.weight": [4, 64, 96],
            "decoder.final_layernorm.weight": [64],
        }
        assert {entry.properties.dtype for entry in tensors.values()} == {torch.bfloat16}

    def test_as_json(self, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (shutil.copytree(tiny, tmp_path / "with tokenizer") / "tokenizer.json").touch()
        model, out = tmp_path / "with tokenizer", tmp_path / "out"
        assert main(["convert", str(model), str(out), "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        num_parameters = sum(t.numel() for t in load_file(tiny / "model.safetensors").values())
        assert result["parameters"] == num_parameters
        assert result["size_bytes"] == 4 * num_parameters
        assert (result["dtype"], result["written"]) == ("float32", True)
        assert result["flags"][-2:] == ["--tokenizer-model", str(model)]
        assert (out / "model_flags.txt").read_text().splitlines() == result["flags"]

    def test_the_base_s_fingerprint(self, tiny: Path, tmp_path: Path) -> None:
        out, without = tmp_path / "out", tmp_path / "without"
        assert main(["convert", str(tiny), str(out), "--dtype", "bfloat16"]) == 0
        assert main(["convert", str(tiny), str(without), "--no-fingerprint"]) == 0
        assert read_fingerprint(without) is None
        model = shutil.copytree(tiny, tmp_path / "model")
        assert main(["convert", str(model), str(model), "--fingerprint-only"]) == 0
        written, exact = read_fingerprint(out), read_fingerprint(model)
        assert written is not None
        assert exact is not None
        # Of the weights as they were written: in bfloat16.
        assert 1e-4 < relative_error(exact, written.log_probs) < 0.1

    def test_a_fingerprint_alone_needs_its_folder_and_a_dry_run_writes_nothing(
        self, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments = ["convert", str(tiny), str(tmp_path / "none"), "--fingerprint-only"]
        assert main(arguments) == 2
        assert "OUT must be an existing directory with --fingerprint" in capsys.readouterr().err
        for more in (arguments[3:], ["--no-fingerprint"], []):
            assert main(["convert", str(tiny), str(tmp_path), *more, "--dry-run"]) == 0
            assert "would write" in capsys.readouterr().out
            assert list(tmp_path.iterdir()) == []


Said = Callable[[Path, Path], str]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """What `tlora convert MODEL OUT` says where it is refused."""

    def convert(model: Path, out: Path) -> str:
        assert main(["convert", str(model), str(out)]) == 2
        return capsys.readouterr().err

    return convert


class TestRefusals:
    @pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
    def test_a_failed_conversion(self, tiny: Path, tmp_path: Path, error: BaseException) -> None:
        class Failing(HFCheckpoint):
            """Fails at a tensor, as a disk or a person might."""

            def read(self, name: str, *part: Any, **parts: Any) -> torch.Tensor:
                if name == "model.layers.2.mlp.down_proj.weight":
                    raise error
                return super().read(name, *part, **parts)

        spec = read_model_spec(tiny / "config.json")
        planned = plan_megatron_checkpoint(spec, HFCheckpoint(tiny))
        written: list[int] = []
        with pytest.raises(type(error)):
            write_megatron_checkpoint(
                spec, Failing(tiny), tmp_path / "out", planned, on_bytes=written.append
            )
        assert len(written) == 3, "the embedding and two layers"
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("fill", "out"), [(Path.touch, "."), (Path.mkdir, "."), (Path.touch, "something")]
    )
    def test_in_use(self, tiny: Path, tmp_path: Path, said: Said, fill: Any, out: str) -> None:
        fill(tmp_path / "something")
        assert "OUT must be a new or empty directory, got" in said(tiny, tmp_path / out)

    def test_a_full_disk(self, tiny: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 1000))
        assert "OUT must have 0.0 GB free, got 0.0 GB in" in said(tiny, Path("nowhere/b"))

    def test_tensors_that_do_not_fit(self, tiny: Path, tmp_path: Path, said: Said) -> None:
        model, out = tmp_path / "model", tmp_path / "out"
        assert "base_model must hold a config.json" in said(model, out)
        shutil.copytree(tiny, model)
        tensors = load_file(model / "model.safetensors")
        norm = tensors["model.norm.weight"].half()
        save_file(tensors | {"model.norm.weight": norm}, model / "model.safetensors")
        message = said(model, out)
        assert "must share one dtype unless --dtype is given, got torch.float32" in message
        assert "torch.float16 of model.norm.weight" in message
        assert main(["convert", str(model), str(tmp_path / "wide"), "--dtype", "float32"]) == 0
        del tensors["model.layers.3.mlp.up_proj.weight"]
        save_file(tensors, model / "model.safetensors")
        assert "must hold the tensor model.layers.3.mlp.up_proj.weight" in said(model, out)
        assert not out.exists()
