"""How an iterator begins: fresh, in the middle of a loaded pass, or with workers that would have been there already."""

from __future__ import annotations

from typing import Any

from lastcall.adapters.torch.data import facts, iterators, position
from lastcall.adapters.torch.data import randomness as rng


def open_iterator(loader: Any, ledger: position.Ledger) -> Any:
    """A new iterator over the loader: a fresh one, or the continuation of the pass that was loaded."""
    ledger.generators = rng.find_generators(loader)
    resume = ledger.pending
    if resume is None:
        return _open_fresh(loader, ledger)
    inside = resume.phase == position.INSIDE
    # Persistent workers that were there at the time of the interruption are made again, with the generators they had.
    same_workers = resume.persistent and loader.num_workers > 0 and loader.persistent_workers and _same_count(resume, loader)
    ledger.pending = None
    try:
        if inside or (resume.phase == position.LEFT and same_workers):
            return _open_inside(loader, ledger, resume)
        if resume.phase == position.BETWEEN and same_workers:
            return _open_between(loader, ledger, resume)
        return _open_fresh(loader, ledger)
    except BaseException:
        ledger.pending = resume
        raise


def _open_fresh(loader: Any, ledger: position.Ledger) -> Any:
    now = rng.take(ledger.generators)
    if loader.num_workers == 0:
        return iterators.FollowedSingle(loader, ledger, iterators.new_pass(loader, now, None), resumed=False)
    return iterators.FollowedMulti(loader, ledger, position.Pool(now, [None] * loader.num_workers, loader.persistent_workers))


def _open_inside(loader: Any, ledger: position.Ledger, resume: position.Resume) -> Any:
    left = resume.phase == position.LEFT
    told = facts.sampler_epochs(loader)
    facts.set_sampler_epochs(loader, resume.state["epochs"], quiet=left)
    saved = rng.take(ledger.generators)
    rng.put(resume.created, ledger.generators)
    iterator: Any
    try:
        if loader.num_workers == 0:
            passage = resume.to_pass(facts.facts(loader), None, facts.sampler_facts(loader))
            if passage.iterable and not passage.delivered:
                passage.draw = None  # nothing to replay: its first draw is an ordinary one
            iterator = iterators.FollowedSingle(loader, ledger, passage, resumed=True)
        else:
            pool = position.Pool(resume.created, resume.workers(loader.num_workers), loader.persistent_workers)
            passage = resume.to_pass(facts.facts(loader), pool, facts.sampler_facts(loader))
            iterator = iterators.FollowedMulti(loader, ledger, pool, passage)
        if left and iterator._lc_replay:
            iterator._lc_make_again()
    finally:
        rng.put(saved, ledger.generators)
    if left:
        # That pass was over; the workers only had to load what they had prefetched of it. Now comes the next one.
        facts.set_sampler_epochs(loader, told, quiet=True)
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
