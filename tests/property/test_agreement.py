from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.ranks.interleavings import Fate, Rank, Stage
from lastcall.core.ranks import election
from lastcall.core.ranks.agreement import Agreement, Verdict
from lastcall.core.ranks.election import Decision, Position

PATIENCE = 5.0
seeds = st.integers(0, 2**32)
operations = st.none() | st.integers(1, 8)
fates = st.builds(Fate, st.sampled_from([0.0, 0.0, 0.5, 30.0]), operations, operations, st.booleans())


class Crew:
    """Ranks that go through the boundary agreement and, where it comes to nothing, the instant one."""

    def __init__(
        self, seed: int, fates: Sequence[Fate], skews: Sequence[int], *, told: bool, hurried: bool
    ) -> None:
        self.hurried = hurried
        self.stage = Stage(seed, hurried=hurried)
        self.size = len(fates)
        self.decisions: dict[int, list[Decision]] = {rank: [] for rank in range(self.size)}
        self.overdue = 0.0  # seconds that any rank took longer than it was given
        self._skews = skews
        self._told = told  # of the dead
        self._holdings = {0: [tuple(range(self.size))]}
        for fate in fates:
            Rank(self.stage, self.live, fate)
        self.stage.run()

    def live(self, rank: Rank) -> None:
        number, clock = self.stage.ranks.index(rank), self.stage.clock
        agreement = Agreement(rank, number, self.size, clock)
        step = 10 + self._skews[number]
        for phase, decide in (("boundary", election.boundary), ("instant", election.instant)):
            until = clock.now() + PATIENCE
            decision = agreement.agree(
                phase,
                Position(number, step, entered=step),
                lambda found, decide=decide: decide(found, self.size, self._holdings),  # type: ignore[misc]
                until,
                self.stage.dead if self._told else set,
            )
            self.decisions[number].append(decision)
            self.overdue = max(self.overdue, clock.now() - until)
            if decision.kind != "nothing":
                break

    def of_phase(self, phase: int) -> list[Decision]:
        return [taken[phase] for taken in self.decisions.values() if len(taken) > phase]


crews = st.integers(1, 5).flatmap(
    lambda size: st.builds(
        Crew,
        seeds,
        st.lists(fates, min_size=size, max_size=size),
        st.lists(st.sampled_from([0, 0, 0, 1]), min_size=size, max_size=size),
        told=st.booleans(),
        hurried=st.booleans(),
    )
)


@settings(deadline=None, max_examples=150)
@given(crews)
def test_no_two_ranks_obey_different_decisions_and_every_rank_ends(crew: Crew) -> None:
    for phase in (0, 1):
        assert len({decision for decision in crew.of_phase(phase) if decision.kind != "alone"}) <= 1
    for number, rank in enumerate(crew.stage.ranks):
        assert rank.ended
        taken = crew.decisions[number]
        assert rank.dead or taken
        assert all(decision.kind != "alone" for decision in taken) or rank.lost
    assert crew.hurried or crew.overdue <= 1.0


@settings(deadline=None, max_examples=100)
@given(crews)
def test_a_rank_that_was_lost_before_it_spoke_is_no_writer(crew: Crew) -> None:
    unheard = {
        number
        for number, rank in enumerate(crew.stage.ranks)
        if rank.dead and rank.fate.dies == 1 and not rank.fate.halfway
    }
    for phase in (0, 1):
        for decision in crew.of_phase(phase):
            assert unheard.isdisjoint(decision.writers)


@settings(deadline=None, max_examples=60)
@given(seeds, st.lists(st.sampled_from([0, 1]), min_size=1, max_size=6))
def test_ranks_without_trouble_agree_on_the_first_boundary_that_nobody_has_passed(
    seed: int, skews: list[int]
) -> None:
    crew = Crew(seed, [Fate()] * len(skews), skews, told=True, hurried=False)
    (decision,) = set(crew.of_phase(0))
    assert (decision.kind, decision.step, decision.missing) == ("boundary", 11 + max(skews), ())
    assert decision.writers == tuple(range(len(skews)))


@settings(deadline=None, max_examples=60)
@given(
    seeds,
    st.lists(st.sampled_from([0, 1]), min_size=2, max_size=5),
    st.integers(0, 4),
    st.integers(1, 2),
    st.booleans(),
)
def test_survivors_who_know_of_a_death_save_without_waiting(
    seed: int, skews: list[int], victim: int, dies: int, halfway: bool
) -> None:
    victim %= len(skews)
    fates = [
        Fate(dies=dies, halfway=halfway) if number == victim else Fate(starts=0.5)
        for number in range(len(skews))
    ]
    crew = Crew(seed, fates, skews, told=True, hurried=False)
    assert {decision.kind for decision in crew.of_phase(0)} == {"nothing"}
    (decision,) = set(crew.of_phase(1))
    best = max(skew for number, skew in enumerate(skews) if number != victim)
    assert (decision.kind, decision.step) == ("survivors", 10 + best)
    assert victim not in decision.writers
    assert crew.stage.clock.now() == 1000.5


@settings(deadline=None, max_examples=100)
@given(seeds, st.lists(st.tuples(st.booleans(), fates), min_size=1, max_size=5), st.booleans())
def test_a_vote_has_one_result(seed: int, voters: list[tuple[bool, Fate]], hurried: bool) -> None:
    stage, verdicts = Stage(seed, hurried=hurried), dict[int, Verdict]()

    def live(rank: Rank) -> None:
        number = stage.ranks.index(rank)
        agreement = Agreement(rank, number, len(voters), stage.clock)
        verdicts[number] = agreement.vote(
            "loaded", voters[number][0], "no reason", stage.clock.now() + PATIENCE
        )

    for _, fate in voters:
        Rank(stage, live, fate)
    stage.run()
    results = {(verdict.ok, verdict.because) for verdict in verdicts.values() if not verdict.lost}
    assert len(results) <= 1
    assert all(all(ok for ok, _ in voters) for ok, _ in results if ok)
    assert len(verdicts) == sum(not rank.dead for rank in stage.ranks)


@settings(deadline=None, max_examples=100)
@given(
    seeds, st.lists(st.none() | st.integers(0, 6).map(lambda half: 100 + half / 2), min_size=1, max_size=5)
)
def test_everybody_hears_the_same_news_and_each_brings_the_deadline_forward(
    seed: int, deadlines: list[float | None]
) -> None:
    stage, heard = Stage(seed), dict[int, list[float | None]]()

    def live(rank: Rank) -> None:
        number = stage.ranks.index(rank)
        agreement = Agreement(rank, number, len(deadlines), stage.clock)
        agreement.announce({"deadline": deadlines[number]})
        heard[number] = []
        while (news := agreement.heard(10.0)) is not None:
            heard[number].append(news["deadline"])

    for _ in deadlines:
        Rank(stage, live, Fate())
    stage.run()
    (news,) = set(map(tuple, heard.values()))
    known = [deadline for deadline in news if deadline is not None]
    assert None not in news[1:]
    assert all(later <= earlier - 1 for earlier, later in itertools.pairwise(known))
    wanted = [deadline for deadline in deadlines if deadline is not None]
    assert not wanted or min(wanted) > min(known) - 1


flags, counts = st.booleans(), st.integers(0, 3)
positions = st.dictionaries(st.integers(0, 5), st.tuples(counts, counts, flags, flags, flags))
holders = st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True).map(
    lambda ranks: tuple(sorted(ranks))
)


@settings(deadline=None)
@given(positions, st.dictionaries(st.integers(0, 5), st.lists(holders, max_size=3)))
def test_survivors_hold_every_piece_at_one_step_and_none_of_them_is_torn(
    said: dict[int, tuple[int, int, bool, bool, bool]], holdings: dict[int, list[tuple[int, ...]]]
) -> None:
    found = {
        rank: Position(rank, step, parked, finished, entered, clean)
        for rank, (step, entered, clean, parked, finished) in said.items()
    }
    decision = election.survivors(found, 6, holdings)
    assert decision.because
    if decision.kind == "survivors":
        assert all(found[rank].clean for rank in decision.writers)
        assert set(decision.writers) | set(decision.missing) == set(range(6))
        assert len({found[rank].entered for rank in decision.writers}) == 1
        assert all(set(piece) & set(decision.writers) for pieces in holdings.values() for piece in pieces)
    else:
        assert decision.kind in ("abort", "finish")
    assert Decision.from_bytes(decision.to_bytes()) == decision
    for other in (election.boundary(found, 6, holdings), election.instant(found, 6, holdings)):
        assert Decision.from_bytes(other.to_bytes()) == other
        assert set(other.writers).isdisjoint(other.missing)
