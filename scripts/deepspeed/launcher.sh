#!/usr/bin/env bash
# The same with DeepSpeed's own launcher, over the nodes of a hostfile: one line a node, `NAME slots=GPUS`.
#
# usage: scripts/deepspeed/launcher.sh HOSTFILE CONFIG [arguments of tlora_megatron.deepspeed]
set -euo pipefail
hostfile=$1 config=$2
shift 2
deepspeed --hostfile "$hostfile" --module tlora_megatron.deepspeed --deepspeed_config "$config" "$@"
