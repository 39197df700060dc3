from __future__ import annotations

import dataclasses
import math
import tempfile
from pathlib import Path
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.ranks import states as ranks
from lastcall.core.engine import writer
from lastcall.core.ranks import partition
from lastcall.core.restore import restore

dimensions = st.one_of(st.integers(0, 9), st.sampled_from([33, 64, 130]))
shapes = st.one_of(st.lists(dimensions, max_size=2), st.lists(st.integers(1, 7), min_size=3, max_size=4)).map(
    tuple
)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...], world: int) -> tuple[ranks.Box, ...]:
    """Cut one or two dimensions anywhere, into no more boxes than ranks: fewer are replicated, equal cuts
    leave empty ones."""
    cuts: dict[int, list[int]] = {}
    left = world
    for dim in draw(st.permutations(range(len(shape))))[:2]:
        parts = draw(st.integers(1, left))
        cuts[dim] = draw(st.lists(st.integers(0, shape[dim]), min_size=parts - 1, max_size=parts - 1))
        left //= parts
    return ranks.grid(shape, cuts)


@st.composite
def plans(draw: st.DrawFn) -> tuple[dict[str, ranks.Whole], dict[str, ranks.Whole], int, int]:
    """Tensors as they are held by the ranks that save, and by those that load."""
    before, after = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    saved, loaded = {}, {}
    for number in range(draw(st.integers(1, 4))):
        shape, dtype = draw(shapes), draw(st.sampled_from(["F32", "U8", "BF16", "I64"]))
        whole = ranks.Whole(dtype, shape, draw(boxes(shape, before)), number)
        saved[f"t{number}"] = whole
        loaded[f"t{number}"] = dataclasses.replace(whole, boxes=draw(boxes(shape, after)))
    return saved, loaded, before, after


@settings(max_examples=60, deadline=None)
@given(plans(), st.sampled_from(["host", "elsewhere", "several"]), st.booleans(), st.data())
def test_what_some_ranks_wrote_is_what_other_ranks_read(
    plan: tuple[dict[str, ranks.Whole], dict[str, ranks.Whole], int, int],
    kind: str,
    verify_first: bool,
    data: st.DataObject,
) -> None:
    saved, loaded, before, after = plan
    states = {rank: ranks.state(saved, rank, before) for rank in range(before)}
    holdings = {rank: partition.holdings(groups) for rank, groups in states.items()}
    writers = {0, *data.draw(st.sets(st.integers(0, before - 1)), label="writers")}
    if partition.missing(holdings, writers):
        writers = set(states)
    with mock.patch.object(writer, "CHUNK", 4096), tempfile.TemporaryDirectory() as folder:
        engine = writer.Engine(2)
        try:
            entry = ranks.write(Path(folder) / "checkpoint-1", engine, states, sorted(writers))
            restore.verify(entry, engine)
            for rank in range(after):
                live = ranks.Live(loaded, rank, kind)
                restore.load(entry, engine, live, verify_first=verify_first, rank=rank, size=after)
                live.check(writers)
        finally:
            engine.close()


@settings(deadline=None)
@given(plans())
def test_the_portions_of_all_ranks_are_as_large_as_the_whole(
    plan: tuple[dict[str, ranks.Whole], dict[str, ranks.Whole], int, int],
) -> None:
    saved, _, before, _ = plan
    states = {rank: ranks.state(saved, rank, before) for rank in range(before)}
    sizes = dict.fromkeys(saved, 0)
    for rank, groups in states.items():
        for entry in partition.portion(groups, rank, range(before))[0].entries:
            if entry.share is not None:
                sizes[entry.name.partition("@")[0]] += entry.source.nbytes
                assert entry.share.holders == (rank,)
    assert sizes == {name: math.prod(whole.data.shape) for name, whole in saved.items()}
