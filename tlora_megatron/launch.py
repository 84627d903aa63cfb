"""Runs an unmodified Megatron-LM training script with `--tlora-config`.

    torchrun ... -m tlora_megatron.launch pretrain_gpt.py ARGS --tlora-config jobs.yaml

The script runs as `python pretrain_gpt.py ARGS` would; `tlora_megatron.autohook` does the same for
a script that imports it first.
"""

from __future__ import annotations

import logging
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from tlora_megatron.cli.console import global_rank, open_console
from tlora_megatron.cli.main import configure_logging, show_error
from tlora_megatron.cli.tables import print_run
from tlora_megatron.config.reader import ConfigError
from tlora_megatron.ops.kernel_build import build_early
from tlora_megatron.parallel.nano.hardware_queues import set_queues
from tlora_megatron.runtime.launcher import is_lost_connection, join_agent

if TYPE_CHECKING:
    from tlora_megatron.training.run.training_run import ShardingResolver

_USAGE = "usage: python -m tlora_megatron.launch SCRIPT [ARGS] --tlora-config FILE"


class Launcher:
    """`integrations.megatron_lm.hooks.LauncherCallbacks` on this process's console."""

    def sharding_resolver(self) -> ShardingResolver:
        """Returns the function with which `tlora train` chooses a run's LoRA sharding, too."""
        from tlora_megatron.runtime.lora_sharding import resolve_lora_sharding

        return resolve_lora_sharding

    def show_summary(self, summary: dict[str, Any], output_dir: Path) -> None:
        """Prints the table that `tlora train` ends with."""
        print_run(open_console(), summary, str(output_dir))

    def fail(self, error: Exception) -> NoReturn:
        """Ends with exit code 2, like `tlora`, for input that the user can correct."""
        show_error(error)
        raise SystemExit(2) from error


def install() -> None:
    """Hooks the Megatron-LM on `sys.path`."""
    from tlora_megatron.integrations.megatron_lm import hooks

    configure_logging(logging.INFO if global_rank() == 0 else logging.ERROR)
    if hooks.flag_on_command_line():
        build_early()
        set_queues(overlaps=hooks.overlaps_by_command_line())
        join_agent()
        sys.excepthook = _explain
    hooks.install(Launcher())


def _explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints the trainer's traceback and below it what a lost connection means."""
    sys.__excepthook__(kind, error, trace)
    if isinstance(error, Exception) and is_lost_connection(error):
        show_error(error)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the script that the command line (`sys.argv` where None) names."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["-h"], ["--help"]):
        open_console().print(f"{_USAGE}\n\n{__doc__}", markup=False)
        raise SystemExit(0)
    if not words or not Path(words[0]).is_file():
        got = words[0] if words else "none"
        show_error(ConfigError(f"SCRIPT must be an existing file, got {got}; {_USAGE}"))
        raise SystemExit(2)
    script = Path(words[0])
    sys.argv = words
    # As Python does for a script: its folder holds the checkout's packages.
    sys.path.insert(0, str(script.resolve().parent))
    install()
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
