"""Worker: ranks admit the jobs of a configuration; only the first may load the tokenizer."""

from __future__ import annotations

import sys

import torch.distributed as dist

from tests.helpers.variants import end_world
from tlora_megatron.config.load import load_config
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.training.run import reading
from tlora_megatron.training.run.training_run import check_agreement, content_digest


def main(path: str, *overrides: str) -> None:
    config = load_config(path, overrides, None)
    spec = read_model_spec(config.base_model.config_file)
    dist.init_process_group("gloo")
    if dist.get_rank() > 0:
        reading.load_tokenizer = _refuse
    try:
        jobs = reading.JobAdmission(config, spec, resuming=False)
        jobs.settle()
        check_agreement(config, jobs.prepared)
        names = [job.spec.name for job in jobs.prepared]
        said = f"{names} {jobs.rejected} {content_digest(config, jobs.prepared)}"
    except ValueError as error:
        said = f"refused: {error}"
    # One line at once: the processes share an output.
    sys.stdout.write(f"<{said}>\n")
    sys.stdout.flush()
    end_world()


def _refuse(*_: object) -> None:
    raise AssertionError("only the first process of a node reads")


if __name__ == "__main__":
    main(*sys.argv[1:])
