"""What is put around `Trainer.train()`.

The class is patched once: `train`, and `__init__` for `enable_jit_checkpoint`. Everything else is hung into
the one trainer that is being trained, for as long as it is: there it is in front of whatever a subclass has
made of it.
"""

from __future__ import annotations

import inspect
import logging
import threading
from types import ModuleType
from typing import Any

from lastcall import errors, settings
from lastcall.adapters.transformers.arguments import redirect
from lastcall.adapters.transformers.callback import JITCheckpointCallback
from lastcall.adapters.transformers.run import TrainerRun
from lastcall.core.process import exits, patching
from lastcall.settings import JITCheckpointConfig
from lastcall.shield import listening

log = logging.getLogger("lastcall")
_NOTHING: Any = object()
_everywhere = False  # every Trainer is protected, and not only one with our callback


def protect_all(module: ModuleType) -> None:
    """For transformers.trainer, from the bootstrap: every Trainer of the process is protected."""
    apply(module.Trainer, everywhere=True)


def apply(trainer: type, *, everywhere: bool) -> None:
    """Patch the class `Trainer`. With `everywhere`, each of its train() calls is protected."""
    global _everywhere
    _everywhere = _everywhere or everywhere
    patching.wrap(trainer, "train", _train)
    patching.wrap(trainer, "__init__", _init)


def _init(original: Any) -> Any:
    signature = inspect.signature(original)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind_partial(self, *args, **kwargs).arguments
        arguments: Any = given.get("args")
        callback = next(filter(_is_ours, given.get("callbacks") or ()), None)
        ours = (_everywhere or callback is not None) and _settings(callback).enabled
        if ours and arguments is not None and not listening.taken:
            redirect(arguments, _settings(callback))  # before the constructor makes the script's folder
        if ours and getattr(arguments, "enable_jit_checkpoint", False):
            # Theirs would take the signal in the constructor. It is put back: a script may look at its own
            # arguments.
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
        jit = _settings(callback)
        # in a train worker of Ray the Trainer is asked to save by Ray's own adapter
        if not jit.enabled or listening.taken:
            return original(*call.args, **call.kwargs)
        if call.arguments.get("trial") is not None:
            log.warning("Trials of a hyperparameter search are not protected")
            return original(*call.args, **call.kwargs)
        added = callback is None
        if callback is None:
            callback = JITCheckpointCallback(jit)
            self.add_callback(callback)
        try:
            return _protected(self, original, call, callback, jit, insist=added)
        finally:
            if added:
                self.remove_callback(callback)

    return train


def _protected(
    trainer: Any,
    original: Any,
    call: inspect.BoundArguments,
    callback: JITCheckpointCallback,
    jit: JITCheckpointConfig,
    *,
    insist: bool,
) -> Any:
    """`insist`: the script does not know of us, so it cannot mean it where it catches how we leave."""
    _stand_down(trainer)  # before our own handler is there: it would be taken away again
    _report_instead(trainer, jit)
    run = TrainerRun(trainer, jit, callback.periodic)
    call.arguments["resume_from_checkpoint"] = run.begin(call.arguments.get("resume_from_checkpoint"))
    callback.run = trainer._lastcall_run = run
    hung = _hang(trainer, run)
    try:
        output = original(*call.args, **call.kwargs)
        error: BaseException | None = None
    except BaseException as raised:
        output, error = None, raised
    finally:
        for target, name, before in hung:
            vars(target).pop(name, None)
            if before is not _NOTHING:
                setattr(target, name, before)
        callback.run = trainer._lastcall_run = None
    left = run.end(error)
    if insist and isinstance(left, errors.Preempted):
        exits.insist(int(left.code or 0))
    if left is not None:
        if left is error:
            raise left
        raise left from error
    return output


def _hang(trainer: Any, run: TrainerRun) -> list[tuple[Any, str, Any]]:
    """Hang our methods into this trainer, in front of its class's and of what a script has hung there itself.
    Returns where, and what was there."""
    former = run.former

    def maybe_log_save_evaluate(tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> Any:
        run.after_step(grad_norm, kwargs.get("learning_rate"))
        result = former["_maybe_log_save_evaluate"](tr_loss, grad_norm, *args, **kwargs)
        run.followed_up()
        return result

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("skip_scheduler") and run.resumed:
            return None  # eval_on_start: it was done when the run started
        run.before_evaluation()
        return former["_evaluate"](*args, **kwargs)

    def run_epoch(*args: Any, **kwargs: Any) -> Any:
        if run.over:
            return None
        with run.subject.position.epoch(*args, **kwargs):
            return former["_run_epoch"](*args, **kwargs)

    def get_batch_samples(*args: Any, **kwargs: Any) -> Any:
        return run.subject.position.take(former["get_batch_samples"], *args, **kwargs)

    def get_eval_dataloader(*args: Any, **kwargs: Any) -> Any:
        loader = former["get_eval_dataloader"](*args, **kwargs)
        run.subject.position.evaluates(loader)
        return loader

    def init_training_state(
        max_steps: Any, num_update_steps_per_epoch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        run.subject.position.steps_per_epoch = int(num_update_steps_per_epoch)
        counted = former["_init_training_state"](max_steps, num_update_steps_per_epoch, *args, **kwargs)
        return run.subject.position.start or counted

    def finalize_training(
        trial: Any, num_train_samples: Any, start_time: float, *args: Any, **kwargs: Any
    ) -> Any:
        start_time = run.finish(start_time)
        limit, arguments = trainer.args.save_total_limit, trainer.args
        if limit == 1:
            arguments.save_total_limit = None  # HF would delete all but the best, also the one to resume from
        try:
            return former["_finalize_training"](trial, num_train_samples, start_time, *args, **kwargs)
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
        "get_eval_dataloader": get_eval_dataloader,
        "_init_training_state": init_training_state,
        "_finalize_training": finalize_training,
        "_save_checkpoint": save_checkpoint,
    }
    if run.resumed is not None:
        # it would put new objects in their places; ours get their state as they are
        methods["_load_callback_state"] = lambda: None
    # versions of Transformers differ
    methods = {name: method for name, method in methods.items() if hasattr(trainer, name)}
    places: list[tuple[Any, str]] = [(trainer, name) for name in (*methods, "_load_rng_state")]
    places.append((trainer.callback_handler, "on_save"))
    hung = [(target, name, vars(target).get(name, _NOTHING)) for target, name in places]
    former.update(
        {
            name: getattr(trainer, name, None)
            for name in (*methods, "_load_rng_state", "_push_from_checkpoint")
        }
    )
    if "_save_checkpoint" in vars(trainer):
        run.subject.save = former["_save_checkpoint"]
    for name, method in methods.items():
        setattr(trainer, name, method)
    trainer.callback_handler.on_save = on_save
    return hung


def _stand_down(trainer: Any) -> None:
    """Transformers' own callback, where a script has switched it on: one of us is enough."""
    if getattr(trainer, "_lastcall_took_over", False):
        log.info("enable_jit_checkpoint is set: lastcall handles it, Transformers' own callback is disabled")
    for callback in list(trainer.callback_handler.callbacks):
        manager = getattr(callback, "jit_manager", None)
        if type(callback).__module__ == "transformers.trainer_jit_checkpoint" and manager is not None:
            log.info(
                "enable_jit_checkpoint is set: lastcall handles it, Transformers' own callback is disabled"
            )
            trainer.remove_callback(callback)
            _put_handler_back(manager)


def _report_instead(trainer: Any, jit: JITCheckpointConfig) -> None:
    """Transformers' report to Kubeflow says 100 % and 0 seconds of a preempted run, and counts the steps
    before a resume as if they had been made since. Two reports of one run would take turns."""
    if settings.status_server() is None or not jit.progress_push:
        return
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback).__name__ == "KubeflowCallback" and type(callback).__module__.startswith(
            "transformers."
        ):
            log.info("lastcall reports progress to Kubeflow; Transformers' own KubeflowCallback is disabled")
            trainer.remove_callback(callback)


def _put_handler_back(manager: Any) -> None:
    import signal

    before = manager._original_sigterm_handler
    if before is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def _callback_of(trainer: Any) -> JITCheckpointCallback | None:
    return next((callback for callback in trainer.callback_handler.callbacks if _is_ours(callback)), None)


def _settings(callback: JITCheckpointCallback | None) -> JITCheckpointConfig:
    return callback.config if callback is not None and callback.config is not None else JITCheckpointConfig()


def _is_ours(callback: Any) -> bool:
    return isinstance(callback, JITCheckpointCallback)
