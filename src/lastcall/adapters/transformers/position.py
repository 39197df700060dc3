"""Where a Trainer stands in its data: the epoch, the batches that it has taken in it, and the position of the
loader itself.

Transformers counts from the number of steps and skips what lies before: a stream without a length is taken
for one epoch without an end, an order that was drawn from a global generator is drawn again, and random
augmentation is drawn with other numbers. Here the loader is followed as in any other loop, and the resumed
epoch continues it: nothing is left for Transformers to skip.

Discarded: skip_first_batches of Accelerate with the randomness put back around it, which never reads what it
skips, so that workers have other random numbers afterwards, or reads all of it.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import transformers.trainer
from accelerate.data_loader import DataLoaderDispatcher  # type: ignore[import-untyped]
from torch.utils.data import IterableDataset

from lastcall import errors
from lastcall.adapters.accelerate import loaders as prepared
from lastcall.adapters.torch.data import loaders as data
from lastcall.adapters.torch.data import position as positions
from lastcall.adapters.torch.data.objects import generators as rng
from lastcall.adapters.torch.randomness.rng import Randomness
from lastcall.adapters.transformers import dispatched
from lastcall.adapters.transformers.dispatched import DispatchedTracker
from lastcall.core.checkpoint.doubts import Doubts

log = logging.getLogger("lastcall")
KIND, VERSION = "trainer", 1
_LOOKED_AT = 4  # fetches from a stream; each look costs about 200 µs
_GENERATORS = ("torch", "python", "numpy")
_hf: Any = transformers.trainer
_RUN_EPOCH = inspect.signature(_hf.Trainer._run_epoch)


class Position:
    """The interface of a tracker, so that it is saved, copied and mailed as the position of any loader is."""

    def __init__(self, trainer: Any) -> None:
        self.worlds: tuple[int, int] | None = None
        self.doubts = Doubts()
        self.steps_per_epoch = 0
        self._trainer = trainer
        self._tracker: data.Tracker | None = None
        self._epoch = 0
        self._batches = 0  # that the training loop has taken in this epoch
        self._over = False  # the epoch was left before its end
        # Transformers has skipped into this epoch on its own: the loader that it made is not the one followed
        self._apart = False
        self._loaded: dict[str, Any] | None = None  # of the former incarnation, until its epoch continues
        self._looks = 0  # fetches still to be looked at
        self._fetched: rng.Parts | None = None  # the generators after the latest of these
        # loaders for evaluations whose persistent workers the former incarnation had
        self._evaluators: set[str] = set()

    # ---- following -----------------------------------------------------------------------------------------

    def follow(self, loader: Any) -> None:
        """The trainer has its loader, and has drawn nothing from it."""
        if self._tracker is not None:
            self._tracker.detach()
        self._tracker = _track(loader)
        if self._tracker is None:
            log.warning(
                "The data comes from a %s, which is not a DataLoader: a resumed run skips as many batches as "
                "were taken, and is exact "
                "only where these are the same each time",
                type(loader).__name__,
            )
            return
        self._tracker.worlds, self._tracker.doubts = self.worlds, self.doubts
        self._tracker.attach()
        if isinstance(getattr(loader, "dataset", None), IterableDataset) and not loader.num_workers:
            self._looks = _LOOKED_AT

    def take(self, fetch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around Trainer.get_batch_samples, with its arguments: all batches of an optimizer step at once."""
        taken = self._looked_at(fetch, *args, **kwargs) if self._looks else fetch(*args, **kwargs)
        self._batches += len(taken[0])
        return taken

    def _looked_at(self, fetch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = rng.take_parts() if self._batches else None
        taken = fetch(*args, **kwargs)
        after = rng.take_parts()
        if before is not None and self._fetched is not None:
            self._look(self._fetched, before, after)
        self._fetched = after
        return taken

    def _look(self, former: rng.Parts, before: rng.Parts, after: rng.Parts) -> None:
        """`former`: after the fetch before this one."""
        self._looks -= 1
        shared = [
            name
            for name, *states in zip(_GENERATORS, former, before, after, strict=True)
            if len(set(states)) == 3
        ]
        if shared:
            self._looks = 0
            log.warning(
                "The stream draws from the global random generator of %s, and so does the training. After an "
                "interruption the stream "
                "is read again from the start of its epoch, with other numbers from that generator: it "
                "continues as it would have, if "
                "its order does not depend on them. Otherwise give the data set a generator of its own for "
                "an exact resume",
                " and of ".join(shared),
            )

    @property
    def ended(self) -> bool:
        """All of the epoch's data was taken, or what is left of it never will be."""
        if self._over or (
            self._tracker is not None and not self._apart and self._batches > 0 and self._tracker.exhausted
        ):
            return True
        if self._batches < self.steps_per_epoch:  # a window has at least one batch
            return False
        window = max(1, self._trainer.args.gradient_accumulation_steps)
        return self.steps_per_epoch > 0 and -(-self._batches // window) >= self.steps_per_epoch

    # ---- evaluations ---------------------------------------------------------------------------------------

    def evaluates(self, loader: Any) -> None:
        """Persistent workers are seeded once, from the generator that the training draws from. Those that
        were there before the interruption are made again behind its back: an uninterrupted run would draw
        nothing now."""
        for name, base in self._eval_loaders():
            if base is getattr(loader, "base_dataloader", loader) and name in self._evaluators:
                self._evaluators.discard(name)
                randomness = Randomness()
                now = randomness.capture()
                base._iterator = base._iterator or base._get_iterator()
                randomness.restore(now)

    def _eval_loaders(self) -> list[tuple[str, Any]]:
        found = getattr(self._trainer, "_eval_dataloaders", {})
        loaders = [
            (str(name), getattr(loader, "base_dataloader", loader)) for name, loader in list(found.items())
        ]
        return [
            (name, loader)
            for name, loader in loaders
            if getattr(loader, "persistent_workers", False) and loader.num_workers
        ]

    # ---- resuming ------------------------------------------------------------------------------------------

    @property
    def start(self) -> tuple[int, int] | None:
        """The epoch to continue, and the batches of it that were taken. None: Transformers' own count has to
        do."""
        loaded = self._loaded
        if loaded is None:
            return None
        return (
            (loaded["epoch"] + 1, 0)
            if loaded["ended"]
            else (loaded["epoch"], 0 if self._anew() else loaded["batches"])
        )

    def _anew(self) -> bool:
        """ignore_data_skip: to find the place costs nothing where data has indices; in a stream, all that
        lies before is read."""
        return bool(self._trainer.args.ignore_data_skip) and isinstance(
            self._trainer.train_dataset, IterableDataset
        )

    def load(self, state: dict[str, Any]) -> None:
        if state.get("kind") != KIND or state.get("version") != VERSION:
            raise errors.CheckpointError(
                f"the saved position in the data is of kind {state.get('kind')!r}: it is not a Trainer's"
            )
        old, new = self.worlds or (1, 1)
        if old != new:
            log.warning(
                "The checkpoint is of %d ranks, and these are %d: the position in the data is the one that "
                "Transformers computes from "
                "the number of steps",
                old,
                new,
            )
            return
        self._loaded = dict(state)
        self._epoch, self._batches, self._over = state["epoch"], state["batches"], state["ended"]
        self._evaluators = set(state["evaluators"])

    def leave(self) -> None:
        """The epoch of the saved position is not resumed from, whatever requested it."""
        if self._loaded is not None:
            self._loaded["ended"] = self._over = True

    def forget(self) -> None:
        """The saved position is that of another run."""
        self._loaded, self._batches, self._epoch, self._over = None, 0, 0, False
        self._evaluators = set()

    @contextlib.contextmanager
    def epoch(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Around Trainer._run_epoch, with its arguments. The first one of a resumed run continues where the
        former incarnation was."""
        given = _RUN_EPOCH.bind(self._trainer, *args, **kwargs).arguments
        number, checkpoint = int(given["epoch"]), given["resume_from_checkpoint"]
        resumed = checkpoint is not None and number == given["epochs_trained"]
        loaded, self._loaded = self._loaded, None
        self._epoch, self._over = number, False
        self._batches = given["steps_trained_in_current_epoch"] if resumed else 0
        usable = resumed and loaded is not None and loaded["loader"] is not None and self._tracker is not None
        self._apart = self._batches > 0 and not usable
        if not usable:
            yield
            return
        assert loaded is not None
        self._put_back(loaded, checkpoint)
        with self._nothing_skipped():
            yield

    @contextlib.contextmanager
    def _nothing_skipped(self) -> Iterator[None]:
        """Transformers counts the batches as skipped, and continues with the loader that it has."""
        arguments, skip = self._trainer.args, _hf.skip_first_batches
        ignored = arguments.ignore_data_skip

        def settle() -> None:
            _hf.skip_first_batches, arguments.ignore_data_skip = skip, ignored

        def skipped(loader: Any, count: int) -> Any:
            settle()
            return loader

        if self._batches:
            _hf.skip_first_batches, arguments.ignore_data_skip = skipped, False
        try:
            yield
        finally:
            if _hf.skip_first_batches is skipped:
                settle()

    def _put_back(self, loaded: dict[str, Any], checkpoint: str) -> None:
        """The loader's position, and the randomness of the boundary: the loader itself sees to what its next
        batch is made with."""
        trainer, tracker = self._trainer, self._tracker
        assert tracker is not None
        trainer._load_rng_state(checkpoint)
        if self._anew() and not loaded["ended"]:
            log.warning(
                "ignore_data_skip is set, and the data is a stream: it starts over in the middle of epoch "
                "%d, %d batches of which were "
                "trained on. Leave it out for an exact resume",
                loaded["epoch"],
                loaded["batches"],
            )
        else:
            if trainer.args.ignore_data_skip and not loaded["ended"]:
                log.info(
                    "ignore_data_skip is set, but the position in the data is kept anyway: that costs "
                    "nothing here"
                )
            tracker.load(_left(loaded["loader"]) if loaded["ended"] else loaded["loader"])
            if isinstance(tracker, DispatchedTracker):
                tracker.go_on(self._batches)
        # it would come after the first batches, which may have drawn from it
        trainer._load_rng_state = lambda checkpoint: None

    # ---- the interface of a tracker ------------------------------------------------------------------------

    def attach(self) -> None:
        """follow() has done it."""

    def detach(self) -> None:
        if self._tracker is not None:
            self._tracker.detach()
            self._tracker = None

    def state(self) -> dict[str, Any]:
        begun = {
            name for name, loader in self._eval_loaders() if getattr(loader, "_iterator", None) is not None
        }
        evaluators = sorted(self._evaluators | begun)
        if self._loaded is not None:
            return {**self._loaded, "evaluators": evaluators}
        tracker, ended = self._tracker, self.ended or bool(self._trainer.control.should_epoch_stop)
        loader = None if tracker is None or self._apart else tracker.state()
        if ended and loader is not None and isinstance(tracker, prepared.AheadTracker):
            # No batch is made again: the position is the one behind all that were, as the next pass finds it.
            loader = {**loader, "base": tracker._inner.state(), "began": None, "randomness": None}
        return {
            "kind": KIND,
            "version": VERSION,
            "epoch": self._epoch,
            "batches": self._batches,
            "ended": ended,
            "evaluators": evaluators,
            "loader": loader,
        }

    @property
    def delivered(self) -> int:
        return self._batches

    @property
    def exhausted(self) -> bool:
        return self.ended


def _track(loader: Any) -> data.Tracker | None:
    if issubclass(type(loader), DataLoaderDispatcher):
        return DispatchedTracker(loader)
    if prepared.is_prepared(loader):
        return prepared.track(loader)
    return data.track(loader) if data.is_loader(loader) else None


def _left(state: dict[str, Any]) -> dict[str, Any]:
    """The position of a pass that is not gone on with: what the next one needs of it."""
    if state.get("kind") == prepared.AHEAD:
        return {**state, "base": _left(state["base"]), "began": None, "randomness": None}
    if state.get("kind") == dispatched.KIND:
        return {**state, "begin": None}
    if state.get("kind") == positions.KIND and state["phase"] == positions.INSIDE:
        return {**state, "phase": positions.LEFT}
    return state
