"""How an iterator begins: fresh, in the middle of a loaded pass, or with workers that would have been there
already."""

from __future__ import annotations

from typing import Any

from lastcall.adapters.torch.data import iterators, loader_facts, position
from lastcall.adapters.torch.data.objects import generators as rng
from lastcall.adapters.torch.data.objects import seeding, standing


def open_iterator(loader: Any, ledger: position.Ledger) -> Any:
    """A new iterator over the loader: a fresh one, or the continuation of the pass that was loaded."""
    ledger.generators = rng.find_generators(loader)
    ledger.holding.of(loader)
    resume = ledger.resume_for(ledger.opening)
    if resume is None:
        if ledger.begun:
            return _open_fresh(loader, ledger)
        with seeding.watched(ledger.name, ledger.doubts):
            return _open_fresh(loader, ledger)
    inside = resume.phase == position.INSIDE
    if inside:
        ledger.taken()
        # a peek at the loader may have moved them
        rng.put_generators(resume.state["generators"], ledger.generators)
    elif ledger.step is not None and not resume.persistent:
        ledger.taken()
    # Persistent workers that were there at the time of the interruption are made again, with the generators
    # they had.
    same_workers = (
        resume.persistent
        and loader.num_workers > 0
        and loader.persistent_workers
        and _same_count(resume, loader)
    )
    ledger.pending = None
    restore = ledger.holding.stand(
        resume.stands(loader_facts.facts(loader), loader_facts.sampler_facts(loader))
    )
    try:
        if inside or (resume.phase == position.LEFT and same_workers):
            return _open_inside(loader, ledger, resume, restore)
        if resume.phase == position.BETWEEN and same_workers:
            iterator = _open_between(loader, ledger, resume)
        else:
            iterator = _open_fresh(loader, ledger)
            iterator._lc_pass.moves = True
            ledger.moved()
        iterator._lc_pass.over_again = restore
        return iterator
    except BaseException:
        restore()
        ledger.pending = resume
        raise


def adopt(iterator: Any, loader: Any, ledger: position.Ledger, site: str) -> None:
    """An iterator without workers that torch made before anybody followed its loader, and that nothing was
    drawn from: from now on it is as one of ours."""
    ledger.opening = site
    try:
        ledger.generators = rng.find_generators(loader)
        ledger.holding.of(loader)
        if ledger.pending is not None and ledger.pending.phase == position.INSIDE:
            made = open_iterator(loader, ledger)
            iterator.__dict__ = dict(made.__dict__)
            made._lc_pass = None  # it is the other one's now
        else:
            ledger.pending = None
            passage = iterators.new_pass(loader, ledger, rng.take(ledger.generators), None)
            iterator._lc_ledger = ledger
            ledger.begin(passage)
        iterator.__class__ = iterators.FollowedSingle
        if iterator._lc_pass is None:
            iterator._lc_start(passage, loader)
    finally:
        ledger.opening = ""


def _open_fresh(loader: Any, ledger: position.Ledger) -> Any:
    now = rng.take(ledger.generators)
    if loader.num_workers == 0:
        return iterators.FollowedSingle(
            loader, ledger, iterators.new_pass(loader, ledger, now, None), resumed=False
        )
    return iterators.FollowedMulti(
        loader, ledger, position.Pool(now, [None] * loader.num_workers, loader.persistent_workers)
    )


def _open_inside(
    loader: Any, ledger: position.Ledger, resume: position.Resume, restore: standing.Undo
) -> Any:
    left = resume.phase == position.LEFT
    holding, told = ledger.holding, loader_facts.sampler_epochs(loader)
    if not left:
        ledger.told = loader_facts.epochs_told(loader, tuple(resume.state["epochs"]))
    holding.put(resume.held_at("now"))  # the script may have come by here already, at the top of its epoch
    loader_facts.compare_length(loader, resume.state, ledger.doubts)
    held_at_draw = None
    if resume.held_at("draw"):
        holding.put(resume.held_at("draw"))
        held_at_draw = holding.begin(ledger.doubts)
        holding.put(resume.held_at("now"))
    holding.put(resume.held_at("begin"))
    held = holding.begin(ledger.doubts)
    loader_facts.set_sampler_epochs(loader, resume.state["epochs"])
    saved = rng.take(ledger.generators)
    rng.put(resume.created, ledger.generators)
    iterator: Any
    try:
        if loader.num_workers == 0:
            passage = resume.to_pass(loader_facts.facts(loader), None, loader_facts.sampler_facts(loader))
            if passage.iterable and not passage.delivered:
                passage.draw = None  # nothing to replay: its first draw is an ordinary one
            iterator = iterators.FollowedSingle(loader, ledger, passage, resumed=True)
        else:
            pool = position.Pool(
                resume.created, resume.workers(loader.num_workers), loader.persistent_workers
            )
            passage = resume.to_pass(loader_facts.facts(loader), pool, loader_facts.sampler_facts(loader))
            iterator = iterators.FollowedMulti(loader, ledger, pool, passage)
        passage.held, passage.held_at_draw, passage.over_again = held, held_at_draw, restore
        if (
            tuple(resume.state["facts"])[: 4 if passage.iterable else 2]
            != passage.facts[: 4 if passage.iterable else 2]
        ):
            passage.seen = ()  # other batches, which got
        if left and iterator._lc_replay:
            iterator._lc_make_again()
    finally:
        anew = bool(resume.state.get("anew"))
        rng.put(saved, () if anew else ledger.generators)
        holding.put(() if anew else resume.held_at("now"))
    if left:
        # That pass was over; the workers only had to load what they had prefetched of it. Now comes the next
        # one.
        loader_facts.set_sampler_epochs(loader, told)
        restore()
        iterator._reset(loader)
    return iterator


def _open_between(loader: Any, ledger: position.Ledger, resume: position.Resume) -> Any:
    now = rng.take(ledger.generators)
    rng.put(resume.created, ledger.generators)
    try:
        pool = position.Pool(resume.created, resume.workers(loader.num_workers), persistent=True)
        return iterators.FollowedMulti(loader, ledger, pool, meanwhile=now)
    except BaseException:
        rng.put(now, ledger.generators)
        raise


def _same_count(resume: position.Resume, loader: Any) -> bool:
    return bool(resume.state["facts"][2] == loader.num_workers)
