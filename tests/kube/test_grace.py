"""A save that needs longer than the grace that the user's Job gives it."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.kube import trainings as kube_trainings
from helpers.kube.cluster import Cluster
from helpers.kube.trainings import Training
from lastcall import testing

STEPS = 20
EVERY = 5
GRACE = 4  # seconds, the user's own
SLOW = 15  # seconds that a checkpoint takes


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> str:
    return kube_trainings.uninterrupted(tmp_path_factory.mktemp("uninterrupted"), {"STEPS": STEPS})


def evicted(
    cluster: Cluster, folder: Path, name: str, settings: dict[str, object], asked: str, step: int
) -> Training:
    """A Job that is told to go after this step."""
    annotations = {
        "lastcall.dev/enabled": "true",
        "lastcall.dev/kill-wait-seconds": "0",
        "lastcall.dev/grace-seconds": asked,
    }
    item = kube_trainings.job(
        name, folder, {"STEPS": STEPS, "PACE": 0.3, **settings}, annotations=annotations, grace=GRACE
    )
    training = Training(cluster, folder, cluster.api.create(item))
    training.expect(f"step {step}")
    pod = training.running()
    cluster.kubectl("delete", "pod", pod["metadata"]["name"], "--wait=false")
    training.gone(pod)
    return training


@pytest.mark.usefixtures("webhook")
def test_the_grace_that_the_annotation_asks_for_holds_the_save(
    cluster: Cluster, tmp_path: Path, finished: str
) -> None:
    training = evicted(cluster, tmp_path, "raised", {"SLOW": SLOW}, "60", 3)
    training.wait()
    first, second = training.lines("from")
    assert first == "from 0" and int(second.split()[1]) >= 3, training.story()
    assert training.lines("finished") == [finished], training.story()


@pytest.mark.usefixtures("webhook")
def test_where_no_grace_is_long_enough_the_checkpoint_before_survives(
    cluster: Cluster, tmp_path: Path, finished: str
) -> None:
    """The periodic checkpoint is as slow: it is the one that this Job was given the time for."""
    training = evicted(cluster, tmp_path, "short", {"SLOW": SLOW, "EVERY": EVERY}, str(GRACE + 1), EVERY + 2)
    testing.assert_resumable(tmp_path / "run")
    training.wait()
    assert training.lines("from") == ["from 0", f"from {EVERY}"], training.story()
    assert training.lines("finished") == [finished], training.story()
