"""The DeepSpeed JSON files that people have, as their projects publish them, and a tlora
section. Keys and values are those of the files that each case names: Hugging Face's
documentation and tests, LLaMA-Factory's examples/deepspeed, axolotl's deepspeed_configs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tlora_megatron.integrations.deepspeed.config import DeepSpeedConfig, load_deepspeed_config

LOSS_SCALE = {"loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
FP16 = {"enabled": "auto", "initial_scale_power": 16, **LOSS_SCALE}
BATCHES = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"
)
ADAMW = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
WARMUP = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
STAGE_2 = {
    "stage": 2, "allgather_partitions": True, "allgather_bucket_size": 2e8, "overlap_comm": True,
    "reduce_scatter": True, "reduce_bucket_size": 2e8, "contiguous_gradients": True,
}  # fmt: skip
STAGE_3 = {
    "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
    "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True,
}  # fmt: skip
ON_CPU = {"device": "cpu", "pin_memory": True}

HUGGING_FACE = {
    "fp16": {**FP16, "loss_scale_window": 1000},
    "bf16": {"enabled": "auto"},
    "optimizer": ADAMW,
    "scheduler": {"type": "WarmupLR", "params": WARMUP},
    **BATCHES,
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
LLAMA_FACTORY = {
    **BATCHES,
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "fp16": FP16,
    "bf16": {"enabled": "auto"},
}
MONITORS = {
    "comms_config": {"verbose": False},
    "monitor_config": {"enabled": True, "tag": "DeepSpeedMonitor", "csv_monitor": {}},
}
AXOLOTL = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "auto_cast": False, "initial_scale_power": 32, **LOSS_SCALE},
    **BATCHES,
    "gradient_clipping": "auto",
    "wall_clock_breakdown": False,
}

FILES: dict[str, dict[str, Any]] = {
    "Hugging Face, ds_config_zero3.json": HUGGING_FACE
    | {"zero_optimization": STAGE_3 | {"offload_optimizer": ON_CPU, "offload_param": ON_CPU}},
    "Hugging Face, ds_config_zero2.json": HUGGING_FACE
    | {"zero_optimization": STAGE_2 | {"offload_optimizer": ON_CPU}},
    "Hugging Face, WarmupDecayLR": HUGGING_FACE
        | {"zero_optimization": STAGE_2,
     "scheduler": {"type": "WarmupDecayLR", "params": WARMUP | {"total_num_steps": "auto"}}},
    "Hugging Face, of the days of apex": HUGGING_FACE
    | {"amp": {"enabled": "auto", "opt_level": "auto"}, "zero_optimization": STAGE_2},
    "LLaMA-Factory, ds_z0_config.json": LLAMA_FACTORY | MONITORS
        | {"zero_optimization": STAGE_2 | {"stage": 0, "round_robin_gradients": True}},
    "LLaMA-Factory, ds_z2_config.json": LLAMA_FACTORY
    | {"zero_optimization": STAGE_2 | {"round_robin_gradients": True}},
    "LLaMA-Factory, ds_z2_autotp_config.json": LLAMA_FACTORY
        | {"_comment": "supported models: ...", "zero_optimization": STAGE_2,
     "tensor_parallel": {"autotp_size": 2}},
    "LLaMA-Factory, ds_z3_config.json": LLAMA_FACTORY | MONITORS | {"zero_optimization": STAGE_3},
    "LLaMA-Factory, ds_z3_offload_config.json": LLAMA_FACTORY
    | {"zero_optimization": STAGE_3 | {"offload_optimizer": ON_CPU, "offload_param": ON_CPU}},
    "LLaMA-Factory, ds_z3_partial_offload_config.json": LLAMA_FACTORY
        | {"zero_force_ds_cpu_optimizer": True,
     "zero_optimization": STAGE_3 | {"offload_optimizer": {"device": "cpu"}}},
    "LLaMA-Factory, ds_z3_config_gaudi.json": LLAMA_FACTORY
        | {"zero_optimization": STAGE_3 | {"reduce_scatter": False},
     "timers": {"throughput": {"enabled": True, "synchronized": False}}},
    "axolotl, zero1.json": AXOLOTL
    | {"zero_optimization": {"stage": 1, "overlap_comm": True}, "optimizer": ADAMW},
    "axolotl, zero3.json": AXOLOTL | {"zero_optimization": STAGE_3 | {"sub_group_size": 0}},
    "axolotl, zero3_bf16_cpuoffload_all.json": BATCHES
        | {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True,
     "bf16": {"enabled": True},
     "zero_optimization": {"stage": 3, "offload_optimizer": ON_CPU, "offload_param": ON_CPU,
      "sub_group_size": 0, "reduce_bucket_size": "auto", "max_live_parameters": 0,
      "max_reuse_distance": 0, "gather_16bit_weights_on_model_save": True},
     "wall_clock_breakdown": False},
}  # fmt: skip
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("axolotl, zero1_torch_compile.json",
     AXOLOTL | {"compile": {"disable": False, "backend": "inductor"}},
     r"compile\.disable is not a key of DeepSpeed"),
    ("LLaMA-Factory, ds_z3_fp8_config.json",
     {"fp16": {"enabled": False}, "fp8": {"enabled": True, "hysteresis": 2}},
     "fp8 is not a key of DeepSpeed .*, which would ignore it$"),
    ("LLaMA-Factory, ds_z3_alst_config.json",
     {"zero_optimization": STAGE_3, "sequence_parallel": {"enabled": True, "size": 4}},
     "sequence_parallel is not a key"),
    ("Hugging Face, ds_config_zero3.json of before",
     {"fp16": FP16 | {"enabled": True}, "zero_optimization": STAGE_3},
     r"fp16\.enabled must be left out"),
]  # fmt: skip
"""Those that cannot run here: name, content, and what is said."""


def section(**job: Any) -> dict[str, Any]:
    return {
        "base_model": {"path": "base"},
        "run": {"output_dir": "out", "micro_batch_tokens": 4096},
        "jobs": [{"name": "a", "data": {"train": "a.jsonl"}, "max_steps": 9} | job],
    }


def load(folder: Path, document: dict[str, Any], **extra: Any) -> DeepSpeedConfig:
    path = folder / "ds.json"
    path.write_text(json.dumps({"tlora": section()} | document))
    return load_deepspeed_config(path, **extra)
