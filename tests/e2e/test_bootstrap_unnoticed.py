"""A Python process that never trains behaves below `lastcall run` as it does without it: what it says, and
how it ends."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import textwrap
import urllib.request
from pathlib import Path

import pytest

from helpers.processes import forkserver as nursery
from helpers.processes.interpreters import below, outside, run

TESTS = """
    import os, sys, warnings
    import pytest

    def test_passes(tmp_path):
        assert tmp_path.is_dir()

    def test_a_child_of_it(tmp_path):
        import subprocess
        assert subprocess.check_output([sys.executable, "-c", "print(1)"]) == b"1\\n"

    def test_modules_are_restored(pytester):
        pytester.makepyfile("def test_inner(): import json")
        pytester.runpytest("-p", "no:cacheprovider").assert_outcomes(passed=1)

    def test_fails():
        assert 1 == 2
"""
PROGRAM = """
    import sys, threading, signal, logging, argparse
    print(sys.argv, sys.flags, sorted(signal.getsignal(s) is not signal.SIG_DFL for s in (2, 15)))
    print([t.name for t in threading.enumerate()], logging.root.handlers, sys.excepthook is sys.__excepthook__)
    print(sys.path, sys.warnoptions, __file__, __name__, __spec__)
    print("to stderr", file=sys.stderr)
    raise KeyError("a traceback")
"""  # noqa: E501
UNIT = """
    import unittest
    class Case(unittest.TestCase):
        def test_one(self): self.assertEqual(1, 1)
        def test_two(self): self.assertEqual(1, 2)
"""
PLUGIN = ["-p", "pytester", "-p", "no:cacheprovider"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, source in (
        ("test_suite.py", TESTS),
        ("program.py", PROGRAM),
        ("unit.py", UNIT),
        ("data.json", '{"b": [1, 2]}'),
    ):
        (tmp_path / name).write_text(textwrap.dedent(source))
    return tmp_path


def plain(text: str) -> str:
    """Without what differs from one run to the next: seconds and addresses."""
    return re.sub(r"\b\d+\.\d+s\b|0x[0-9a-f]+|pytest-\d+", "...", text)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["-c", "print('hello')"], 0),
        (["-c", "import sys; sys.exit(3)"], 3),
        (["-c", "import os; os.kill(os.getpid(), 15)"], -signal.SIGTERM),
        (["-c", "import sitecustomize"], 1),
        (["program.py", "--some", "arguments"], 1),
        (["-X", "dev", "-W", "error", "program.py"], 1),
        (["-O", "-B", "-u", "program.py"], 1),
        (["-m", "program"], 1),
        (["-m", "json.tool", "data.json"], 0),
        (["-m", "json.tool", "missing.json"], 2),
        (["-m", "compileall", "-f", "."], 0),
        (["-m", "py_compile", "program.py"], 0),
        (["-m", "unittest", "unit"], 1),
        (["-m", "pytest", *PLUGIN, "test_suite.py"], 1),
        (["-m", "site"], 0),
        (["-m", "timeit", "-n", "1", "-r", "1", "-s", "pass", "x"], 1),
        (["-m", "nowhere_to_be_found"], 1),
        (["missing.py"], 2),
        (["-"], 0),
        (["-V"], 0),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_it_says_the_same_and_ends_the_same(folder: Path, arguments: list[str], code: int) -> None:
    without, other = (
        run(
            sys.executable,
            *arguments,
            env=env(PYTHONPATH="/nowhere"),
            cwd=folder,
            input="print('from stdin')\n",
        )
        for env in (outside, below)
    )
    assert without.returncode == code, without.stderr
    assert (other.returncode, plain(other.stdout), plain(other.stderr)) == (
        code,
        plain(without.stdout),
        plain(without.stderr),
    )


def test_a_tool_reads_its_input_and_writes_its_output_untouched(folder: Path) -> None:
    source = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()[::-1])"
    data = bytes(range(256)) * 1000
    for env in (outside(), below()):
        done = subprocess.run(
            [sys.executable, "-c", source], input=data, env=env, capture_output=True, check=True
        )
        assert (done.stdout, done.stderr) == (data[::-1], b"")


def served(folder: Path, env: dict[str, str]) -> tuple[int, bytes, int, str]:
    """What a server answers, and how it ends when it is told to."""
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"]
    with subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None and server.stderr is not None
            port = re.search(r"port (\d+)", server.stdout.readline())
            assert port is not None
            with urllib.request.urlopen(
                f"http://127.0.0.1:{port[1]}/data.json", timeout=nursery.PATIENCE
            ) as answer:
                status, body = answer.status, answer.read()
            server.send_signal(signal.SIGTERM)
            code = server.wait(nursery.PATIENCE)
            return status, body, code, re.sub(r"\[.*\]", "", server.stderr.read())
        finally:
            server.kill()


def test_a_server_answers_and_ends_on_sigterm_as_ever(folder: Path) -> None:
    without, other = served(folder, outside()), served(folder, below())
    assert other == without
    assert without[:3] == (200, b'{"b": [1, 2]}', -signal.SIGTERM)


def test_torch_is_imported_with_nothing_of_ours_but_its_rendezvous_until_torchrun_is(folder: Path) -> None:
    source = """
        import sys, torch, torch.utils.data, torch.distributed
        print(sorted(name for name in sys.modules if name.startswith("lastcall")))
        import torch.distributed.elastic.multiprocessing.api as api
        print(hasattr(api.PContext.close, "_lastcall_original"), type(api.__loader__).__name__)
        print([type(finder).__name__ for finder in sys.meta_path if type(finder).__module__ != "lastcall.auto.imports"])
    """  # noqa: E501
    (folder / "torch_only.py").write_text(textwrap.dedent(source))
    without, other = (run(sys.executable, "torch_only.py", env=env(), cwd=folder) for env in (outside, below))
    loaded = (
        "['lastcall', 'lastcall.auto', 'lastcall.auto.attempts', 'lastcall.auto.bootstrap', "
        "'lastcall.auto.imports', 'lastcall.core', 'lastcall.core.process', 'lastcall.core.process.patching']"
    )
    assert (without.returncode, other.returncode) == (0, 0), other.stderr
    assert without.stderr == other.stderr
    (nothing, before, finders), (waiting, after, others) = (
        done.stdout.splitlines() for done in (without, other)
    )
    assert (nothing, waiting) == ("[]", loaded)
    # ours still waits for the frameworks
    assert after == before.replace("False", "True") and others == finders
