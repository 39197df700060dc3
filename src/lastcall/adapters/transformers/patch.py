"""What is put around `Trainer.train()`.

The class is patched once: `train`, and `__init__` for `enable_jit_checkpoint`. Everything else is hung into the one trainer that is
being trained, for as long as it is: there it is in front of whatever a subclass has made of it.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from types import ModuleType
from typing import Any

from lastcall.adapters.transformers.callback import JITCheckpointCallback
from lastcall.adapters.transformers.run import TrainerRun
from lastcall.settings import JITCheckpointConfig

log = logging.getLogger("lastcall")
_MARK = "_lastcall_original"
_everywhere = False  # every Trainer is protected, and not only one with our callback


def protect_all(module: ModuleType) -> None:
    """For transformers.trainer, from the bootstrap: every Trainer of the process is protected."""
    apply(module.Trainer, everywhere=True)


def apply(trainer: type, *, everywhere: bool) -> None:
    """Patch the class `Trainer`. With `everywhere`, each of its train() calls is protected."""
    global _everywhere
    _everywhere = _everywhere or everywhere
    if hasattr(trainer.train, _MARK):  # type: ignore[attr-defined]
        return
    for name, wrap in (("train", _train), ("__init__", _init)):
        original = getattr(trainer, name)
        wrapper = functools.wraps(original)(wrap(original))
        setattr(wrapper, _MARK, original)
        setattr(trainer, name, wrapper)


def _init(original: Any) -> Any:
    signature = inspect.signature(original)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind_partial(self, *args, **kwargs).arguments
        arguments: Any = given.get("args")
        ours = _everywhere or any(_is_ours(callback) for callback in given.get("callbacks") or ())
        if ours and getattr(arguments, "enable_jit_checkpoint", False):
            # Theirs would take the signal in the constructor. It is put back: a script may look at its own arguments.
            arguments.enable_jit_checkpoint = False
            try:
                original(self, *args, **kwargs)
            finally:
                arguments.enable_jit_checkpoint = True
            self._lastcall_took_over = True
            return
        original(self, *args, **kwargs)

    return init


def _train(original: Any) -> Any:
    signature = inspect.signature(original)

    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        callback = _callback_of(self)
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        if (callback is None and not _everywhere) or getattr(self, "_lastcall_run", None) is not None:
            return original(*call.args, **call.kwargs)
        jit = callback.config if callback is not None and callback.config is not None else JITCheckpointConfig()
        if not jit.enabled:
            return original(*call.args, **call.kwargs)
        if call.arguments.get("trial") is not None:
            log.warning("A trial of a hyperparameter search is not protected")
            return original(*call.args, **call.kwargs)
        added = callback is None
        if callback is None:
            callback = JITCheckpointCallback(jit)
            self.add_callback(callback)
        try:
            return _protected(self, original, call, callback, jit)
        finally:
            if added:
                self.remove_callback(callback)

    return train


def _protected(
    trainer: Any, original: Any, call: inspect.BoundArguments, callback: JITCheckpointCallback, jit: JITCheckpointConfig
) -> Any:
    run = TrainerRun(trainer, jit, callback.periodic)
    call.arguments["resume_from_checkpoint"] = run.begin(call.arguments.get("resume_from_checkpoint"))
    _stand_down(trainer)
    callback.run = trainer._lastcall_run = run
    hung = _hang(trainer, run)
    try:
        output = original(*call.args, **call.kwargs)
        error: BaseException | None = None
    except BaseException as raised:
        output, error = None, raised
    finally:
        for target, name in hung:
            vars(target).pop(name, None)
        callback.run = trainer._lastcall_run = None
    left = run.end(error)
    if left is not None:
        if left is error:
            raise left
        raise left from error
    return output


def _hang(trainer: Any, run: TrainerRun) -> list[tuple[Any, str]]:
    """Hang our methods into this trainer. Returns where, so that they can be taken out again."""
    kind = type(trainer)

    def maybe_log_save_evaluate(tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> Any:
        run.after_step(grad_norm, kwargs.get("learning_rate"))
        result = kind._maybe_log_save_evaluate(trainer, tr_loss, grad_norm, *args, **kwargs)
        run.followed_up()
        return result

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("skip_scheduler") and run.resumed:
            return None  # eval_on_start: it was done when the run started
        run.before_evaluation()
        return kind._evaluate(trainer, *args, **kwargs)

    def run_epoch(*args: Any, **kwargs: Any) -> Any:
        if run.over:
            return None
        with run.subject.position.epoch(*args, **kwargs):
            return kind._run_epoch(trainer, *args, **kwargs)

    def get_batch_samples(*args: Any, **kwargs: Any) -> Any:
        taken = kind.get_batch_samples(trainer, *args, **kwargs)
        run.subject.position.took(len(taken[0]))
        return taken

    def init_training_state(max_steps: Any, num_update_steps_per_epoch: Any, *args: Any, **kwargs: Any) -> Any:
        run.subject.position.steps_per_epoch = int(num_update_steps_per_epoch)
        counted = kind._init_training_state(trainer, max_steps, num_update_steps_per_epoch, *args, **kwargs)
        return run.subject.position.start or counted

    def finalize_training(trial: Any, num_train_samples: Any, start_time: float, *args: Any, **kwargs: Any) -> Any:
        start_time = run.finish(start_time)
        limit, arguments = trainer.args.save_total_limit, trainer.args
        if limit == 1:
            arguments.save_total_limit = None  # HF would delete all but the best, also the one to resume from
        try:
            return kind._finalize_training(trainer, trial, num_train_samples, start_time, *args, **kwargs)
        finally:
            arguments.save_total_limit = limit

    def save_checkpoint(*args: Any, **kwargs: Any) -> None:
        run.save()

    def on_save(arguments: Any, state: Any, control: Any) -> Any:
        control.should_save = False
        run.saved(state)
        return control

    methods: dict[str, Any] = {
        "_maybe_log_save_evaluate": maybe_log_save_evaluate,
        "_evaluate": evaluate,
        "_run_epoch": run_epoch,
        "get_batch_samples": get_batch_samples,
        "_init_training_state": init_training_state,
        "_finalize_training": finalize_training,
        "_save_checkpoint": save_checkpoint,
    }
    if run.resumed is not None:
        methods["_load_callback_state"] = lambda: None  # it would put new objects in their places; ours get their state as they are
    for name, method in methods.items():
        setattr(trainer, name, method)
    trainer.callback_handler.on_save = on_save
    return [(trainer, name) for name in (*methods, "_load_rng_state")] + [(trainer.callback_handler, "on_save")]


def _stand_down(trainer: Any) -> None:
    """Transformers' own callback, where a script has switched it on: one of us is enough."""
    if getattr(trainer, "_lastcall_took_over", False):
        log.info("enable_jit_checkpoint is set: lastcall takes over, Transformers' own callback stands down")
    for callback in list(trainer.callback_handler.callbacks):
        manager = getattr(callback, "jit_manager", None)
        if type(callback).__module__ == "transformers.trainer_jit_checkpoint" and manager is not None:
            log.info("enable_jit_checkpoint is set: lastcall takes over, Transformers' own callback stands down")
            trainer.remove_callback(callback)
            _put_handler_back(manager)


def _put_handler_back(manager: Any) -> None:
    import signal

    before = manager._original_sigterm_handler
    if before is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def _callback_of(trainer: Any) -> JITCheckpointCallback | None:
    return next((callback for callback in trainer.callback_handler.callbacks if _is_ours(callback)), None)


def _is_ours(callback: Any) -> bool:
    return isinstance(callback, JITCheckpointCallback)
