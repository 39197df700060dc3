"""A Trainer whose directory is lost: it goes on from the bucket, in another directory, and finds its best
model there."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.processes import interruption_chain as chain
from helpers.processes.forkserver import Child, Nursery, until
from helpers.servers import s3 as s3_server
from helpers.servers.s3 import Server
from helpers.trainer import interruption_chain as trainer_chain
from helpers.trainer.interruption_chain import FORKED, PLAIN, QUICK, SCRIPTS

# What it calls the best is the worst: the first checkpoint, which rotation would take.
BEST = 5
CASE = {
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": True,
    "save_total_limit": 1,
}


@pytest.fixture
def nursery(trainers: Nursery) -> Iterator[Nursery]:
    yield trainers
    trainers.clear()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with s3_server.served(tmp_path / "buckets") as found:
        found.bucket("runs")
        yield found


def start(nursery: Nursery, folder: Path, name: str, **env: str) -> Child:
    given = {
        "CASE": json.dumps(CASE),
        "OUTPUT": str(folder / name),
        "RESULT": str(folder / f"{name}-result"),
        **env,
    }
    return nursery.start(folder, FORKED, SCRIPTS / "bits_options.py", **given)


def result(folder: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((folder / f"{name}-result-0").read_text()))


def test_the_best_model_is_found_in_another_directory(
    nursery: Nursery, tmp_path: Path, server: Server
) -> None:
    assert start(nursery, tmp_path, "peace", **PLAIN).wait() == 0
    expected = result(tmp_path, "peace")
    assert expected["best"][1] == BEST
    env = {**QUICK, "LASTCALL_MIRROR": "s3://runs/exp1", **server.environment}
    # the second is struck before it saves by itself: rotation must know by then
    for number, lines in enumerate((16, 1)):
        child = start(nursery, tmp_path, f"lost-{number}", **env)
        until(
            lambda child=child, lines=lines: (
                sum(line.startswith("{'loss'") for line in child.lines()) >= lines
            ),
            child.log(),
        )
        child.send(signal.SIGTERM)
        assert child.wait() == chain.SAVED, child.log()
        assert (
            max(chain.records(tmp_path / f"lost-{number}"), key=lambda record: record["sequence"])["step"]
            < 20
        ), child.log()
        assert (tmp_path / f"lost-{number}" / f"checkpoint-{BEST}").is_dir(), child.log()
        shutil.rmtree(tmp_path / f"lost-{number}")
        assert BEST in [record["step"] for record in chain.records(server.folder / "runs" / "exp1")], (
            child.log()
        )
    last = start(nursery, tmp_path, "last", **env)
    assert last.wait() == 0, last.log()
    assert f"Fetched checkpoint-{BEST}" in last.log()
    assert "Could not locate the best model" not in last.log()
    found = result(tmp_path, "last")
    assert {part: found[part] for part in ("weights", "best", "history", "place")} == {
        part: expected[part] for part in ("weights", "best", "history", "place")
    }


@pytest.mark.parametrize("best", ["first", "last"])
@pytest.mark.timeout(300)
def test_two_machines_share_nothing_but_the_mirror(nursery: Nursery, tmp_path: Path, best: str) -> None:
    """Each saves where the other does not see it, and loses it. The best model is one of a former life, or of
    the last one: then only the first machine has it, and the other must get it before it is loaded."""
    case = {**CASE, "greater_is_better": best == "first"}
    setting = {"CASE": json.dumps(case), "LASTCALL_MIRROR": f"file://{tmp_path / 'mirror'}"}
    trainer_chain.run(
        nursery,
        tmp_path,
        [SCRIPTS / "bits_options.py"],
        [],
        2,
        **PLAIN,
        **setting,
        **trainer_chain.places(tmp_path, "peace"),
    )
    expected = trainer_chain.results(tmp_path, "peace", 2)

    def life() -> trainer_chain.Life:
        for number in range(2):
            shutil.rmtree(tmp_path / f"machine-{number}", ignore_errors=True)
        each = [{"OUTPUT": str(tmp_path / f"machine-{number}" / "run")} for number in range(2)]
        env = {**QUICK, **setting, **trainer_chain.places(tmp_path, "lost")}
        return trainer_chain.Life(nursery, tmp_path, [SCRIPTS / "bits_options.py"], 2, env, each)

    first = life()
    first.strike(trainer_chain.Blow(10, 0.0, (1,)))
    assert first.wait() == (chain.SAVED, chain.SAVED), first.log()
    newest = max(chain.records(tmp_path / "mirror"), key=lambda record: record["sequence"])
    assert (newest["kind"], newest["world"]) == ("jit", 2), first.log()
    last = life()
    assert last.wait() == (0, 0), last.log()
    assert last.log().count(f"Fetched checkpoint-{newest['step']}") == 2, last.log()
    assert "Could not locate the best model" not in last.log()
    for rank, (found, wanted) in enumerate(
        zip(trainer_chain.results(tmp_path, "lost", 2), expected, strict=True)
    ):
        for part in ("weights", "best", "history", "place"):
            assert found[part] == wanted[part], f"rank {rank}: {part}\n{last.log()}"


@pytest.mark.timeout(300)
def test_a_best_model_that_was_never_copied_comes_from_the_machine_that_has_it(
    nursery: Nursery, tmp_path: Path
) -> None:
    """A copy that was left out for a newer one: all ranks know the best model all the same, or some of them
    would load another."""
    mirror, kept = tmp_path / "mirror", tmp_path / "machine-0" / "run"
    env = {
        **QUICK,
        "CASE": json.dumps({**CASE, "greater_is_better": True}),
        "LASTCALL_MIRROR": f"file://{mirror}",
    }

    def life(*machines: int) -> trainer_chain.Life:
        given = {**env, **trainer_chain.places(tmp_path, "lost")}
        each = [{"OUTPUT": str(tmp_path / f"machine-{number}" / "run")} for number in machines]
        return trainer_chain.Life(nursery, tmp_path, [SCRIPTS / "bits_options.py"], 2, given, each)

    first = life(0, 1)
    first.strike(trainer_chain.Blow(10, 0.0, (1,)))
    assert first.wait() == (chain.SAVED, chain.SAVED), first.log()
    newest = max(chain.records(kept), key=lambda record: record["sequence"])
    state = json.loads((kept / f"checkpoint-{newest['step']}" / "trainer_state.json").read_text())
    best = Path(state["best_model_checkpoint"]).name
    assert (kept / best).is_dir() and best != f"checkpoint-{newest['step']}"
    shutil.rmtree(mirror / best)
    # or the other one would see it under its old name, as no machine does
    (tmp_path / "machine-0").rename(tmp_path / "machine-2")
    last = life(2, 3)
    assert last.wait() == (0, 0), last.log()
    assert "Could not locate the best model" not in last.log()
    results = trainer_chain.results(tmp_path, "lost", 2)
    assert results[0]["weights"] == results[1]["weights"] and results[0]["best"] == results[1]["best"], (
        last.log()
    )
    assert results[0]["best"][2] == best
