"""Wraps the functions of `megatron.training` that `--tlora-config` takes over, and no others.

Each is wrapped where the trainer looks it up; without the flag a wrapper calls what it wraps. The
trainer's loop, schedules, DDP and logging run as they are.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from tlora_megatron import timeline
from tlora_megatron.integrations.megatron_lm.guard import (
    FLAG,
    check_arguments,
    check_trainer,
    missing_package,
)
from tlora_megatron.parallel.overlap import shown_in_order
from tlora_megatron.training.signals import StopSignals, exit_code

if TYPE_CHECKING:
    from tlora_megatron.integrations.megatron_lm.session import Session
    from tlora_megatron.training.run.training_run import ShardingResolver

logger = logging.getLogger(__name__)

_MARK = "_tlora_hooks"


class LauncherCallbacks(Protocol):
    """The parts of the launcher that the hooks call."""

    def sharding_resolver(self) -> ShardingResolver:
        """Returns the function that chooses a run's LoRA sharding."""

    signals: StopSignals
    """The handlers of this process for signals that ask it to stop."""

    def show_summary(self, summary: dict[str, Any], output_dir: Path) -> None:
        """Shows how a run ended; on the writer."""

    def fail(self, error: Exception) -> NoReturn:
        """Ends this process because of input that the user can correct."""


def install(callbacks: LauncherCallbacks) -> None:
    """Hooks the Megatron-LM that is importable, once a process; call it before the script's own
    `from megatron.training import ...`.

    A Megatron-LM that the hooks do not fit is left alone, unless the flag was given.
    """
    try:
        check_trainer()
    except ImportError as error:
        if flag_on_command_line():
            callbacks.fail(error)
        return
    training = importlib.import_module("megatron.training.training")
    if not hasattr(training, _MARK):
        setattr(training, _MARK, True)
        _Hooks(callbacks).install(training)


def flag_on_command_line() -> bool:
    """True if the command line has the flag; Megatron need not have parsed anything yet."""
    return any(word.split("=")[0] == FLAG for word in sys.argv[1:])


def overlaps_by_command_line() -> bool:
    """True if the command line's file of jobs asks for nano-batches, and gets them.

    Transformer Engine's userbuffers keep them off, and want one queue themselves.
    """
    return "--tp-comm-overlap" not in sys.argv and asks_for_nano_batches(_jobs_file())


def deterministic_by_command_line() -> bool:
    """True if the command line's file of jobs sets `run.deterministic`."""
    return _run_section(_jobs_file()).get("deterministic") is True


def asks_for_nano_batches(jobs: str | None) -> bool:
    """True if a file of jobs asks for nano-batches; an unreadable one is refused later."""
    return _run_section(jobs).get("nano_batches", 1) != 1


def _jobs_file() -> str | None:
    """The file of jobs that the command line names."""
    words = [word for argument in sys.argv[1:] for word in argument.split("=", 1)]
    return words[words.index(FLAG) + 1] if FLAG in words[:-1] else None


def _run_section(jobs: str | None) -> dict[str, Any]:
    """The `run` of a file of jobs; empty if there is none or it cannot be read."""
    from tlora_megatron.config.documents import read_document

    if jobs is None:
        return {}
    try:
        run = read_document(Path(jobs)).get("run")
    except ValueError:
        return {}
    return run if isinstance(run, dict) else {}


class _Call(NamedTuple):
    """A call of the trainer, which a hook may change, carry out or answer itself."""

    original: Callable[..., Any]
    bound: inspect.BoundArguments

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by parameter name; `proceed` uses what a hook changes in them."""
        return self.bound.arguments

    def proceed(self) -> Any:
        """Calls the trainer's own function."""
        return self.original(*self.bound.args, **self.bound.kwargs)


class _Hooks:
    """The wrappers and the session that they share; without the flag there is none."""

    def __init__(self, callbacks: LauncherCallbacks) -> None:
        self.callbacks = callbacks
        self.session: Session | None = None

    def install(self, training: ModuleType) -> None:
        """Puts every wrapper in its place."""
        package = importlib.import_module("megatron.training")
        arguments = importlib.import_module("megatron.training.arguments")
        initialize = importlib.import_module("megatron.training.initialize")
        _wrap(arguments, "add_megatron_arguments", self._add_arguments)
        _wrap(arguments, "validate_args", self._validate_args, initialize)
        _wrap(training, "setup_model_and_optimizer", self._set_up)
        _wrap(training, "pretrain", self._pretrain, package)
        in_session = {
            "get_model": self._get_model,
            "get_megatron_optimizer": lambda session, call: session.optimizer(
                call.arguments["config"]
            ),
            "get_optimizer_param_scheduler": self._get_schedule,
            "load_checkpoint": self._load_checkpoint,
            "build_train_valid_test_data_iterators": self._build_iterators,
            "train_step": self._train_step,
            "training_log": self._training_log,
            "save_checkpoint": lambda session, call: session.save(call.arguments["iteration"]),
        }
        for name, hook in in_session.items():
            _wrap(training, name, self._in_session(hook))

    def _in_session(self, hook: Callable[[Session, _Call], Any]) -> Callable[..., Any]:
        """Makes a wrapper that calls the hook, or the original while there is no session."""

        def wrapper(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self.session is None:
                return original(*args, **kwargs)
            call = _Call(original, inspect.signature(original).bind(*args, **kwargs))
            return hook(self.session, call)

        return wrapper

    def _add_arguments(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from tlora_megatron.integrations.megatron_lm.arguments import add_flag

        return add_flag(original(*args, **kwargs))

    def _validate_args(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        parsed = inspect.signature(original).bind(*args, **kwargs).arguments["args"]
        if not getattr(parsed, "tlora_config", None):
            return original(*args, **kwargs)
        from tlora_megatron.integrations.megatron_lm import experts
        from tlora_megatron.integrations.megatron_lm.refusals import explain_arguments

        with self._input_errors():
            settle(parsed, sys.argv[1:])
            with shown_in_order() if asks_for_nano_batches(parsed.tlora_config) else nullcontext():
                try:
                    result = original(*args, **kwargs)
                except (AssertionError, ValueError, RuntimeError, ImportError) as error:
                    raise explain_arguments(error) from error
            check_arguments(parsed)
        # Before the script makes its specs of layers.
        experts.install(
            context_parallel=parsed.context_parallel_size > 1,
            sequence_parallel=parsed.sequence_parallel,
        )
        return result

    def _set_up(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from megatron.training.global_vars import get_args

        megatron_args = get_args()
        if not getattr(megatron_args, "tlora_config", None):
            if flag_on_command_line():
                self.callbacks.fail(ValueError(f"{FLAG} must be read by Megatron's own parser"))
            return original(*args, **kwargs)
        with self._input_errors():
            session = self.session = _open_session(megatron_args, self.callbacks)
        bound = inspect.signature(original).bind(*args, **kwargs).arguments
        model_config: Any = getattr(bound.get("cfg_container"), "model", None)
        if hasattr(model_config, "pre_wrap_hooks"):
            model_config.pre_wrap_hooks.append(functools.partial(self._take_model, session))
        with timeline.phase("base"):
            result = original(*args, **kwargs)
        with self._input_errors():
            session.start(result[0])
        return result

    def _take_model(self, session: Session, chunks: Any) -> Any:
        with self._input_errors():
            session.take_model(chunks if isinstance(chunks, list) else [chunks])
        return chunks

    @contextmanager
    def _input_errors(self) -> Iterator[None]:
        """Ends the process with a sentence for what the user can correct."""
        try:
            yield
        except (ValueError, NotImplementedError) as error:
            self.callbacks.fail(error)

    def _get_model(self, session: Session, call: _Call) -> Any:
        provide = call.arguments["model_provider_func"]
        call.arguments["model_provider_func"] = lambda *args, **kwargs: self._take_model(
            session, provide(*args, **kwargs)
        )
        return call.proceed()

    def _get_schedule(self, session: Session, call: _Call) -> Any:
        from megatron.training.training import update_train_iters

        from tlora_megatron.integrations.megatron_lm.engine import NoSchedule

        update_train_iters(session.args)
        return NoSchedule()

    def _build_iterators(self, session: Session, call: _Call) -> Any:
        from megatron.core.rerun_state_machine import RerunDataIterator

        session.args.do_train = session.args.train_iters > 0
        session.args.do_valid = session.args.do_test = False
        return RerunDataIterator(session.feed.reader()), None, None

    def _load_checkpoint(self, session: Session, call: _Call) -> Any:
        from torch.distributed.checkpoint.api import CheckpointException

        from tlora_megatron.integrations.megatron_lm.refusals import explain_loading

        try:
            return call.proceed()
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            explained = explain_loading(error, session.args)
            if explained is None:
                raise
            self.callbacks.fail(explained)

    def _train_step(self, session: Session, call: _Call) -> Any:
        call.arguments["forward_step_func"] = session.engine.forward_step
        return session.train_step(call.proceed)

    def _training_log(self, session: Session, call: _Call) -> Any:
        session.before_log(call.arguments)
        return call.proceed()

    def _pretrain(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        timeline.begin_run()
        try:
            try:
                result = original(*args, **kwargs)
            except SystemExit as leaving:  # how the trainer ends at --exit-interval and the like
                if leaving.code:
                    raise
                self._finish()
                # With --exit-signal-handler the trainer itself has stopped by the signal.
                number = self.callbacks.signals.received
                raise SystemExit(exit_code(number) if number else leaving.code) from None
            except ImportError as error:  # what a model or a layout needs beyond the trainer
                if self.session is None:
                    raise
                is_absent = isinstance(error, ModuleNotFoundError)
                self.callbacks.fail(missing_package(error) if is_absent else error)
            self._finish()
            if number := self.callbacks.signals.stopped_by:
                raise SystemExit(exit_code(number))
            return result
        finally:
            if self.session is not None:
                self.session.close()

    def _finish(self) -> None:
        if self.session is None:
            return
        summary = self.session.finish()
        if summary:
            self.callbacks.show_summary(summary, self.session.output_dir)


def settle(parsed: Any, words: Sequence[str]) -> None:
    """Refuses what Megatron would not say well, and sets what follows from the flag.

    Args:
        parsed: Megatron's arguments, not validated.
        words: the command line, whose flags without effect are logged in one line.
    """
    from tlora_megatron.integrations.megatron_lm.arguments import resolve_arguments
    from tlora_megatron.integrations.megatron_lm.refusals import (
        check_parsed,
        describe_unused,
        detect_format,
    )

    check_parsed(parsed)
    resolve_arguments(parsed)
    if unused := "; ".join(filter(None, (describe_unused(words), detect_format(parsed)))):
        logger.info("without effect beside %s: %s", FLAG, unused)


def _open_session(megatron_args: Any, callbacks: LauncherCallbacks) -> Session:
    from megatron.training.checkpointing import checkpoint_exists
    from megatron.training.global_vars import get_tokenizer

    from tlora_megatron.integrations.megatron_lm.arguments import launch_settings
    from tlora_megatron.integrations.megatron_lm.session import Session

    settings = launch_settings(megatron_args, tokenizer_size=get_tokenizer().vocab_size)
    sources = (megatron_args.load, megatron_args.pretrained_checkpoint)
    if not settings.config.base_model.random_init and not any(map(checkpoint_exists, sources)):
        raise ValueError(
            f"--load or --pretrained-checkpoint must hold a Megatron checkpoint of the base with "
            f"{FLAG}, got {sources[0]} and {sources[1]}; `tlora convert` writes one, and "
            f"base_model.random_init: true trains over random weights"
        )
    return Session(megatron_args, settings, callbacks.sharding_resolver(), callbacks.signals)


def _wrap(module: ModuleType, name: str, wrapper: Callable[..., Any], *others: ModuleType) -> None:
    """Puts `wrapper(original, ...)` in the place of a function, also where others imported it."""
    original = getattr(module, name)

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    for holder in (module, *others):
        if getattr(holder, name, None) is original:
            setattr(holder, name, hooked)
