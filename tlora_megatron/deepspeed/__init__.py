"""Many LoRA jobs at once on one frozen Hugging Face model under DeepSpeed.

    import tlora_megatron.deepspeed

    run = tlora_megatron.deepspeed.initialize(config="ds.json")
    run.train()

`deepspeed` and `torchrun` start the same as `-m tlora_megatron.deepspeed --deepspeed_config F`.
"""

from __future__ import annotations

from tlora_megatron.deepspeed.run import DeepSpeedRun, MultiLoRAEngine, initialize

__all__ = ["DeepSpeedRun", "MultiLoRAEngine", "initialize"]
