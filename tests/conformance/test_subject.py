"""What every adapter promises to the core (core/subject.py), asked of each: of a real training that stops
where the test wants it, and whose side thread is the test. Ray's worker brings no subject of its own."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.accelerate.staged_accelerator import AcceleratorLoop
from helpers.core.numbers import Numbers, NumbersLoop
from helpers.core.staged import Staged, content, staged
from helpers.models.staged_torch import PlainLoop, ShardedLoop
from helpers.ranks.thread_ranks import PATIENCE
from helpers.trainer.staged_trainer import TrainerTraining
from lastcall import errors
from lastcall.adapters.accelerate.subject import AcceleratorSubject
from lastcall.adapters.torch import hooks
from lastcall.adapters.torch import subject as torch_subject
from lastcall.adapters.torch.data import loaders
from lastcall.adapters.torch.subject import TorchSubject
from lastcall.adapters.transformers import patch
from lastcall.adapters.transformers.subject import TrainerSubject
from lastcall.core.checkpoint.record import Entry
from lastcall.core.restore.contents import Contents
from lastcall.core.subject import Loading, Stored, Subject, Targets
from lastcall.types import Capture

# what mypy checks here: each is a Subject
SUBJECTS: dict[type[Staged], type[Subject]] = {
    NumbersLoop: Numbers,
    PlainLoop: TorchSubject,
    ShardedLoop: TorchSubject,
    AcceleratorLoop: AcceleratorSubject,
    TrainerTraining: TrainerSubject,
}
NAMES = ["numbers", "torch", "torch-sharded", "accelerate", "trainer"]
KINDS = dict(zip(NAMES, SUBJECTS, strict=True))
ALIKE = ({"torch", "torch-sharded"},)  # each resumes from what the other has saved
PLACES = ("forward", "mutation", "stepped", "boundary")
MIDDLE = 5  # a step inside of the second epoch
ROOM = 64 * 1024  # bytes that a framework's format may add


@pytest.fixture(scope="module", autouse=True)
def _as_it_was_before() -> Iterator[None]:
    """Patches end with this module. And what looks for state that was not handed over need not walk through
    three frameworks for it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loaders, "_kinds", [])
        patched.setattr(patch, "_everywhere", False)
        gc.collect()
        gc.freeze()
        yield
        gc.unfreeze()


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def kind(name: str) -> type[Staged]:
    return KINDS[name]


@pytest.fixture
def training(kind: type[Staged], tmp_path: Path) -> Iterator[Staged]:
    with staged(kind(tmp_path / "run")) as found:
        yield found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Entry]:
    """One of each kind."""
    found: dict[str, Entry] = {}
    for name, kind in KINDS.items():
        with staged(kind(tmp_path_factory.mktemp(name) / "run")) as training:
            training.to_step(MIDDLE)
            found[name] = training.save(training.do(training.subject.capture))
    return found


# ---- where it is -------------------------------------------------------------------------------------------


def test_every_boundary_has_a_number_and_the_state_is_settled_there(training: Staged) -> None:
    subject = training.subject
    assert type(subject) is SUBJECTS[type(training)]
    assert (subject.boundary, subject.ordinal, subject.settled) == ((0, 0), 0, True)
    seen = [subject.boundary]
    while subject.step < MIDDLE:
        before = subject.ordinal
        training.step()
        assert subject.ordinal == before + 1 == sum(subject.boundary)
        assert subject.boundary[0] == subject.step
        assert subject.settled
        seen.append(subject.boundary)
    assert seen == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0)] + (
        [(4, 1), (5, 1)] if training.epochs else [(5, 0)]
    )


def test_a_step_is_not_settled_between_its_mutation_and_its_boundary(training: Staged) -> None:
    subject = training.subject
    training.to_step(2)
    training.until("forward")
    assert (subject.step, subject.settled) == (2, True)
    training.until("stepped")
    assert (subject.step, subject.settled) == (2, False)
    training.step()
    assert (subject.step, subject.settled) == (3, True)


def test_a_mutation_touches_the_state_and_a_boundary_is_untouched(training: Staged) -> None:
    subject = training.subject
    subject.copy_every_boundary()
    training.to_step(2)
    assert subject.untouched()
    for place in ("mutation", "stepped"):
        training.until(place)
        assert not subject.untouched(), place
    training.step()
    assert subject.untouched()


def test_what_it_tells_are_plain_numbers(training: Staged) -> None:
    subject = training.subject
    for _ in range(3):
        training.step()
        seconds, numbers = subject.step_seconds, subject.numbers()
        assert seconds is None or (type(seconds) is float and seconds >= 0)
        assert all(type(name) is str and type(value) is float for name, value in numbers.items())
    assert numbers.keys() == training.reports


# ---- what it holds -----------------------------------------------------------------------------------------


def resumed(training: Staged, digest: str, boundary: tuple[int, int]) -> None:
    assert (training.subject.boundary, training.subject.ordinal) == (boundary, sum(boundary))
    assert training.digest() == digest


def test_what_was_captured_is_restored_and_continues_the_same(kind: type[Staged], tmp_path: Path) -> None:
    with staged(kind(tmp_path / "run")) as first:
        first.to_step(MIDDLE)
        capture = first.do(first.subject.capture)
        assert (capture.step, capture.exact, capture.because) == (MIDDLE, True, "")
        first.save(capture)
        at, digest = first.subject.boundary, first.digest()
        first.step()
        then = first.digest()
    with staged(kind(tmp_path / "run", seed=7)) as second:
        resumed(second, digest, at)
        second.step()
        assert second.digest() == then != digest


def test_the_outline_is_about_as_large_as_the_capture(training: Staged) -> None:
    training.to_step(2)
    outline, capture = training.do(training.subject.outline), training.do(training.subject.capture)
    assert outline.step == capture.step
    assert abs(outline.nbytes - capture.nbytes) <= (ROOM if capture.files else 0)
    if not capture.files:
        assert content(outline).keys() == content(capture).keys()
    assert content(outline)  # the drill compares what it holds


def test_nothing_may_be_rescued_before_there_was_a_boundary(training: Staged) -> None:
    assert training.barred_at_start
    assert training.subject.unrescuable() == ""


def test_a_rescue_has_the_last_completed_step(kind: type[Staged], tmp_path: Path) -> None:
    with staged(kind(tmp_path / "run")) as first:
        first.subject.copy_every_boundary()
        first.to_step(MIDDLE)
        at, digest = first.subject.boundary, first.digest()
        first.until("forward")  # it has drawn, and changed buffers
        assert shut(first)
        assert first.subject.unrescuable() == ""
        capture = first.subject.rescue()
        assert (capture.step, capture.exact, capture.because) == (MIDDLE, True, "")
        first.save(capture)
        assert capture.still()
    with staged(kind(tmp_path / "run", seed=7)) as second:
        resumed(second, digest, at)


def test_a_rescue_between_a_mutation_and_its_boundary_says_that_it_is_not_exact(training: Staged) -> None:
    training.subject.copy_every_boundary()
    training.to_step(2)
    training.until("stepped")
    assert shut(training)
    if not training.subject.unrescuable():
        capture = training.subject.rescue()
        assert not capture.exact and capture.because


def shut(training: Staged) -> bool:
    """The gate, as a rescue finds it."""
    clock = training.context.clock
    return training.context.gate.close(clock, clock.now() + PATIENCE)


def test_what_is_behind_the_gate_stays_as_it_was(training: Staged) -> None:
    training.to_step(2)
    capture, gate = training.do(training.subject.behind_gate), training.context.gate
    before = content(capture)
    gate.shut()
    training.until("forward")
    assert capture.still() and content(capture) == before
    gate.open()
    training.step()
    assert content(capture) == before or not capture.still()


# ---- restore -----------------------------------------------------------------------------------------------


def test_preparing_changes_nothing_and_finishing_restores(
    name: str, training: Staged, checkpoints: dict[str, Entry]
) -> None:
    entry, subject = checkpoints[name], training.subject
    contents = Contents(entry, 0)
    with Unchanged(training):
        loading: Loading = training.do(lambda: subject.prepare(contents.document, contents.stored))
    assert loading.saved_step in (None, entry.record.step)
    assert type(loading.whole) is bool
    wanted = {(group, tensor) for group, tensors in loading.targets.items() for tensor in tensors}
    assert wanted <= {(group, tensor) for group, tensors in contents.stored.items() for tensor in tensors}
    assert bool(contents.plan(loading.targets)) == bool(wanted)
    ours = (".safetensors", ".json")
    assert loading.whole or all(file.name.endswith(ours) for file in entry.record.files), (
        "nothing checks what the framework reads"
    )


def test_a_state_of_another_shape_is_refused_and_changes_nothing(
    name: str, kind: type[Staged], checkpoints: dict[str, Entry], tmp_path: Path
) -> None:
    contents = Contents(checkpoints[name], 0)
    with staged(kind(tmp_path / "run", wide=True)) as training:
        if training.subject.loads_by_itself:
            pytest.skip("the framework compares shapes where it loads them")
        with Unchanged(training), pytest.raises(errors.MismatchError):
            training.do(lambda: training.subject.prepare(contents.document, contents.stored))


def test_files_that_disagree_are_refused_and_change_nothing(
    name: str, training: Staged, checkpoints: dict[str, Entry]
) -> None:
    """In the tensors that are read here: a framework has files of its own."""
    contents = Contents(checkpoints[name], 0)
    targets = training.do(lambda: training.subject.prepare(contents.document, contents.stored)).targets
    for stored in disagreeing(contents.stored, targets):
        with Unchanged(training), pytest.raises((errors.MismatchError, errors.CheckpointError)):
            training.do(lambda stored=stored: training.subject.prepare(contents.document, stored))  # type: ignore[misc]


def disagreeing(stored: Stored, targets: Targets) -> Iterator[Stored]:
    """A tensor of each group is missing, or has another shape than the document says."""
    for group, wanted in targets.items():
        tensors, first = stored[group], next(iter(wanted))
        larger = dataclasses.replace(tensors[first], shape=(*tensors[first].shape, 2))
        yield {**stored, group: {name: found for name, found in tensors.items() if name != first}}
        yield {**stored, group: {**tensors, first: larger}}


def test_what_another_adapter_has_saved_is_refused_and_changes_nothing(
    name: str, training: Staged, checkpoints: dict[str, Entry]
) -> None:
    """It is whole: what is refused as damaged would be set aside."""
    for other in NAMES:
        if other != name and {name, other} not in ALIKE:
            contents = Contents(checkpoints[other], 0)
            with Unchanged(training), pytest.raises(errors.MismatchError):
                training.do(lambda found=contents: training.subject.prepare(found.document, found.stored))  # type: ignore[misc]


class Unchanged:
    """What the script sees, and what would be saved."""

    def __init__(self, training: Staged) -> None:
        self._training = training

    def __enter__(self) -> None:
        self._before = self._now()

    def __exit__(self, *how: object) -> None:
        assert self._now() == self._before

    def _now(self) -> tuple[Any, ...]:
        training = self._training
        capture = training.do(training.subject.outline)
        position = capture.document.get("run", capture.document)
        return training.digest(), training.subject.boundary, json.dumps(position), content(capture)


# ---- what it is asked, from side threads -------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_side_threads_may_ask_at_any_time(training: Staged, place: str) -> None:
    subject = training.subject
    training.to_step(2)
    if place != "boundary":
        training.until(place)
    subject.copy_every_boundary()
    subject.retry_copy()
    subject.stop_at_next_boundary()
    training.until("boundary")
    assert (subject.step, subject.settled, subject.untouched()) == (3, True, True)


def test_a_boundary_is_looked_at_whenever_that_was_asked_for(
    kind: type[Staged], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no copy is affordable, nothing is left to learn, and so nothing else is a reason to look."""
    monkeypatch.setattr(torch_subject, "_CREDIT", -1e9)
    monkeypatch.setattr(torch_subject, "_SHARE", math.inf)
    monkeypatch.setattr(hooks, "_LESSONS", 1)
    with staged(kind(tmp_path / "run")) as training:
        for place in PLACES:
            if place != "boundary":
                training.until(place)
            before = training.subject.ordinal
            training.subject.stop_at_next_boundary()
            training.until("boundary")
            assert training.subject.ordinal == before + 1, place


# ---- many ranks --------------------------------------------------------------------------------------------


@pytest.fixture
def mail(tmp_path: Path) -> Path:
    (tmp_path / "mail").mkdir()
    return tmp_path / "mail"


def test_a_rank_that_joins_writes_into_its_folder_only(kind: type[Staged], mail: Path) -> None:
    with staged(kind(mail.parent / "run", joined=mail)) as training:
        training.to_step(3)
        assert {path.name for path in mail.parent.iterdir()} == {"run", "mail"}
        assert any(mail.iterdir())


def test_a_rank_tells_what_it_shares_and_what_it_does_not(kind: type[Staged], mail: Path) -> None:
    with staged(kind(mail.parent / "run", joined=mail)) as training:
        subject = training.subject
        training.to_step(2)
        for ranks in training.do(subject.holdings):
            assert type(ranks) is tuple and training.rank in ranks and list(ranks) == sorted(set(ranks))
        digest = training.do(subject.unreplicated_digest)
        assert training.do(subject.unreplicated_digest) == digest
        training.step()
        assert digest == "" or training.do(subject.unreplicated_digest) != digest


def test_of_a_killed_rank_is_told_what_it_would_have_saved(kind: type[Staged], mail: Path) -> None:
    left = mail.parent / "left"
    with staged(kind(mail.parent / "dead", seed=1, joined=mail, rank=1)) as dead:
        dead.subject.copy_every_boundary()
        dead.to_step(3)
        theirs = dead.do(dead.subject.capture)
        shutil.copytree(mail, left)
    with staged(kind(mail.parent / "run", joined=mail)) as training:
        shutil.copytree(left, mail, dirs_exist_ok=True)
        training.subject.copy_every_boundary()
        training.to_step(3)
        mine = training.do(training.subject.capture)
        part = training.do(lambda: training.subject.part_of(1, 3, mine))
        assert part is None or (part.step == 3 and bool(part.because) != part.exact)
        if part is not None:
            assert drawn(part) == drawn(theirs) != drawn(mine)
        unknown = training.do(lambda: training.subject.part_of(5, 3, mine))
        assert unknown is None or (unknown.step == 3 and not unknown.exact and unknown.because)


def drawn(capture: Capture) -> object:
    """The randomness, which is each rank's own."""
    run = capture.document["run"]
    assert isinstance(run, dict)
    return run["randomness"]
