"""The progress of a real process, as OpenShift AI's controller polls it: over a preemption and a resume."""

from __future__ import annotations

import json
import re
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from helpers.processes.forkserver import Child, Nursery, until
from lastcall import testing

SLOW = """
    import os, time
    import lastcall
    from helpers.models import training

    model, optimizer = training.parts()
    with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer) as run:
        print("resumed", run.resumed, flush=True)
        for step in run.steps(int(os.environ["STEPS"])):
            training.say(step)
            loss = training.step(model, optimizer)
            if os.environ["REPORT"] == "1":
                run.report(loss=loss, learning_rate=1e-3, eval_loss=float("nan"))
            time.sleep(0.05)
    training.finish(model=model, optimizer=optimizer)
"""
TOTAL = 1000


class Case:
    def __init__(self, nursery: Nursery, folder: Path) -> None:
        self._nursery, self._folder = nursery, folder
        self._script = nursery.write(folder, SLOW)
        self.run = folder / "run"

    def start(self, **env: str) -> Child:
        env = {
            "LASTCALL_KILL_WAIT_SECONDS": "0",
            "LASTCALL_PROGRESS_PORT": "0",
            "STEPS": str(TOTAL),
            "REPORT": "1",
            **env,
        }
        return self._nursery.start(self._folder, self._script, self.run, self._folder / "result", **env)


@pytest.fixture
def case(nursery: Nursery, tmp_path: Path) -> Case:
    return Case(nursery, tmp_path)


def port(child: Child) -> int:
    child.expect_log("Serving progress on port")
    found = re.search(r"Serving progress on port (\d+)", child.log())
    assert found is not None
    return int(found[1])


def poll(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        assert answer.headers["Content-Type"] == "application/json"
        said: dict[str, Any] = json.load(
            answer, parse_constant=lambda text: pytest.fail(f"{text} is not JSON")
        )
    return said


def until_said(port: int, name: str) -> dict[str, Any]:
    """What is polled once there is a value of this name."""
    said: dict[str, Any] = {}

    def there() -> bool:
        said.update(poll(port))
        return said[name] is not None

    until(there, f"{name} on the page")
    return said


def test_the_page_tells_the_truth_over_a_preemption_and_a_resume(case: Case) -> None:
    child = case.start()
    where = port(child)
    said = until_said(where, "estimatedRemainingSeconds")
    assert (said["totalSteps"], said["state"], said["incarnation"], said["resumed_from"]) == (
        TOTAL,
        "running",
        1,
        None,
    )
    assert said["progressPercentage"] == said["currentStep"] * 100 // TOTAL < 50
    assert isinstance(said["trainMetrics"]["loss"], float) and said["trainMetrics"]["learning_rate"] == 1e-3
    assert said["evalMetrics"] == {"eval_loss": None}
    child.send(15)
    assert child.wait() == 75
    with pytest.raises(urllib.error.URLError):
        poll(where)
    saved = testing.assert_resumable(case.run, exact=True).record.step
    last = json.loads((case.run / ".lastcall" / "progress.json").read_text())
    assert last["step"] == saved and last["total"] == TOTAL  # it stays at the true step

    child = case.start()
    where = port(child)
    first = poll(where)
    assert (first["resumed_from"], first["incarnation"]) == (f"checkpoint-{saved}", 2)
    assert first["currentStep"] >= saved  # never back at 0
    said = until_said(where, "estimatedRemainingSeconds")
    left = TOTAL - said["currentStep"]
    # a step takes 50 ms and more, whatever was done before
    assert said["estimatedRemainingSeconds"] > left * 0.045
    child.end()


def test_a_run_that_never_reports_has_a_page_too(case: Case) -> None:
    child = case.start(REPORT="0")
    where = port(child)
    said = until_said(where, "estimatedRemainingSeconds")
    assert said["currentStep"] > 0 and said["steps_per_second"] > 0 and said["trainMetrics"] == {}
    child.end()


def test_a_port_in_use_does_not_keep_a_run_from_training(case: Case) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        child = case.start(STEPS="3", LASTCALL_PROGRESS_PORT=str(taken.getsockname()[1]))
        assert child.wait() == 0, child.log()
    assert "Could not serve progress on port" in child.log()


def test_without_a_port_nobody_listens(case: Case) -> None:
    child = case.start(STEPS="3", LASTCALL_PROGRESS_PORT="")
    assert child.wait() == 0, child.log()
    assert "Serving progress" not in child.log()
