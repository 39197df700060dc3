"""Which process was the first to be told of a variable."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from helpers.processes.forkserver import PATIENCE, environment
from lastcall.notices import ancestry

ASK = (
    "import time; from lastcall.notices import ancestry; print(time.time() - "
    "ancestry.began_with('LASTCALL_STOP_FILE', '/tmp/x'))"
)


def ages(command: str, *, given_to_all: bool) -> float:
    """How long ago the oldest bearer began, as seen by a Python below a shell that has slept for a second
    first."""
    env = environment(**({"LASTCALL_STOP_FILE": "/tmp/x"} if given_to_all else {}))
    script = f'sleep 1; {command} {sys.executable} -c "{ASK}"; true'
    done = subprocess.run(
        ["sh", "-c", script], env=env, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    return float(done.stdout)


def test_it_is_the_shell_that_started_the_process_where_that_was_given_the_variable() -> None:
    assert ages("sh -c '\"$@\"; true' -", given_to_all=True) >= 1.0


def test_it_is_the_process_itself_where_the_shell_was_not() -> None:
    began = time.time()
    age = ages("env LASTCALL_STOP_FILE=/tmp/x", given_to_all=False)
    # the shell's second is not in it; the kernel counts in hundredths
    assert age <= time.time() - began - 1.0 + 0.05


def test_a_process_that_is_gone_has_no_parent_and_carries_nothing() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert ancestry.parent_of(child.pid) == 0 and not ancestry.carries(child.pid, "PATH=")


def test_a_process_carries_what_it_was_started_with_and_not_what_it_has_set_since() -> None:
    program = "import os, sys; os.environ['LATER'] = '1'; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program], env={"GIVEN": "1"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        assert ancestry.carries(child.pid, "GIVEN=1") and not ancestry.carries(child.pid, "LATER=1")
        assert not ancestry.carries(child.pid, "GIVEN=") and ancestry.parent_of(child.pid) == os.getpid()
        child.stdin.close()
