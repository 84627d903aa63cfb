"""The names of `megatron.training` that `--tlora-config` takes over, and nothing else of it.

Each is wrapped where the trainer looks it up; without the flag a wrapper calls what it wraps. The
trainer's loop, schedules, DDP and logging run as they are.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, Protocol

from tlora_megatron.integrations.megatron_lm.guard import FLAG, check_arguments, check_trainer
from tlora_megatron.parallel.nano.hardware_queues import shown_in_order

logger = logging.getLogger(__name__)

_MARK = "_tlora_hooks"


class Host(Protocol):
    """What the roof does for the hooks, which stand below it."""

    def open_run(self, *args: Any, **kwargs: Any) -> Any:
        """See `session.OpenRun`."""

    def show_summary(self, summary: dict[str, Any]) -> None:
        """Shows how a run ended; on the writer."""

    def fail(self, error: Exception) -> NoReturn:
        """Ends this process over input that can be corrected."""


def install(host: Host) -> None:
    """Hooks the Megatron-LM that is importable, once a process; call it before the script's own
    `from megatron.training import ...`.

    A Megatron-LM that the hooks do not fit is left alone, unless the flag was given.
    """
    try:
        check_trainer()
    except ImportError as error:
        if flag_on_command_line():
            host.fail(error)
        return
    training = importlib.import_module("megatron.training.training")
    if not hasattr(training, _MARK):
        setattr(training, _MARK, True)
        _Hooks(host).install(training)


def flag_on_command_line() -> bool:
    """Whether this process was started with the flag; Megatron has not parsed anything yet."""
    return any(word.split("=")[0] == FLAG for word in sys.argv[1:])


def overlaps_by_command_line() -> bool:
    """Whether the file of the flag that this process was started with asks for nano-batches."""
    words = [word for argument in sys.argv[1:] for word in argument.split("=", 1)]
    return FLAG in words[:-1] and asks_for_nano_batches(words[words.index(FLAG) + 1])


def asks_for_nano_batches(jobs: str) -> bool:
    """Whether a file of jobs does; one that cannot be read is refused where it is needed."""
    from tlora_megatron.config.source import read_document

    try:
        run = read_document(Path(jobs)).get("run")
    except ValueError:
        return False
    return isinstance(run, dict) and run.get("nano_batches", 1) != 1


class _Call(NamedTuple):
    """A call of the trainer's that a hook may change, carry out or answer itself."""

    original: Callable[..., Any]
    bound: inspect.BoundArguments

    @property
    def arguments(self) -> dict[str, Any]:
        """By parameter; a change holds for `proceed`."""
        return self.bound.arguments

    def proceed(self) -> Any:
        """What the trainer's own function does."""
        return self.original(*self.bound.args, **self.bound.kwargs)


class _Hooks:
    """The wrappers and the session they share; there is none without the flag."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.session: Any = None

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
            "get_megatron_optimizer": self._get_optimizer,
            "get_optimizer_param_scheduler": self._get_schedule,
            "build_train_valid_test_data_iterators": self._build_iterators,
            "train_step": self._train_step,
            "training_log": self._training_log,
            "save_checkpoint": self._save_checkpoint,
        }
        for name, hook in in_session.items():
            _wrap(training, name, self._in_session(hook))

    def _in_session(self, hook: Callable[[_Call], Any]) -> Callable[..., Any]:
        """A wrapper that is what it wraps while there is no session."""

        def wrapper(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self.session is None:
                return original(*args, **kwargs)
            return hook(_Call(original, inspect.signature(original).bind(*args, **kwargs)))

        return wrapper

    def _add_arguments(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from tlora_megatron.integrations.megatron_lm.arguments import add_flag

        return add_flag(original(*args, **kwargs))

    def _validate_args(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        parsed = inspect.signature(original).bind(*args, **kwargs).arguments["args"]
        if not getattr(parsed, "tlora_config", None):
            return original(*args, **kwargs)
        from tlora_megatron.integrations.megatron_lm.arguments import settle

        for sentence in settle(parsed):
            logger.info("has no effect with %s: %s", FLAG, sentence)
        with shown_in_order() if asks_for_nano_batches(parsed.tlora_config) else nullcontext():
            result = original(*args, **kwargs)
        with self._input_errors():
            check_arguments(parsed)
        from tlora_megatron.integrations.megatron_lm import local_parts

        # Before the script makes its specs of layers.
        local_parts.install(
            context_parallel=parsed.context_parallel_size > 1,
            sequence_parallel=parsed.sequence_parallel,
        )
        return result

    def _set_up(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from megatron.training.global_vars import get_args

        megatron_args = get_args()
        if not getattr(megatron_args, "tlora_config", None):
            if flag_on_command_line():
                self.host.fail(ValueError(f"{FLAG} must be read by Megatron's own parser"))
            return original(*args, **kwargs)
        with self._input_errors():
            self.session = _open_session(megatron_args, self.host)
        bound = inspect.signature(original).bind(*args, **kwargs).arguments
        model_config: Any = getattr(bound.get("cfg_container"), "model", None)
        if hasattr(model_config, "pre_wrap_hooks"):
            model_config.pre_wrap_hooks.append(self._take_model)
        result = original(*args, **kwargs)
        with self._input_errors():
            self.session.start(result[0])
        return result

    def _take_model(self, chunks: Any) -> Any:
        with self._input_errors():
            self.session.take_model(chunks if isinstance(chunks, list) else [chunks])
        return chunks

    @contextmanager
    def _input_errors(self) -> Iterator[None]:
        """Ends the process with a sentence for what the user can correct."""
        try:
            yield
        except (ValueError, NotImplementedError) as error:
            self.host.fail(error)

    def _get_model(self, call: _Call) -> Any:
        provide = call.arguments["model_provider_func"]
        call.arguments["model_provider_func"] = lambda *a, **k: self._take_model(provide(*a, **k))
        return call.proceed()

    def _get_optimizer(self, call: _Call) -> Any:
        return self.session.optimizer(call.arguments["config"])

    def _get_schedule(self, call: _Call) -> Any:
        from megatron.training.global_vars import get_args
        from megatron.training.training import update_train_iters

        from tlora_megatron.integrations.megatron_lm.job_optimizer import NoSchedule

        update_train_iters(get_args())
        return NoSchedule()

    def _build_iterators(self, call: _Call) -> Any:
        from megatron.core.rerun_state_machine import RerunDataIterator
        from megatron.training.global_vars import get_args

        megatron_args = get_args()
        megatron_args.do_train = megatron_args.train_iters > 0
        megatron_args.do_valid = megatron_args.do_test = False
        return RerunDataIterator(self.session.reader()), None, None

    def _train_step(self, call: _Call) -> Any:
        call.arguments["forward_step_func"] = self.session.forward_step
        return self.session.train_step(call.proceed)

    def _training_log(self, call: _Call) -> Any:
        logged = (call.arguments[name] for name in ("loss_dict", "total_loss_dict", "iteration"))
        self.session.before_log(*logged)
        return call.proceed()

    def _save_checkpoint(self, call: _Call) -> Any:
        return self.session.save(call.arguments["iteration"])

    def _pretrain(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            try:
                result = original(*args, **kwargs)
            except SystemExit as leaving:  # how the trainer ends at --exit-interval and the like
                if not leaving.code:
                    self._finish()
                raise
            self._finish()
            return result
        finally:
            if self.session is not None:
                self.session.close()

    def _finish(self) -> None:
        summary = {} if self.session is None else self.session.finish()
        if summary:
            self.host.show_summary(summary)


def _open_session(megatron_args: Any, host: Host) -> Any:
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
    return Session(megatron_args, settings, host.open_run)


def _wrap(module: ModuleType, name: str, wrapper: Callable[..., Any], *others: ModuleType) -> None:
    """Puts `wrapper(original, ...)` in the place of a function, also where others imported it."""
    original = getattr(module, name)

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    for holder in (module, *others):
        if getattr(holder, name, None) is original:
            setattr(holder, name, hooked)
