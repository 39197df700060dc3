"""A run that stops between the last batch and the end of an epoch: what the script does there is done once,
or the record says not."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.processes import interruption_chain as chain
from helpers.processes.forkserver import Child, Nursery
from lastcall import testing

PROGRAM = """
    import os
    import lastcall
    from helpers.models import training

    model, optimizer = training.parts()
    with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer) as run:
        best, rate = 9.0, 0.1
        for epoch in run.epochs(4):
            total = 0.0
            for _ in run.batches(range(6)):
                optimizer.param_groups[0]["lr"] = rate
                optimizer.zero_grad()
                loss = model.loss(training.batch())
                loss.backward()
                optimizer.step()
                total += float(loss.detach())
            stops = epoch == 1 and run.resumed is None and lastcall_is_on
            if stops and WHEN == "before":
                STOP
            best = min(best, total)
            if stops and WHEN == "between":
                STOP
            rate *= 0.5
            if stops and WHEN == "last":
                STOP
    training.finish(model=model, optimizer=optimizer, best=best, rate=rate)
"""
SAVED = "run.save(); os._exit(7)"


def life(nursery: Nursery, folder: Path, when: str, stop: str, *, on: bool = True) -> Child:
    source = PROGRAM.replace("WHEN", repr(when)).replace("lastcall_is_on", str(on)).replace("STOP", stop)
    return nursery.run(
        folder,
        nursery.write(folder, source),
        folder / "run",
        folder / "result",
        LASTCALL_ENABLED=str(int(on)),
    )


@pytest.mark.parametrize(
    ("when", "stop", "exact"),
    [
        ("before", "raise ValueError", True),
        ("last", SAVED, True),
        ("between", SAVED, False),
        ("before", SAVED, False),
    ],
    ids=["exception", "saved last", "saved between", "saved before"],
)
def test_what_follows_the_last_batch_is_done_once_or_the_record_is_not_exact(
    nursery: Nursery, tmp_path: Path, when: str, stop: str, exact: bool
) -> None:
    assert life(nursery, tmp_path, "", "pass", on=False).code == 0
    expected = (tmp_path / "result").read_text()
    first = life(nursery, tmp_path, when, stop)
    assert first.code == (7 if stop is SAVED else 1), first.log()
    record = testing.assert_resumable(tmp_path / "run", 12, exact=exact).record
    assert exact or "between the last batch and the end of epoch 1" in record.because
    again = life(nursery, tmp_path, when, stop)
    assert again.code == 0 and "will differ" not in again.log(), again.log()
    assert not exact or (tmp_path / "result").read_text() == expected, again.log()
    (ended,) = [body for body in chain.records(tmp_path / "run") if body["kind"] == "final"]
    assert ended["exact"] is exact  # what went on differently stays different
