"""Trains all jobs of a DeepSpeed config: `deepspeed|torchrun ... -m tlora_megatron.deepspeed`."""

from __future__ import annotations

import argparse
import gc
import json
import logging
from collections.abc import Sequence

from tlora_megatron.cli.main import configure_logging, show_error
from tlora_megatron.cli.tables import global_rank, open_console, print_run
from tlora_megatron.cli.train import RichProgress, add_config_arguments, run_exit_code
from tlora_megatron.ops.kernel_build import build_early
from tlora_megatron.runtime.ranks import join_agent, leave, leave_process_group
from tlora_megatron.training.signals import StopSignals

_FILE = "DeepSpeed's JSON, with a section tlora or a tlora_config"
_EPILOG = """\
examples:
  deepspeed --num_gpus 8 --module tlora_megatron.deepspeed --deepspeed_config ds.json
  torchrun --nproc-per-node 8 -m tlora_megatron.deepspeed --deepspeed_config ds.json \\
      --set jobs.chat.lora.rank=32

exit code: 0 all jobs finished, 1 a job or the run failed, 2 something to correct in the input,
128 + n stopped by signal n (SIGTERM, SIGINT, SIGUSR1): all jobs are saved, run it again to continue
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line (`sys.argv` where None); exit codes are those of `tlora`."""
    parser = argparse.ArgumentParser(
        prog="tlora_megatron.deepspeed",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--deepspeed_config", required=True, metavar="FILE", help=_FILE)
    parser.add_argument("--deepspeed", action="store_true", help="without effect")
    parser.add_argument("--local_rank", type=int, default=0, help="set by DeepSpeed's launcher")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    add_config_arguments(parser)
    args = parser.parse_args(argv)
    configure_logging(logging.INFO if global_rank() == 0 else logging.ERROR)
    build_early()
    try:
        return _train(args)
    except KeyboardInterrupt:
        return 130
    except (ValueError, NotImplementedError) as error:
        show_error(error)
        return 2
    except (RuntimeError, OSError, ImportError) as error:
        show_error(error)
        return 1


def _train(args: argparse.Namespace) -> int:
    from tlora_megatron.deepspeed import initialize

    # DeepSpeed says what it does at every turn; its warnings and errors stay.
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    join_agent()
    is_main = global_rank() == 0
    show = RichProgress(open_console(stderr=args.json)) if is_main else None
    signals = StopSignals(speaks=is_main)
    with signals.install():
        try:
            gc.disable()  # imports and the building of a model leave next to nothing to collect
            engine = initialize(
                config=args.deepspeed_config,
                overrides=args.overrides,
                output_dir=args.output_dir,
                events=show,
                signals=signals,
            )
            gc.enable()
            summary = engine.train()
        finally:
            if show is not None:
                show.close()
        # Not when it fails: a rank that waits here for the others would keep torchrun from ending
        # them.
        leave_process_group()
        if is_main and args.json:
            print(json.dumps(summary, indent=2))
        elif is_main:
            print_run(open_console(), summary, str(engine.loop.output_dir))
    return run_exit_code(summary, signals)


if __name__ == "__main__":
    leave(main())
