"""Runs an unmodified Megatron-LM training script with `--tlora-config`.

    torchrun ... -m tlora_megatron.launch pretrain_gpt.py ARGS --tlora-config jobs.yaml

The script runs as `python pretrain_gpt.py ARGS` would; `tlora_megatron.autohook` does the same for
a script that imports it first. `--cpu` before the script runs it without a GPU, to try it out.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from tlora_megatron.cli.main import configure_logging, show_error, tell_of_misspelt_variables
from tlora_megatron.cli.tables import global_rank, open_console, print_run
from tlora_megatron.config.reader import ConfigError
from tlora_megatron.ops.kernel_build import build_early
from tlora_megatron.parallel.overlap import set_queues
from tlora_megatron.runtime.ranks import free_port, is_lost_connection, join_agent, leave
from tlora_megatron.training.run.determinism import set_environment
from tlora_megatron.training.signals import STOP_SIGNALS, StopSignals

if TYPE_CHECKING:
    from tlora_megatron.training.run.training_run import ShardingResolver

_USAGE = "usage: python -m tlora_megatron.launch [--cpu] SCRIPT [ARGS] --tlora-config FILE"
_CHECKOUT = (
    "Megatron-LM's scripts come with: git clone --depth 1 --branch core_v0.16.1 "
    "https://github.com/NVIDIA/Megatron-LM"
)


class Launcher:
    """`integrations.megatron_lm.hooks.LauncherCallbacks` on this process's console."""

    def __init__(self) -> None:
        self.signals = StopSignals(speaks=global_rank() == 0)
        self._open = ExitStack()

    def take_signals(self) -> None:
        """Takes the signals that stop a run, until the end of the process."""
        self._open.enter_context(self.signals.install())

    def sharding_resolver(self) -> ShardingResolver:
        """Returns the function with which `tlora train` chooses a run's LoRA sharding, too."""
        from tlora_megatron.runtime.choices import resolve_lora_sharding

        return resolve_lora_sharding

    def show_summary(self, summary: dict[str, Any], output_dir: Path) -> None:
        """Prints the table that `tlora train` ends with."""
        print_run(open_console(), summary, str(output_dir))

    def fail(self, error: Exception) -> NoReturn:
        """Ends with exit code 2, like `tlora`, for input that the user can correct."""
        _print_no_stacks()
        show_error(error)
        missing = error.__cause__.name if isinstance(error.__cause__, ImportError) else None
        if (missing or "").startswith("megatron"):
            open_console(stderr=True).print(_CHECKOUT)
        raise SystemExit(2) from error


def install() -> None:
    """Hooks the Megatron-LM on `sys.path`."""
    from tlora_megatron.integrations.megatron_lm import hooks

    _log_once()
    launcher = Launcher()
    if hooks.flag_on_command_line():
        tell_of_misspelt_variables()
        build_early()
        _meet_alone()
        set_queues(overlaps=hooks.overlaps_by_command_line())
        try:
            set_environment(hooks.deterministic_by_command_line())
        except ValueError as error:
            launcher.fail(error)
        join_agent()
        launcher.take_signals()
        sys.excepthook = _explain
    hooks.install(launcher)
    if hooks.flag_on_command_line():
        _print_no_stacks()


def _print_no_stacks() -> None:
    """Undoes what Megatron's import does: each rank would print a stack when it is to end."""
    for number in STOP_SIGNALS:
        handler = signal.getsignal(number)
        faulthandler.unregister(number)
        if handler is not None:
            # It has put back what was there when it was registered.
            signal.signal(number, handler)


def _log_once() -> None:
    configure_logging(logging.INFO if global_rank() == 0 else logging.ERROR)
    # Megatron sets up the root logger, which would show each line once more.
    logging.getLogger("tlora_megatron").propagate = False


def _meet_alone() -> None:
    """Lets one process that no torchrun started be a process group of its own."""
    if "RANK" in os.environ:
        return
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(free_port()))


def _check_script(script: Path) -> None:
    from tlora_megatron.integrations.megatron_lm.hooks import flag_on_command_line
    from tlora_megatron.integrations.megatron_lm.refusals import check_script

    if not flag_on_command_line():
        return
    try:
        check_script(script, sys.argv[1:])
    except ValueError as error:
        Launcher().fail(error)


def _run(script: Path) -> None:
    """Runs the script; with the flag, a package that it misses is named with what to do."""
    from tlora_megatron.integrations.megatron_lm import guard, hooks

    try:
        runpy.run_path(str(script), run_name="__main__")
    except ModuleNotFoundError as error:
        if not hooks.flag_on_command_line():
            raise
        Launcher().fail(guard.missing_package(error))


def _leave_the_gpu_alone() -> None:
    """Has the trainer run on the CPU; its flags that need a GPU are overruled."""
    from tlora_megatron.integrations.megatron import imports
    from tlora_megatron.integrations.megatron_lm import cpu

    _log_once()
    imports.quieten()
    try:
        cpu.install()
    except ImportError as error:
        Launcher().fail(error)
    _meet_alone()
    sys.argv += cpu.FLAGS


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
    on_cpu = words[:1] == ["--cpu"]
    words = words[on_cpu:]
    if not words or not Path(words[0]).is_file():
        got = words[0] if words else "none"
        show_error(
            ConfigError(f"SCRIPT must be an existing file, got {got}; {_USAGE}; {_CHECKOUT}")
        )
        raise SystemExit(2)
    script = Path(words[0])
    sys.argv = words
    _check_script(script)
    # As Python does for a script: its folder holds the checkout's packages.
    sys.path.insert(0, str(script.resolve().parent))
    if on_cpu:
        _leave_the_gpu_alone()
    install()
    _run(script)
    if "tlora_megatron.integrations.megatron_lm.session" in sys.modules:
        leave(0)


if __name__ == "__main__":
    try:
        main()
    except SystemExit as ending:
        if ending.__cause__ is None:
            raise
        leave(2)  # at once, so that torchrun ends the other ranks before they say the same
