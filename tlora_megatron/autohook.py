"""`import tlora_megatron.autohook` as the first line of a script that trains with Megatron-LM.

The script then knows `--tlora-config`; without it everything is as it was.
"""

from __future__ import annotations

from tlora_megatron.launch import install

install()
