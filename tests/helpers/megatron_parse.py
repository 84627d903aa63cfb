"""The script of `megatron_lm_cpu.py` that only parses: prints a few of Megatron-LM's arguments."""

from __future__ import annotations

import json

from megatron.training import arguments


def main() -> None:
    args = arguments.parse_args()
    arguments.validate_args(args)
    names = ("num_layers", "tensor_model_parallel_size", "data_parallel_size", "load", "save")
    print(json.dumps({name: getattr(args, name) for name in (*names, "tlora_config")}))


if __name__ == "__main__":
    main()
