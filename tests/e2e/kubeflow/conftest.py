from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from helpers.kubeflow import local as kubeflow_local


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder: Path = tmp_path_factory.mktemp("wheels")
    return kubeflow_local.wheels(folder)


@pytest.fixture
def jobs(wheels: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> kubeflow_local.Jobs:
    # a job that fails leaves its virtual environment behind
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return kubeflow_local.Jobs(*wheels)
