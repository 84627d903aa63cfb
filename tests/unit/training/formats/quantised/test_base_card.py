"""A base's quantisation in checkpoints and adapters: who may go on over what; PEFT reads it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from peft import PeftConfig
from peft.utils import load_peft_weights
from safetensors.torch import load_file, save_file

from tests.helpers.fp8_folders import FILE, make_fp8_folder
from tests.helpers.tiny_models import make_tiny_model
from tlora_megatron.config.job import LoraSpec
from tlora_megatron.config.schema import BaseModelSpec
from tlora_megatron.layers.slab import initial_factors
from tlora_megatron.model.quantisation import base_quantisation
from tlora_megatron.model.spec import read_model_spec
from tlora_megatron.training.formats.peft import export_adapter, load_adapter
from tlora_megatron.training.formats.quantised import (
    QuantisationCard,
    check_same_base,
    quantisation_card,
)

CARD = QuantisationCard(method="fp8", format="e4m3, one scale an output channel", digest="a1" * 32)
OTHER = replace(CARD, digest="b2" * 32)
LORA = LoraSpec(rank=2, target_modules=("q_proj",))
WHERE = Path("out/step_00000004")


def card(base: BaseModelSpec) -> QuantisationCard | None:
    spec = read_model_spec(Path(str(base.path)) / "config.json")
    return quantisation_card(base, spec, base_quantisation(base, spec))


def test_the_digest_is_that_of_the_codes(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "a", "llama", num_hidden_layers=2)
    base = BaseModelSpec(path=str(directory), quantization="fp8")
    first = card(base)
    assert first is not None
    assert card(base) == first
    assert card(replace(base, dtype="float32")) == first  # codes are made of what is stored
    assert card(replace(base, quantization=None)) is None
    listed = replace(base, unquantised=("embed_tokens", "lm_head", "layers.1.down_proj"))
    assert card(listed) != first
    tensors = dict(load_file(directory / FILE))
    tensors["model.layers.1.self_attn.v_proj.weight"][3] *= 1.5  # another scale, the same codes
    save_file(tensors, directory / FILE)
    assert card(base) != first


def test_a_published_folder_has_the_digest_of_its_own_codes(tmp_path: Path) -> None:
    directory = make_fp8_folder(tmp_path, "fp8")
    base = BaseModelSpec(path=str(directory))
    first = card(base)
    assert first is not None
    assert first.format == "e4m3, one scale a block of 128 x 128 (fp8)"
    tensors = dict(load_file(directory / FILE))
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"][0, 0] *= 2
    save_file(tensors, directory / FILE)
    assert card(base) != first


@pytest.mark.parametrize(
    ("saved", "ours", "message"),
    [
        (
            None,
            CARD,
            "job 'a': the base's quantization must be null (bf16 or fp32 weights) as in its "
            f"checkpoint {WHERE}, got fp8 (e4m3, one scale an output channel, a1a1a1a1a1a1); "
            "base_model.allow_change: true lets jobs go on over it",
        ),
        (CARD, None, "must be fp8 (e4m3, one scale an output channel, a1a1a1a1a1a1) as in"),
        (CARD, OTHER, "got fp8 (e4m3, one scale an output channel, b2b2b2b2b2b2); base_model"),
    ],
)
def test_a_job_goes_on_over_the_same_codes_or_where_it_may(
    saved: QuantisationCard | None,
    ours: QuantisationCard | None,
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = json.loads(json.dumps({"quantisation": None if saved is None else asdict(saved)}))
    with pytest.raises(ValueError, match=r"^job 'a': the base's quantization must be") as refused:
        check_same_base("a", WHERE, state, ours, allow_change=False)
    assert message in str(refused.value)
    check_same_base("a", WHERE, state, ours, allow_change=True)
    assert "job a goes on over a base with quantization" in caplog.text
    caplog.clear()
    check_same_base("a", WHERE, state, saved, allow_change=False)
    check_same_base("a", WHERE, {}, None, allow_change=False)  # of an earlier version
    assert not caplog.text


def test_an_adapter_names_its_base_and_peft_reads_it(tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base", "llama", num_hidden_layers=2)
    spec, directory = read_model_spec(base / "config.json"), tmp_path / "adapter"
    factors = initial_factors(spec, LORA, 0)

    def export(quantisation: QuantisationCard | None) -> None:
        export_adapter(
            directory,
            lora=LORA,
            factors=factors,
            model=spec,
            base_model="tiny",
            quantisation=quantisation,
        )

    export(None)
    assert not (directory / "README.md").exists()
    assert load_adapter(directory, model=spec).quantisation is None
    export(CARD)
    assert load_adapter(directory, model=spec).quantisation == CARD
    text = (directory / "README.md").read_text()
    assert 'base_model: "tiny"' in text
    assert CARD.format in text
    assert CARD.digest in text
    assert PeftConfig.from_pretrained(str(directory)).base_model_name_or_path == "tiny"
    weights = load_peft_weights(str(directory), device="cpu")
    assert len(weights) == 2 * spec.num_layers
    assert all(torch.isfinite(value).all() for value in weights.values())
    export(None)
    assert not (directory / "README.md").exists()
    (directory / "README.md").write_text("somebody's")
    export(OTHER)
    assert (directory / "README.md").read_text() == "somebody's"
    assert load_adapter(directory, model=spec).quantisation == OTHER
    export(None)
    assert (directory / "README.md").read_text() == "somebody's"
