from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lastcall import errors
from lastcall.adapters.torch.randomness import mersenne, rng


@pytest.fixture(autouse=True)
def _same_randomness_afterwards() -> Iterator[None]:
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)


def draw() -> list[Any]:
    return [
        random.random(),
        random.gauss(0, 1),
        random.getrandbits(70),
        np.random.rand(),
        np.random.standard_normal(),
        np.random.randint(1 << 30),
        torch.rand(2).tolist(),
        torch.randn(3).tolist(),
    ]


def seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


@pytest.mark.parametrize("draws", range(4))
def test_what_is_drawn_after_a_restore_is_what_was_drawn_after_the_capture(draws: int) -> None:
    randomness = rng.Randomness()
    seed(draws)
    for _ in range(draws):
        random.gauss(0, 1)
        np.random.standard_normal()
        torch.randn(3)
    captured = randomness.capture()
    wanted = draw() + draw()
    randomness.restore(captured)
    assert draw() + draw() == wanted


def test_a_capture_survives_json_bit_for_bit() -> None:
    randomness = rng.Randomness()
    random.gauss(0, 1)
    np.random.standard_normal()
    document = json.loads(json.dumps(randomness.to_document(randomness.capture()), allow_nan=False))
    wanted = draw()
    seed(99)
    rng.Randomness().restore(rng.Randomness().from_document(document))
    assert draw() == wanted


def test_a_capture_does_not_change_afterwards() -> None:
    randomness = rng.Randomness()
    captured = randomness.capture()
    before = randomness.to_document(captured)
    draw()
    torch.rand(10_000)
    assert randomness.to_document(captured) == before


def test_the_raw_words_are_read_here_and_equal_the_official_ones() -> None:
    python, numpy = mersenne.Python(), mersenne.Numpy()
    for _ in range(5):
        draw()
        words = python.read().words()
        version, state, gauss = random.getstate()
        assert version == 3 and (list(np.frombuffer(words.key, np.uint32)), words.pos) == (
            [*state[:624]],
            state[624],
        )
        assert words.gauss == gauss
        read = numpy.read()
        assert isinstance(read, mersenne.NumpyRaw)
        _, key, pos, has, spare = np.random.get_state()
        assert (read.words().key, read.words().pos) == (key.tobytes(), pos)  # type: ignore[attr-defined]
        assert read.words().gauss == (spare if has else None)
    assert python.view is not None and numpy.view is not None, (
        "the official getters were used: slower than promised"
    )


def test_the_official_getters_serve_where_the_raw_words_are_not_where_they_are_thought_to_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mersenne, "_HEAD", mersenne._HEAD + 8)
    monkeypatch.setattr(mersenne, "_find_spare", lambda np: 0)
    randomness = rng.Randomness()
    captured = randomness.capture()
    assert (
        randomness._python.view is None and randomness._numpy is not None and randomness._numpy.view is None
    )
    wanted = draw()
    randomness.restore(captured)
    assert draw() == wanted


def test_an_interpreter_that_was_not_tested_has_its_generators_copied_officially_and_a_line_each(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lastcall")
    monkeypatch.setattr(mersenne, "untested", lambda: "cpython 3.15")
    monkeypatch.setattr(mersenne, "at", lambda address, nbytes: pytest.fail("its memory was read"))
    mersenne._explain.cache_clear()
    randomness = rng.Randomness()
    captured = randomness.capture()
    mersenne._explain.cache_clear()
    wanted = draw()
    randomness.restore(captured)
    assert draw() == wanted
    python, numpy = caplog.messages
    assert "of python is copied" in python and "of numpy is copied" in numpy
    assert all(line.endswith("lastcall was not tested with cpython 3.15") for line in (python, numpy))


def test_the_spare_normal_number_of_numpy_is_followed_when_it_is_used_up() -> None:
    numpy = mersenne.Numpy()
    np.random.seed(3)
    np.random.standard_normal()
    with_spare = numpy.read()
    np.random.standard_normal()  # takes the spare one; the words do not move
    without = numpy.read()
    assert isinstance(with_spare, mersenne.NumpyRaw) and isinstance(without, mersenne.NumpyRaw)
    assert with_spare.raw == without.raw
    assert with_spare.words().gauss is not None and without.words().gauss is None


def test_another_bit_generator_of_numpy_is_carried_too() -> None:
    randomness = rng.Randomness()
    randomness.capture()
    original = np.random.get_bit_generator()  # type: ignore[attr-defined]
    try:
        for make in (np.random.PCG64, np.random.Philox, np.random.SFC64):
            np.random.set_bit_generator(make(5))  # type: ignore[attr-defined]
            np.random.standard_normal()
            document = json.loads(json.dumps(randomness.to_document(randomness.capture()), allow_nan=False))
            wanted = np.random.standard_normal(5).tolist() + np.random.rand(3).tolist()
            randomness.restore(randomness.from_document(document))
            assert np.random.standard_normal(5).tolist() + np.random.rand(3).tolist() == wanted
    finally:
        np.random.set_bit_generator(original)  # type: ignore[attr-defined]


def test_a_state_of_another_bit_generator_is_a_mismatch_that_names_the_remedy() -> None:
    randomness = rng.Randomness()
    original = np.random.get_bit_generator()  # type: ignore[attr-defined]
    try:
        np.random.set_bit_generator(np.random.PCG64(5))  # type: ignore[attr-defined]
        captured = randomness.capture()
    finally:
        np.random.set_bit_generator(original)  # type: ignore[attr-defined]
    with pytest.raises(errors.MismatchError, match="set_bit_generator"):
        randomness.restore(captured)


def test_numpy_is_left_alone_when_it_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "numpy")
    randomness = rng.Randomness()
    captured = randomness.capture()
    assert captured.numpy is None
    monkeypatch.undo()
    assert randomness.from_document(randomness.to_document(captured)).numpy is None


def damaged() -> dict[str, Any]:
    randomness = rng.Randomness()
    good = randomness.to_document(randomness.capture())
    python: Any = good["python"]
    return {
        "nothing": {},
        "no object": 7,
        "short key": {**good, "python": {**python, "key": "AAAA"}},
        "no base64": {**good, "python": {**python, "key": "!!"}},
        "position outside": {**good, "python": {**python, "pos": 625}},
        "position that is no number": {**good, "python": {**python, "pos": "1"}},
        "spare number that is none": {**good, "python": {**python, "gauss": "x"}},
        "torch state too short": {**good, "torch": "AAAA"},
        "cuda state too long": {**good, "cuda": [good["torch"]]},
        "numpy a list": {**good, "numpy": [1]},
        "numpy with objects": {
            **good,
            "numpy": {"bit_generator": "PCG64", "state": {"array": [1], "dtype": "O"}},
        },
        "numpy with a list inside": {**good, "numpy": {"bit_generator": "PCG64", "state": {"state": [1]}}},
        "numpy with words that are none": {
            **good,
            "numpy": {"bit_generator": "PCG64", "state": {"hex": "xyz"}},
        },
    }


@pytest.mark.parametrize("which", damaged())
def test_a_damaged_document_is_refused_before_anything_is_set(which: str) -> None:
    with pytest.raises(errors.CheckpointError):
        rng.Randomness().from_document(damaged()[which])


def test_a_new_rank_draws_other_numbers_than_the_rank_it_was_made_from_and_the_same_each_time() -> None:
    randomness = rng.Randomness()
    seed(7)
    captured = randomness.capture()
    drawn: dict[Any, Any] = {}
    for rank in (0, 2, 3, 2):
        forked = captured if rank == 0 else randomness.forked(captured, rank)
        randomness.restore(randomness.from_document(json.loads(json.dumps(randomness.to_document(forked)))))
        numbers = draw()
        assert drawn.setdefault(rank, numbers) == numbers
    for kind in range(len(drawn[0])):
        assert len({repr(numbers[kind]) for numbers in drawn.values()}) == 3


@pytest.mark.parametrize("kind", ["PCG64", "Philox", "SFC64"])
def test_another_generator_of_numpy_is_made_anew_as_what_it_is(kind: str) -> None:
    state = {name: mersenne._plain(np, value) for name, value in getattr(np.random, kind)(1).state.items()}
    made = mersenne.seeded(state, 5)
    assert isinstance(made, dict) and made["bit_generator"] == kind and made != state
    assert mersenne.checked(made) == made
    assert mersenne.seeded({"bit_generator": "Mine"}, 5) == {"bit_generator": "Mine"}


def test_the_devices_of_a_new_rank_have_seeds_of_their_own() -> None:
    randomness = rng.Randomness()
    state = torch.zeros(16, dtype=torch.uint8)
    one, other = randomness.forked(randomness.capture()._replace(cuda=(state, state)), 4).cuda
    assert one.nbytes == other.nbytes == 16 and not torch.equal(one, other)


# ---- for the official setters ------------------------------------------------------------------------------


def set_officially(found: dict[str, Any]) -> None:
    random.setstate(found["python"])
    np.random.set_state(found["numpy"])
    torch.set_rng_state(found["cpu"])


@pytest.mark.parametrize("draws", [0, 1, 2])
def test_the_official_setters_take_what_a_capture_becomes(draws: int) -> None:
    randomness = rng.Randomness()
    seed(5)
    for _ in range(draws):
        draw()
        random.gauss(0, 1)  # an odd number of them: the generators hold a spare one
        np.random.standard_normal()
    found = rng.official(randomness.capture())
    assert set(found) == {"python", "numpy", "cpu"}
    assert found["python"] == random.getstate()
    kind, key, *rest = np.random.get_state()
    assert (found["numpy"][0], list(found["numpy"][1]), [*found["numpy"][2:]]) == (kind, list(key), rest)
    assert torch.equal(found["cpu"], torch.get_rng_state())
    wanted = draw()
    seed(6)
    set_officially(found)
    assert draw() == wanted


def test_so_does_what_comes_out_of_a_document() -> None:
    randomness = rng.Randomness()
    seed(5)
    random.gauss(0, 1)
    document = json.loads(json.dumps(randomness.to_document(randomness.capture())))
    wanted = draw()
    seed(6)
    set_officially(rng.official(randomness.from_document(document)))
    assert draw() == wanted


def test_another_generator_of_numpy_goes_through_its_official_setter_too() -> None:
    original = np.random.get_bit_generator()  # type: ignore[attr-defined]
    try:
        np.random.set_bit_generator(np.random.PCG64(5))  # type: ignore[attr-defined]
        found = rng.official(rng.Randomness().capture())
        wanted = np.random.rand(3).tolist()
        np.random.set_state(found["numpy"])
        assert np.random.rand(3).tolist() == wanted
    finally:
        np.random.set_bit_generator(original)  # type: ignore[attr-defined]


def test_what_was_not_there_is_not_in_it_and_devices_are_a_list() -> None:
    captured = rng.Randomness().capture()
    state = torch.zeros(16, dtype=torch.uint8)
    found = rng.official(captured._replace(numpy=None, cuda=(state, state + 1)))
    assert set(found) == {"python", "cpu", "cuda"}
    assert isinstance(found["cuda"], list) and [int(one[0]) for one in found["cuda"]] == [0, 1]
