from __future__ import annotations

from pathlib import Path

import pytest

from lastcall import settings


def test_an_unknown_variable_is_answered_with_the_nearest_known_name() -> None:
    environ = {
        "LASTCALL_KILL_WAIT": "secret",
        "LASTCALL_GRACE_SECONDS": "3",
        "PATH": "/bin",
        "LASTCALL_SIGNAL": "x",
    }
    first, second = settings.unknown_variables(environ)
    assert first.startswith("LASTCALL_KILL_WAIT is not a setting") and first.endswith(
        "LASTCALL_KILL_WAIT_SECONDS?"
    )
    assert second.endswith("LASTCALL_SIGNALS?")
    assert "secret" not in first
    assert (
        settings.unknown_variables({"RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT": "1", "LASTCALL_RUN_ID": "exp1"})
        == []
    )


def test_the_registry_is_where_the_launcher_says_if_it_is_there(tmp_path: Path) -> None:
    assert settings.registry_folder({}) is None
    assert settings.registry_folder({"LASTCALL_REGISTRY": str(tmp_path / "gone")}) is None
    assert settings.registry_folder({"LASTCALL_REGISTRY": str(tmp_path)}) == tmp_path
    assert settings.unknown_variables({"LASTCALL_REGISTRY": "x"}) == []


def test_kubeflow_says_where_it_wants_to_be_told_of_the_progress() -> None:
    url, token = (
        {"KUBEFLOW_TRAINER_SERVER_URL": "https://trainer:8082/x"},
        {"KUBEFLOW_TRAINER_SERVER_TOKEN": "/var/token"},
    )
    assert settings.status_server({}) is settings.status_server(url) is settings.status_server(token) is None
    assert settings.status_server({**url, **token}) == settings.StatusServer(
        "https://trainer:8082/x", None, "/var/token"
    )
    whole = settings.status_server({**url, **token, "KUBEFLOW_TRAINER_SERVER_CA_CERT": "/var/ca.crt"})
    assert whole is not None and whole.ca_file == "/var/ca.crt"


def test_a_variable_without_its_unit_is_told_the_one_that_was_meant() -> None:
    (told,) = settings.unknown_variables({"LASTCALL_GRACE": "30"})
    assert told.endswith("Did you mean LASTCALL_GRACE_SECONDS?")


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, "/dev/termination-log"),
        ({"LOCAL_RANK": "0"}, "/dev/termination-log"),
        ({"LOCAL_RANK": "1"}, None),
        ({"LASTCALL_TERMINATION_LOG": "/tmp/bye"}, "/tmp/bye"),
        ({"LASTCALL_TERMINATION_LOG": " "}, "/dev/termination-log"),
    ],
)
def test_one_rank_of_a_container_has_the_message(environ: dict[str, str], found: str | None) -> None:
    assert settings.termination_log(environ) == found
