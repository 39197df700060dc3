from __future__ import annotations

import logging

import pytest

from lastcall.adapters.ray.driver import versions


@pytest.mark.parametrize("tried", ["2.58.0", "2.60.0", "2.60.3"])
def test_nothing_is_said_of_a_version_that_was_tried(tried: str) -> None:
    assert versions.remark(tried) is None


def test_a_version_without_preemption_is_protected_in_part_and_says_so() -> None:
    assert "max_failures" in (versions.remark("2.51.0") or "") and versions.supported("2.51.0")


@pytest.mark.parametrize("unknown", ["2.46.0", "main"])
def test_a_version_that_is_too_old_is_not_protected(unknown: str) -> None:
    assert not versions.supported(unknown)


def test_a_newer_version_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lastcall"):
        assert versions.supported("2.99.0") and versions.supported("2.99.0")
    assert [record.getMessage() for record in caplog.records] == [versions.remark("2.99.0")]
