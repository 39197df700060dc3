from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from kubeflow.trainer.backends.container.backend import ContainerBackend

import lastcall
from helpers.kubeflow import functions as kubeflow_functions
from lastcall import settings
from lastcall.adapters.kubeflow import locations, patch, submission
from lastcall.kubeflow import PeriodicCheckpointConfig, TransformersTrainer

DIRECTORY = "pvc://shared/a/b"


def trainer(**said: Any) -> TransformersTrainer:
    return TransformersTrainer(
        **{"func": kubeflow_functions.train, "func_args": {"epochs": 1}, "output_dir": DIRECTORY, **said}
    )


# ---- where checkpoints go ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output_dir", "claim", "in_pod"),
    [
        ("pvc://shared/checkpoints/exp1", "shared", "/mnt/kubeflow-checkpoints/checkpoints/exp1"),
        ("pvc://my-claim.2/a//b/", "my-claim.2", "/mnt/kubeflow-checkpoints/a/b"),
        ("pvc://shared", "shared", "/mnt/kubeflow-checkpoints"),
        ("PVC://shared/", "shared", "/mnt/kubeflow-checkpoints"),
        ("/mnt/data/exp1", None, "/mnt/data/exp1"),
    ],
)
def test_a_directory_is_a_claim_or_a_path(output_dir: str, claim: str | None, in_pod: str) -> None:
    place = locations.parse(output_dir)
    assert (place.claim, place.in_pod()) == (claim, in_pod)


@pytest.mark.parametrize(
    ("output_dir", "why"),
    [
        ("gs://bucket", "does not save to gs://"),
        ("s3://", "is neither a bucket nor a folder"),
        ("s3:///prefix", "is neither a bucket nor a folder"),
        ("s3://bucket/../other", "points outside"),
        ("pvc://", "not the name of a claim"),
        ("pvc:///checkpoints", "not the name of a claim"),
        ("pvc://Shared/x", "not the name of a claim"),
        ("pvc://a b/x", "not the name of a claim"),
        ("pvc://a..b/x", "not the name of a claim"),
        ("pvc://shared/../other", "points outside the claim"),
        ("/", "not the path of a folder"),
        ("/a\0b", "not the path of a folder"),
        (5, "is not text"),
        ("", "is not an absolute path"),
        ("runs/exp1", "is not an absolute path"),
        ("~/exp1", "is not an absolute path"),
    ],
)
def test_what_is_neither_is_refused_before_anything_is_submitted(output_dir: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        trainer(output_dir=output_dir)


def test_without_a_cluster_a_claim_is_a_folder_at_home_which_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ValueError, match=f"mkdir -p {tmp_path}/shared"):
        locations.parse(DIRECTORY).here()
    (tmp_path / "shared").mkdir()
    assert locations.parse(DIRECTORY).here() == str(tmp_path / "shared" / "a" / "b")
    assert locations.parse("/runs/exp1").here() == "/runs/exp1"


def test_a_container_without_a_cluster_has_no_claims() -> None:
    assert patch._directory(None, ContainerBackend) is None
    assert patch._directory(locations.parse("/runs/exp1"), ContainerBackend) == "/runs/exp1"
    with pytest.raises(ValueError, match="no claims without a cluster"):
        patch._directory(locations.parse(DIRECTORY), ContainerBackend)


def test_a_bucket_is_a_folder_that_may_go_and_a_mirror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    place = locations.parse("S3://bucket/exp1/")
    assert (place.claim, place.mirror, place.in_pod()) == (
        None,
        "s3://bucket/exp1",
        "/mnt/kubeflow-checkpoints",
    )
    assert place.here() == str(tmp_path / ".cache/lastcall/mirrored/bucket/exp1")
    assert patch._directory(place, ContainerBackend) == "/mnt/kubeflow-checkpoints"


def test_with_a_bucket_the_client_for_it_is_installed_unless_the_user_has_said_what_is() -> None:
    bucket = trainer(output_dir="s3://bucket/exp1", num_nodes=1)
    assert submission.packages(bucket, "s3://bucket/exp1") == [f"lastcall[s3]=={lastcall.__version__}"]
    mine = trainer(output_dir="s3://bucket/exp1", package="lastcall @ file:///mine.whl")
    assert submission.packages(mine, "s3://bucket/exp1") == ["lastcall @ file:///mine.whl"]


def test_several_nodes_may_have_a_bucket_alone_or_with_a_claim_that_they_share() -> None:
    bucket = trainer(output_dir="s3://bucket/exp1", num_nodes=2)
    assert submission.variables(bucket, "/mnt", "s3://bucket/exp1")["LASTCALL_MIRROR"] == "s3://bucket/exp1"
    said = trainer(output_dir=DIRECTORY, num_nodes=2, env={"LASTCALL_MIRROR": "s3://bucket/exp1"})
    assert submission.variables(said, "/mnt")["LASTCALL_MIRROR"] == "s3://bucket/exp1"


def test_a_data_connection_has_the_name_of_a_secret() -> None:
    with pytest.raises(ValueError, match="data_connection_name='My Data' is not the name of a secret"):
        trainer(data_connection_name="My Data")


# ---- what is said wrongly ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        {"metrics_port": 80},
        {"metrics_port": "28080"},
        {"metrics_poll_interval_seconds": 4},
        {"grace_seconds": 0},
        {"grace_seconds": 1.5},
        {"grace_seconds": True},
    ],
)
def test_a_wrong_number_is_named(said: dict[str, Any]) -> None:
    (name,) = said
    with pytest.raises(ValueError, match=f"{name}=.* is not a whole number from"):
        trainer(**said)


@pytest.mark.parametrize(
    "said",
    [
        {"num_nodes": 0},
        {"num_nodes": -1},
        {"num_nodes": "2"},
        {"packages_to_install": "transformers"},  # the SDK would install t, r, a, n, s ...
        {"pip_index_urls": "https://pypi.example/simple"},
        {"resources_per_node": ["gpu"]},
        {"env": ["A=1"]},
        {"periodic_checkpoint_config": {"save_steps": 20}},
        {"enable_jit_checkpoint": "no"},
        {"package": ""},
        {"func_args": [1]},
    ],
)
def test_a_value_of_another_kind_is_named(said: dict[str, Any]) -> None:
    (name,) = said
    with pytest.raises(ValueError, match=f"^{name}="):
        trainer(**said)


def test_a_path_may_be_one_of_pathlibs() -> None:
    assert trainer(output_dir=Path("/mnt/data/exp1")).output_dir == "/mnt/data/exp1"


def test_a_wrong_variable_is_refused_here_and_not_in_the_pods() -> None:
    with pytest.raises(
        ValueError, match="env: LASTCALL_KILL_WAIT_SECONDS='soon' is not a number of seconds"
    ) as caught:
        trainer(env={"LASTCALL_KILL_WAIT_SECONDS": "soon"})
    assert not isinstance(caught.value, SystemExit)  # a notebook goes on
    with pytest.raises(ValueError, match="env: STEPS=5 is not text"):
        trainer(env={"STEPS": 5})
    with pytest.warns(UserWarning, match="Did you mean LASTCALL_KILL_WAIT_SECONDS"):
        trainer(env={"LASTCALL_KILL_WAIT_SECOND": "1"})


def test_checkpoints_that_would_be_lost_with_the_pod_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="lost with the pod"):
        trainer(output_dir=None)
    trainer(output_dir=None, env={"LASTCALL_DIRECTORY": "/mnt/x"})
    trainer(output_dir=None, enable_jit_checkpoint=False)


# ---- what the pods are told --------------------------------------------------------------------------------


def test_what_was_not_said_is_not_sent() -> None:
    assert submission.variables(trainer(), "/x") == {
        "LASTCALL_ENABLED": "1",
        "LASTCALL_GRACE_SECONDS": "120",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120",
        "LASTCALL_DIRECTORY": "/x",
        "LASTCALL_PROGRESS_PORT": "28080",
    }


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (PeriodicCheckpointConfig(save_strategy="epoch"), {"LASTCALL_SAVE_STRATEGY": "epoch"}),
        (
            PeriodicCheckpointConfig(save_steps=5),
            {"LASTCALL_SAVE_STRATEGY": "steps", "LASTCALL_SAVE_STEPS": "5"},
        ),
        (PeriodicCheckpointConfig(save_total_limit=2), {"LASTCALL_SAVE_TOTAL_LIMIT": "2"}),
        (
            PeriodicCheckpointConfig(monitor="loss", save_best_only=True),
            {"LASTCALL_MONITOR": "loss", "LASTCALL_SAVE_BEST_ONLY": "1"},
        ),
    ],
)
def test_of_a_periodic_configuration_what_was_said_is_sent(
    config: PeriodicCheckpointConfig, said: dict[str, str]
) -> None:
    sent = submission.variables(trainer(periodic_checkpoint_config=config), None)
    assert {
        name: value for name, value in sent.items() if name in {s.variable for s in settings.PERIODIC}
    } == said


def test_without_jit_no_signal_is_answered_and_the_grace_stays_the_clusters() -> None:
    without = trainer(enable_jit_checkpoint=False)
    sent = submission.variables(without, "/x")
    assert (sent["LASTCALL_ENABLED"], sent["LASTCALL_SIGNALS"]) == (
        "1",
        "none",
    ) and "LASTCALL_GRACE_SECONDS" not in sent
    patch = submission.runtime_patch(without, locations.parse(DIRECTORY))
    assert patch is not None and "terminationGracePeriodSeconds" not in str(patch)


def test_with_nothing_asked_for_lastcall_is_off() -> None:
    nothing = trainer(
        enable_jit_checkpoint=False, enable_progress_tracking=False, output_dir=None, package=None
    )
    assert submission.variables(nothing, None)["LASTCALL_ENABLED"] == "0"
    assert submission.job_annotations(nothing) == {} and submission.runtime_patch(nothing, None) is None


def test_lastcall_is_installed_unless_the_user_has_said_how() -> None:
    version = trainer().package
    assert version is not None and version.startswith("lastcall==")
    assert submission.packages(trainer(packages_to_install=["datasets"])) == ["datasets", version]
    assert submission.packages(trainer(packages_to_install=["lastcall @ file:///x.whl"])) == [
        "lastcall @ file:///x.whl"
    ]
    assert submission.packages(trainer(packages_to_install=["lastcallable"])) == ["lastcallable", version]
    assert submission.packages(trainer(package=None)) is None


def test_the_environment_of_whoever_submits_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "LASTCALL_KILL_WAIT_SECONDS", "soon")
    assert "LASTCALL_KILL_WAIT_SECONDS" not in submission.variables(trainer(), None)
