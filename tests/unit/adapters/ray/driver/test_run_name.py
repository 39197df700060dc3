from __future__ import annotations

import itertools
import json
import logging
from dataclasses import dataclass

import pytest

from lastcall.adapters.ray.driver import run_name

DATED = "ray_train_run-2026-11-15_20-44-32"


@dataclass
class Config:
    name: str


@pytest.fixture(autouse=True)
def first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_name, "_runs", itertools.count(1))


def job(submission: object, **env: str) -> dict[str, str]:
    return {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"metadata": {"job_submission_id": submission}}), **env}


KUBERAY = {"RAY_USAGE_STATS_KUBERAY_IN_USE": "1"}


def test_a_name_that_was_given_stays() -> None:
    config = Config("exp1")
    run_name.pin(config, "other", {})
    assert config.name == "exp1"


def test_a_run_without_a_name_is_called_as_the_setting_says() -> None:
    config = Config(DATED)
    run_name.pin(config, "exp1", job("other"))
    assert config.name == "exp1"


def test_a_rayjob_gives_its_name_without_what_changes_with_every_submission() -> None:
    config = Config(DATED)
    run_name.pin(config, None, job("llama-tune-x7k2p", **KUBERAY))
    assert config.name == "llama-tune"


def test_an_id_that_a_person_gave_is_taken_as_it_is() -> None:
    config = Config(DATED)
    run_name.pin(config, None, job("llama-tune-x7k2p"))
    assert config.name == "llama-tune-x7k2p"


def test_the_second_run_of_a_script_has_a_name_of_its_own() -> None:
    configs = [Config(DATED), Config(DATED)]
    for config in configs:
        run_name.pin(config, "exp1", {})
    assert [config.name for config in configs] == ["exp1", "exp1-2"]


@pytest.mark.parametrize(
    "environ", [{}, job("raysubmit_Zx81"), job(7), {"RAY_JOB_CONFIG_JSON_ENV_VAR": "no json"}]
)
def test_where_no_name_can_last_the_user_is_told_what_that_costs(
    environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(DATED)
    with caplog.at_level(logging.WARNING, "lastcall"):
        run_name.pin(config, None, environ)
    assert config.name == DATED
    assert "starts from scratch" in caplog.text and "export LASTCALL_RUN_ID=" in caplog.text


def test_a_run_whose_folder_is_in_use_already_keeps_its_name() -> None:
    config = Config(DATED)
    config.storage_context = object()  # type: ignore[attr-defined]
    run_name.pin(config, "exp1", {})
    assert config.name == DATED
