from __future__ import annotations

import contextlib
import inspect
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.trainer_jit_checkpoint import JITCheckpointCallback as Theirs

from lastcall import errors
from lastcall.adapters.transformers import patch
from lastcall.adapters.transformers.callback import JITCheckpointCallback
from lastcall.core.process import exits
from lastcall.settings import JITCheckpointConfig, PeriodicCheckpointConfig
from lastcall.shield import listening

Make = Callable[..., Any]
HUNG = (
    "_maybe_log_save_evaluate",
    "_evaluate",
    "_run_epoch",
    "_init_training_state",
    "_finalize_training",
    "_save_checkpoint",
)


def kinds(trainer: Any) -> list[type]:
    return [type(callback) for callback in trainer.callback_handler.callbacks]


# ---- the class ---------------------------------------------------------------------------------------------


def test_a_class_is_patched_once_and_looks_as_before(fresh: Any) -> None:
    train, init = fresh.train, fresh.__init__
    patch.apply(fresh, everywhere=False)
    once = fresh.train
    patch.apply(fresh, everywhere=False)
    assert fresh.train is once is not train
    assert inspect.signature(fresh.train) == inspect.signature(train)
    assert inspect.signature(fresh.__init__) == inspect.signature(init)
    assert (fresh.train.__doc__, fresh.train.__name__) == (train.__doc__, "train")


def test_who_asked_for_all_is_not_overruled_by_who_asks_for_one(fresh: Any) -> None:
    patch.protect_all(SimpleNamespace(Trainer=fresh))  # type: ignore[arg-type]
    patch.apply(fresh, everywhere=False)
    assert patch._everywhere


def test_in_a_train_worker_of_ray_a_trainer_is_left_to_rays_adapter(
    fresh: Any, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch.apply(fresh, everywhere=True)
    monkeypatch.setattr(listening, "taken", "Ray Train")
    trainer = make()
    trainer.train()
    assert trainer.state.global_step == 2 and not (Path(trainer.args.output_dir) / ".lastcall").exists()
    monkeypatch.setattr(listening, "taken", "")
    make().train()
    assert (Path(trainer.args.output_dir) / ".lastcall").exists()


# ---- Transformers' own callback ----------------------------------------------------------------------------


def handler(number: int, frame: object) -> None: ...


@pytest.mark.parametrize("everywhere", [True, False])
def test_enable_jit_checkpoint_is_taken_over(fresh: Any, make: Make, everywhere: bool) -> None:
    signal.signal(signal.SIGTERM, handler)
    patch.apply(fresh, everywhere=everywhere)
    trainer = make(enable_jit_checkpoint=True, callbacks=None if everywhere else [JITCheckpointCallback()])
    assert Theirs not in kinds(trainer)
    assert signal.getsignal(signal.SIGTERM) is handler
    assert trainer.args.enable_jit_checkpoint is True  # a script may look at its own arguments


def test_without_us_theirs_is_left_alone(fresh: Any, make: Make) -> None:
    patch.apply(fresh, everywhere=False)
    trainer = make(enable_jit_checkpoint=True)
    assert Theirs in kinds(trainer)
    assert (
        signal.getsignal(signal.SIGTERM)
        == trainer.callback_handler.callbacks[kinds(trainer).index(Theirs)].jit_manager._sigterm_handler
    )


@pytest.mark.parametrize("by", ["variable", "configuration"])
def test_switched_off_theirs_is_left_alone_too(
    fresh: Any, make: Make, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Nobody would protect the run otherwise."""
    patch.apply(fresh, everywhere=False)
    config = JITCheckpointConfig(enabled=False) if by == "configuration" else None
    if by == "variable":
        monkeypatch.setenv("LASTCALL_ENABLED", "0")
    assert Theirs in kinds(make(enable_jit_checkpoint=True, callbacks=[JITCheckpointCallback(config)]))


def test_a_constructor_that_raises_leaves_the_arguments_as_they_were(fresh: Any) -> None:
    patch.apply(fresh, everywhere=True)
    seen = []

    class Arguments:
        enable_jit_checkpoint = True

        def __getattr__(self, name: str) -> Any:
            seen.append(self.enable_jit_checkpoint)
            raise ZeroDivisionError

    arguments = Arguments()
    with pytest.raises(ZeroDivisionError):
        fresh(model=None, args=arguments)
    assert seen[0] is False and arguments.enable_jit_checkpoint is True


def test_theirs_stands_down_where_ours_was_added_later(
    fresh: Any, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    signal.signal(signal.SIGTERM, handler)
    patch.apply(fresh, everywhere=False)
    trainer = make(enable_jit_checkpoint=True)
    assert Theirs in kinds(trainer) and signal.getsignal(signal.SIGTERM) is not handler
    with caplog.at_level(logging.INFO, "lastcall"):
        patch._stand_down(trainer)
    assert Theirs not in kinds(trainer) and signal.getsignal(signal.SIGTERM) is handler
    assert caplog.text.count("Transformers' own callback is disabled") == 1


# ---- switched off ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["variable", "configuration", "no callback"])
def test_switched_off_trainer_is_left_alone(
    fresh: Any, make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by: str
) -> None:
    patch.apply(fresh, everywhere=by == "variable")
    monkeypatch.setattr(patch, "TrainerRun", None)  # whoever makes one fails
    if by == "variable":
        monkeypatch.setenv("LASTCALL_ENABLED", "0")
    signal.signal(signal.SIGTERM, handler)
    trainer = make(
        callbacks=[JITCheckpointCallback(JITCheckpointConfig(enabled=False))]
        if by == "configuration"
        else None
    )
    before = kinds(trainer)
    assert trainer.train().global_step == 2
    assert kinds(trainer) == before and not set(HUNG) & set(vars(trainer))
    assert signal.getsignal(signal.SIGTERM) is handler
    assert not (tmp_path / "out" / ".lastcall").exists()


# ---- one call ----------------------------------------------------------------------------------------------


class Handler:
    def __init__(self) -> None:
        self.callbacks: list[Any] = []

    def on_save(self, args: Any, state: Any, control: Any) -> Any:
        return control


class Pretend:
    """As much of a Trainer as train() is wrapped around."""

    def __init__(self, args: Any = None, callbacks: list[Any] | None = None) -> None:
        self.args = SimpleNamespace(save_total_limit=1)
        self.callback_handler = Handler()
        self.callback_handler.callbacks += callbacks or []
        self.inside: Callable[[Any], Any] = lambda resume: resume

    def add_callback(self, callback: Any) -> None:
        self.callback_handler.callbacks.append(callback)

    def remove_callback(self, callback: Any) -> None:
        self.callback_handler.callbacks.remove(callback)

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **more: Any) -> Any:
        return self.inside(resume_from_checkpoint)

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> Any:
        return "log", tr_loss, grad_norm, args, kwargs

    def _load_callback_state(self) -> None:
        raise AssertionError("not while we do it")

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return "evaluated"

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        return "epoch"

    def _init_training_state(self, max_steps: Any, num: Any, *args: Any) -> Any:
        return "state", max_steps, num

    def _finalize_training(self, trial: Any, samples: Any, start: float) -> Any:
        return "final", start, self.args.save_total_limit

    def _save_checkpoint(self, *args: Any) -> Any:
        raise AssertionError("not while we do it")


class Run:
    """Takes notes of what it is told."""

    made: list[Run] = []
    insisted: list[int] = []
    resumed: int | None = None
    instead: BaseException | None = None

    def __init__(self, trainer: Any, jit: Any, periodic: Any) -> None:
        self.jit, self.periodic = jit, periodic
        self.said: list[Any] = []
        self.over = False
        self.former: dict[str, Any] = {}
        position = SimpleNamespace(
            steps_per_epoch=0, start=None, epoch=lambda *args, **kwargs: contextlib.nullcontext()
        )
        self.subject = SimpleNamespace(position=position)
        self.made.append(self)

    def begin(self, wanted: Any) -> Any:
        self.said.append(("begin", wanted))
        return "chosen"

    def end(self, error: BaseException | None) -> BaseException | None:
        self.said.append(("end", error))
        return self.instead or error

    def after_step(self, grad_norm: Any, learning_rate: Any) -> None:
        self.said.append(("after step", grad_norm, learning_rate))

    def finish(self, start: float) -> float:
        return start - 1.0

    def saved(self, state: Any) -> None:
        self.said.append(("saved", state))

    def __getattr__(self, name: str) -> Any:
        if name not in ("followed_up", "before_evaluation", "save"):
            raise AttributeError(name)
        return lambda: self.said.append(name)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class, patched for all, with a run that only takes notes."""
    monkeypatch.setattr(patch, "_everywhere", False)
    monkeypatch.setattr(patch, "TrainerRun", type("Noting", (Run,), {"made": []}))
    # not on the exit code of the tests
    monkeypatch.setattr(exits, "insist", lambda code: Run.insisted.append(code))
    Run.insisted.clear()
    kind = type("Patched", (Pretend,), {})
    patch.apply(kind, everywhere=True)
    return kind


def noting() -> Any:
    """What `pretend` has put in the place of TrainerRun."""
    return vars(patch)["TrainerRun"]


def made() -> list[Any]:
    found: list[Any] = noting().made
    return found


def test_a_call_goes_on_from_what_was_chosen_and_leaves_nothing_behind(pretend: Any) -> None:
    trainer = pretend()
    seen: list[Any] = []

    def inside(resume: Any) -> str:
        seen.append(
            (
                resume,
                set(HUNG) <= set(vars(trainer)),
                [callback.run for callback in trainer.callback_handler.callbacks],
            )
        )
        return "output"

    trainer.inside = inside
    assert trainer.train("wanted") == "output"
    (run,) = made()
    assert seen == [("chosen", True, [run])]
    assert run.said == [("begin", "wanted"), ("end", None)]
    assert trainer.callback_handler.callbacks == [] and trainer._lastcall_run is None
    assert not set(HUNG) & set(vars(trainer)) and "on_save" not in vars(trainer.callback_handler)


def test_theirs_stands_down_before_our_own_handler_is_installed(
    pretend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """trainer.add_callback(ours), after the constructor has installed theirs: to put back what they found
    must not undo ours."""

    def ours(number: int, frame: object) -> None: ...

    monkeypatch.setattr(noting(), "begin", lambda self, wanted: signal.signal(signal.SIGTERM, ours) and None)
    signal.signal(signal.SIGTERM, handler)
    theirs, trainer = Theirs(), pretend(callbacks=[JITCheckpointCallback()])
    theirs.set_trainer(SimpleNamespace(args=SimpleNamespace(enable_jit_checkpoint=True)))
    trainer.add_callback(theirs)
    trainer.inside = lambda resume: signal.getsignal(signal.SIGTERM)
    assert trainer.train() is ours
    assert theirs not in trainer.callback_handler.callbacks


def test_a_callback_of_the_users_says_how_and_stays(pretend: Any) -> None:
    patch._everywhere = False
    config, periodic = JITCheckpointConfig(grace=9.0, environ={}), PeriodicCheckpointConfig(environ={})
    callback = JITCheckpointCallback(config, periodic)
    trainer = pretend(callbacks=[callback])
    trainer.train()
    assert (made()[0].jit, made()[0].periodic) == (config, periodic)
    assert trainer.callback_handler.callbacks == [callback] and callback.run is None


def test_without_callback_nothing_is_protected_unless_all_are(pretend: Any) -> None:
    patch._everywhere = False
    assert pretend().train("wanted") == "wanted"
    assert made() == []


@pytest.mark.parametrize("error", [ValueError("theirs"), KeyboardInterrupt(), errors.Preempted(75, "saved")])
def test_what_training_raises_comes_out_and_nothing_is_left_behind(
    pretend: Any, error: BaseException
) -> None:
    trainer = pretend()

    def inside(resume: Any) -> None:
        raise error

    trainer.inside = inside
    with pytest.raises(type(error)) as caught:
        trainer.train()
    assert caught.value is error and made()[0].said[-1] == ("end", error)
    assert trainer.callback_handler.callbacks == [] and not set(HUNG) & set(vars(trainer))


def test_what_came_of_it_may_be_raised_instead(pretend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, first = pretend(), ConnectionError("the others have left")
    monkeypatch.setattr(noting(), "instead", errors.Preempted(75, "saved"))

    def inside(resume: Any) -> None:
        raise first

    trainer.inside = inside
    with pytest.raises(errors.Preempted) as caught:
        trainer.train()
    assert caught.value.__cause__ is first
    trainer.inside = lambda resume: "somebody swallowed it"
    with pytest.raises(errors.Preempted):
        trainer.train()


def test_a_run_that_cannot_begin_leaves_nothing_behind(pretend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, wanted: Any) -> None:
        raise errors.BusyError("in use")

    monkeypatch.setattr(noting(), "begin", refuse)
    trainer = pretend()
    with pytest.raises(errors.BusyError):
        trainer.train()
    assert trainer.callback_handler.callbacks == [] and not set(HUNG) & set(vars(trainer))
    assert getattr(trainer, "_lastcall_run", None) is None


def test_a_call_inside_a_call_is_the_same_run(pretend: Any) -> None:
    trainer = pretend()

    def inside(resume: Any) -> Any:
        trainer.inside = lambda again: ("inner", again)
        return trainer.train("again")

    trainer.inside = inside
    assert trainer.train() == ("inner", "again")
    assert len(made()) == 1


def test_a_trial_of_a_search_is_not_protected(pretend: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert pretend().train("wanted", trial=object()) == "wanted"
    assert made() == [] and "Trials of a hyperparameter search are not protected" in caplog.text


def test_what_is_hung_in_does_its_part_and_then_the_classs_own(pretend: Any) -> None:
    trainer = pretend()
    control = SimpleNamespace(should_save=True)
    found: dict[str, Any] = {}

    def inside(resume: Any) -> None:
        found["log"] = trainer._maybe_log_save_evaluate(1.0, 2.0, "model", learning_rate=0.5)
        found["evaluate"] = trainer._evaluate(None, None)
        found["state"] = trainer._init_training_state(10, 4.0)
        found["epoch"] = trainer._run_epoch()
        made()[0].over = True
        found["over"] = trainer._run_epoch()
        found["save"] = trainer._save_checkpoint(None, None)
        found["on_save"] = trainer.callback_handler.on_save(None, "the state", control)
        found["final"] = trainer._finalize_training(None, 8, 100.0)

    trainer.inside = inside
    trainer.train()
    (run,) = made()
    assert found["log"] == ("log", 1.0, 2.0, ("model",), {"learning_rate": 0.5})
    assert (found["evaluate"], found["epoch"], found["over"], found["save"]) == (
        "evaluated",
        "epoch",
        None,
        None,
    )
    assert (found["state"], run.subject.position.steps_per_epoch) == (("state", 10, 4.0), 4)
    assert found["on_save"] is control and control.should_save is False
    # HF would delete what is to be resumed from
    assert found["final"] == ("final", 99.0, None) and trainer.args.save_total_limit == 1
    assert run.said[1:-1] == [
        ("after step", 2.0, 0.5),
        "followed_up",
        "before_evaluation",
        "save",
        ("saved", "the state"),
    ]


def test_a_resumed_run_keeps_its_callbacks_and_does_not_evaluate_at_the_start_again(
    pretend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = pretend()
    found: list[Any] = []
    trainer.inside = lambda resume: found.append(
        (trainer._evaluate(skip_scheduler=True), "_load_callback_state" in vars(trainer))
    )
    trainer.train()
    monkeypatch.setattr(noting(), "resumed", 5)
    trainer.train()
    assert found == [("evaluated", False), (None, True)]
    assert "_load_callback_state" not in vars(trainer)


def test_a_subclass_that_has_its_own_is_called_behind_ours(pretend: Any) -> None:
    class Mine(pretend):  # type: ignore[misc]
        def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
            return "mine", super()._evaluate()

    trainer = Mine()
    trainer.inside = lambda resume: trainer._evaluate()
    assert trainer.train() == ("mine", "evaluated")
    assert made()[0].said[1] == "before_evaluation"
