from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from lastcall import errors


def test_a_config_error_is_a_value_error_and_a_system_exit_with_code_78() -> None:
    error = errors.ConfigError("grace=-1 is negative")
    assert isinstance(error, errors.LastcallError)
    assert isinstance(error, ValueError)
    assert isinstance(error, SystemExit)
    assert error.code == errors.EXIT_CONFIG == 78
    assert str(error) == "grace=-1 is negative"


@pytest.mark.parametrize(
    ("kind", "parents"),
    [
        (errors.StateError, (errors.LastcallError, TypeError)),
        (errors.MismatchError, (errors.LastcallError, ValueError)),
        (errors.CheckpointError, (errors.LastcallError, ValueError)),
        (errors.UncheckedError, (errors.CheckpointError,)),
        (errors.SaveError, (errors.LastcallError,)),
        (errors.NoSpaceError, (errors.SaveError,)),
        (errors.DeadlineError, (errors.SaveError,)),
        (errors.BusyError, (errors.LastcallError,)),
    ],
)
def test_errors_are_what_their_table_says(
    kind: type[Exception], parents: tuple[type[Exception], ...]
) -> None:
    assert all(issubclass(kind, parent) for parent in parents)
    assert not issubclass(kind, SystemExit)


def test_preempted_carries_the_exit_code_and_reads_as_its_message() -> None:
    leaving = errors.Preempted(75, "saved step 12, leaving")
    assert isinstance(leaving, SystemExit)
    assert not isinstance(leaving, Exception)  # `except Exception` in a training loop must not swallow it
    assert leaving.code == 75
    assert str(leaving) == "saved step 12, leaving"


def test_a_config_error_survives_a_process_boundary() -> None:
    copy = pickle.loads(pickle.dumps(errors.ConfigError("wrong")))
    assert isinstance(copy, errors.ConfigError) and copy.code == 78 and str(copy) == "wrong"


@pytest.mark.parametrize(
    ("raised", "code"), [("errors.Preempted(75, 'saved')", 75), ("errors.ConfigError('wrong')", 78)]
)
def test_an_uncaught_one_ends_the_process_with_its_code_and_no_traceback(raised: str, code: int) -> None:
    script = f"from lastcall import errors; raise {raised}"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (code, "")
