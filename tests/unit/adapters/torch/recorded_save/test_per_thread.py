from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from lastcall import errors
from lastcall.adapters.torch.recorded_save import per_thread
from lastcall.adapters.torch.recorded_save.per_thread import answering, recording_alone, shadowed


@pytest.fixture
def elsewhere() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Calls a function on another thread."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda function: pool.submit(function).result(30)


Elsewhere = Callable[[Callable[[], Any]], Any]
ME = threading.get_ident


class Thing:
    def hello(self, name: str = "you") -> str:
        return f"hello {name}"


# ---- functions ---------------------------------------------------------------------------------------------


def test_other_threads_see_the_original(elsewhere: Elsewhere) -> None:
    thing = Thing()
    with shadowed(thing, "hello", lambda name="you": f"bye {name}", ME()):
        assert (thing.hello("me"), elsewhere(lambda: thing.hello("me"))) == ("bye me", "hello me")
        assert (thing.hello(name="x"), elsewhere(lambda: thing.hello(name="x"))) == ("bye x", "hello x")
        assert Thing().hello() == "hello you"  # and so do other objects
    assert (thing.hello(), vars(thing)) == ("hello you", {})


def test_the_owner_may_be_another_thread(elsewhere: Elsewhere) -> None:
    thing = Thing()
    with shadowed(thing, "hello", lambda: "bye", elsewhere(ME)):
        assert (thing.hello(), elsewhere(thing.hello)) == ("hello you", "bye")


@pytest.mark.parametrize("where", ["object", "module", "class"])
def test_what_was_in_the_place_is_there_again(where: str) -> None:
    def mine() -> str:
        return "mine"

    targets = {"object": Thing(), "module": types.ModuleType("made"), "class": type("Made", (), {})}
    target: Any = targets[where]
    target.hello = mine
    with shadowed(target, "hello", lambda: "bye", ME()):
        assert target.hello is not mine
    assert target.hello is mine


def test_one_inside_another_and_each_undoes_its_own(elsewhere: Elsewhere) -> None:
    thing = Thing()
    with shadowed(thing, "hello", lambda: "outer", ME()):
        with shadowed(thing, "hello", lambda: "inner", ME()):
            assert (thing.hello(), elsewhere(thing.hello)) == ("inner", "hello you")
        assert (thing.hello(), elsewhere(thing.hello)) == ("outer", "hello you")
    assert (thing.hello(), vars(thing)) == ("hello you", {})


def test_two_threads_one_inside_the_other_have_each_their_own(elsewhere: Elsewhere) -> None:
    thing = Thing()
    with (
        shadowed(thing, "hello", lambda: "mine", ME()),
        shadowed(thing, "hello", lambda: "theirs", elsewhere(ME)),
    ):
        assert (thing.hello(), elsewhere(thing.hello)) == ("mine", "theirs")
    assert vars(thing) == {}


def test_an_exception_passes_and_leaves_nothing_behind() -> None:
    thing = Thing()
    with pytest.raises(ZeroDivisionError):
        with shadowed(thing, "hello", lambda: 1 // 0, ME()):
            thing.hello()
    assert vars(thing) == {}
    with pytest.raises(AttributeError):
        with shadowed(thing, "nothing", print, ME()):
            raise AssertionError("there is nothing to shadow")
    assert vars(thing) == {}


def test_a_reference_that_was_taken_meanwhile_ends_with_its_thread_s_own_view(elsewhere: Elsewhere) -> None:
    """A library may keep what it found: for every other thread that is the original, for good."""
    thing = Thing()
    with shadowed(thing, "hello", lambda: "bye", ME()):
        kept = thing.hello
    assert elsewhere(kept) == "hello you"


# ---- properties and plain attributes -----------------------------------------------------------------------


@dataclass
class Arguments:
    folder: str = "default"
    number: int = 1

    @property
    def should_save(self) -> bool:
        return self.number == 0


class Special(Arguments):
    pass


def test_a_property_answers_for_one_thread(elsewhere: Elsewhere) -> None:
    arguments, before = Arguments(), vars(Arguments)["should_save"]
    with answering(Arguments, "should_save", True, ME()):
        assert (arguments.should_save, elsewhere(lambda: arguments.should_save)) == (True, False)
        arguments.number = 0
        assert elsewhere(lambda: arguments.should_save) is True
    assert vars(Arguments)["should_save"] is before


def test_a_plain_attribute_does_too_and_objects_keep_their_values(elsewhere: Elsewhere) -> None:
    one, other = Arguments("one"), Arguments("other")
    with answering(Arguments, "folder", "scratch", ME()):
        assert (one.folder, other.folder) == ("scratch", "scratch")
        assert elsewhere(lambda: (one.folder, other.folder)) == ("one", "other")
        made = elsewhere(lambda: Arguments("made"))
        assert elsewhere(lambda: made.folder) == "made"
    assert (one.folder, other.folder, made.folder, Arguments.folder, Arguments().folder) == (
        "one",
        "other",
        "made",
        "default",
        "default",
    )


def test_what_another_thread_sets_meanwhile_stays(elsewhere: Elsewhere) -> None:
    arguments = Arguments("one")
    with answering(Arguments, "folder", "scratch", ME()):
        elsewhere(lambda: setattr(arguments, "folder", "two"))
        assert (arguments.folder, elsewhere(lambda: arguments.folder)) == ("scratch", "two")
    assert arguments.folder == "two"


def test_an_attribute_that_only_objects_have(elsewhere: Elsewhere) -> None:
    thing: Any = Thing()
    thing.colour = "red"
    with answering(Thing, "colour", "blue", ME()):
        assert (thing.colour, elsewhere(lambda: thing.colour)) == ("blue", "red")
    assert thing.colour == "red" and not hasattr(Thing, "colour")


def test_a_subclass_finds_it_where_its_base_has_it(elsewhere: Elsewhere) -> None:
    special = Special("mine")
    with answering(Special, "should_save", True, ME()), answering(Special, "folder", "scratch", ME()):
        assert (special.should_save, special.folder) == (True, "scratch")
        assert elsewhere(lambda: (special.should_save, special.folder)) == (False, "mine")
    assert {"should_save", "folder"}.isdisjoint(vars(Special))
    assert (special.should_save, special.folder) == (False, "mine")


def test_answers_can_be_nested_and_end_with_an_exception(elsewhere: Elsewhere) -> None:
    arguments = Arguments("one")
    with pytest.raises(ZeroDivisionError):
        with answering(Arguments, "folder", "outer", ME()):
            with answering(Arguments, "folder", "inner", ME()):
                assert (arguments.folder, elsewhere(lambda: arguments.folder)) == ("inner", "one")
            assert (arguments.folder, elsewhere(lambda: arguments.folder)) == ("outer", "one")
            raise ZeroDivisionError
    assert (arguments.folder, vars(Arguments)["folder"]) == ("one", "default")


# ---- one at a time -----------------------------------------------------------------------------------------


def test_one_thread_at_a_time_records(elsewhere: Elsewhere) -> None:
    order: list[str] = []

    def second() -> None:
        with recording_alone():
            order.append("second")

    with recording_alone():
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.1)
        order.append("first")
    thread.join(30)
    assert order == ["first", "second"]


def test_who_has_waited_long_enough_is_told_and_nothing_is_let_go(
    elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(per_thread, "_PATIENCE", 0.05)

    def second() -> None:
        with recording_alone():
            raise AssertionError("two at once")

    with recording_alone():
        for _ in range(2):  # who was refused has not opened the door for the next
            with pytest.raises(errors.SaveError, match="does not end"):
                elsewhere(second)
    with recording_alone():
        pass


def test_an_exception_lets_the_next_one_in() -> None:
    with pytest.raises(ZeroDivisionError):
        with recording_alone():
            raise ZeroDivisionError
    with recording_alone():
        pass
