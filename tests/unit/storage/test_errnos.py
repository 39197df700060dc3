"""What an errno means for a checkpoint: damage, a moment that passes, or the end of the start."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator

import pytest

from lastcall import errors
from lastcall.storage import errnos

GONE = (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.ENOTDIR)
MEDIUM = (errno.EIO, errno.ENODATA, errno.EUCLEAN, errno.EREMOTEIO, errno.EILSEQ, errno.EBADMSG)
PASSING = (
    errno.ESTALE,
    errno.EACCES,
    errno.EPERM,
    errno.EMFILE,
    errno.ENFILE,
    errno.ETIMEDOUT,
    errno.EINTR,
    errno.EAGAIN,
    errno.ENOMEM,
    errno.ENOTCONN,
    errno.EBUSY,
    errno.EHOSTDOWN,
    9999,
)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errnos, "WAITS", (0.0, 0.0))


def failing(code: int, times: int = 100) -> tuple[Callable[[], str], list[int]]:
    calls: list[int] = []

    def operation() -> str:
        calls.append(code)
        if len(calls) <= times:
            raise OSError(code, os.strerror(code))
        return "bytes"

    return operation, calls


@pytest.mark.parametrize("code", GONE)
def test_what_is_gone_is_damage_at_once(code: int) -> None:
    operation, calls = failing(code)
    with pytest.raises(errors.CheckpointError, match="model cannot be opened") as caught:
        errnos.reading(operation, "model cannot be opened")
    assert not isinstance(caught.value, errors.UncheckedError) and len(calls) == 1


@pytest.mark.parametrize("code", MEDIUM)
def test_c3_what_the_medium_does_not_give_back_is_damage_after_it_was_tried_again(code: int) -> None:
    operation, calls = failing(code)
    with pytest.raises(errors.CheckpointError) as caught:
        errnos.reading(operation, "model cannot be read")
    assert not isinstance(caught.value, errors.UncheckedError) and len(calls) == 3


@pytest.mark.parametrize("code", PASSING)
def test_c2_what_passes_is_tried_again_and_then_says_nothing_about_the_bytes(code: int) -> None:
    operation, calls = failing(code, times=2)
    assert errnos.reading(operation, "model cannot be opened") == "bytes"
    operation, calls = failing(code)
    with pytest.raises(
        errors.UnreadableError,
        match=r"model cannot be opened: .*neither continues "
        r"without.*Start it again",
    ):
        errnos.reading(operation, "model cannot be opened")
    assert len(calls) == 3


def test_c2_what_no_second_attempt_changes_stops_at_once() -> None:
    operation, calls = failing(errno.EINVAL)
    with pytest.raises(errors.UnreadableError, match="EINVAL"):
        errnos.reading(operation, "model cannot be opened")
    assert len(calls) == 1


def test_c2_a_permission_stays_a_permission_error() -> None:
    with pytest.raises(PermissionError, match="may not read it"):
        errnos.reading(failing(errno.EACCES)[0], "model cannot be opened")


def test_every_row_has_its_reason() -> None:
    def rows() -> Iterator[errnos.Row]:
        yield from errnos.TABLE.values()

    assert all(len(row.why) > 5 for row in rows())
    assert {row.meaning for row in rows()} == set(errnos.Meaning)
    assert not any(row.again for row in rows() if row.meaning is errnos.Meaning.FATAL)
