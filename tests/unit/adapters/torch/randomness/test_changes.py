"""What is noted at every batch, and told later: the randomness as it was, however little a draw has moved."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lastcall.adapters.torch.randomness import changes, rng


@pytest.fixture(autouse=True)
def _same_randomness_afterwards() -> Iterator[None]:
    python, numpy, cpu, bits = (
        random.getstate(),
        np.random.get_state(),
        torch.get_rng_state(),
        np.random.get_bit_generator(),  # type: ignore[attr-defined]
    )
    yield
    np.random.set_bit_generator(bits)  # type: ignore[attr-defined]
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)


def _round_of_python() -> None:
    """624 words: the position comes back to where it was."""
    for _ in range(624):
        random.getrandbits(32)


MOVES: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "one number of python's": random.random,
    "a normal number of python's, or the one that was kept": lambda: random.gauss(0, 1),
    "a whole round of python's words": _round_of_python,
    "another seed of python's, with the same position": lambda: random.seed(random.getrandbits(20)),
    "one number of numpy's": np.random.rand,
    "a normal number of numpy's, or the one that was kept": np.random.standard_normal,
    "a whole round of numpy's words": lambda: np.random.bytes(4 * 624),
    "another seed of numpy's, with the same position": lambda: np.random.seed(np.random.randint(1 << 20)),
    "one number of torch's": lambda: torch.rand(()),
    "a normal number of torch's, or the one that was kept": lambda: torch.randn(()),
    "a whole round of torch's words": lambda: torch.empty(624, dtype=torch.int32).random_(),
    "another seed of torch's, with the same position": lambda: torch.manual_seed(random.getrandbits(20)),
    "another bit generator of numpy's": lambda: np.random.set_bit_generator(np.random.MT19937(3)),  # type: ignore[attr-defined]
    "one of another kind": lambda: np.random.set_bit_generator(np.random.PCG64(4)),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("first", MOVES)
def test_a_note_is_told_as_the_randomness_of_its_moment(first: str) -> None:
    noting = rng.Randomness()
    noted: list[tuple[rng.Noted, dict[str, object]]] = []
    for move in (
        MOVES["nothing"],
        MOVES["nothing"],
        MOVES[first],
        MOVES["nothing"],
        MOVES[first],
        *MOVES.values(),
        MOVES[first],
    ):
        move()
        noted.append((noting.note(), noting.to_document(rng.Randomness().capture())))
    for number, (note, wanted) in enumerate(noted):  # long after the generators have gone on
        assert noting.to_document(noting.captured(note)) == wanted, f"note {number}"


def test_while_nothing_is_drawn_nothing_is_copied() -> None:
    noting = rng.Randomness()
    noting.note()
    words, _, cpu, _ = noting.note()
    again = noting.note()
    assert again[0] is words and again[2] is cpu


def test_a_state_that_was_put_back_is_noted_as_what_it_is() -> None:
    noting = rng.Randomness()
    noting.note()
    before = noting.capture()
    noting.note()
    random.random(), np.random.rand(), torch.rand(())
    noting.note()
    noting.restore(before)
    assert noting.to_document(noting.captured(noting.note())) == noting.to_document(before)


@pytest.mark.parametrize(
    "lost", [lambda generator: 0, lambda generator: 200 if generator is torch.default_generator else 100]
)
def test_where_the_words_of_torch_are_elsewhere_its_state_is_taken_every_time(
    monkeypatch: pytest.MonkeyPatch, lost: Callable[[torch.Generator], int]
) -> None:
    monkeypatch.setattr(changes, "_place", lost)
    noting = rng.Randomness()
    noting.note()
    for _ in range(3):
        torch.rand(())
        assert noting.to_document(noting.captured(noting.note())) == noting.to_document(noting.capture())
    assert noting._watched is not None and not noting._watched.knows_torch


def test_the_words_of_torch_are_found_here() -> None:
    assert len(changes._torch_marks()) == 2, "torch's state is copied at every batch: slower than promised"
