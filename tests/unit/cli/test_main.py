from __future__ import annotations

import argparse
import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lastcall
from helpers.cli.harness import Cli, MakeRun
from helpers.processes.forkserver import environment
from lastcall import errors, settings
from lastcall.cli import ls
from lastcall.cli import parser as parsers

NAMES = list(parsers.COMMANDS)


def command(*arguments: object, **more: Any) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "lastcall", *map(str, arguments)]
    return subprocess.run(argv, capture_output=True, text=True, env=environment(), timeout=90, **more)


def failing(error: BaseException) -> Any:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


@pytest.mark.parametrize("name", NAMES)
def test_each_command_has_a_module_that_registers_it_and_explains_itself(name: str, cli: Cli) -> None:
    importlib.import_module(f"lastcall.cli.{parsers.COMMANDS[name][0]}")
    said = cli(name, "--help")
    assert said.code == 0
    assert said.out.startswith(f"usage: lastcall {name}")
    # the commands of `kube` take it; a script for a shell is no document
    assert name in ("kube", "completion") or "--json" in said.out


def test_the_version_is_that_of_the_package(cli: Cli) -> None:
    assert cli("--version").out == f"lastcall {lastcall.__version__}\n"


def test_no_command_is_wrong_usage_and_shows_which_there_are(cli: Cli) -> None:
    said = cli()
    assert (said.code, said.out) == (2, "")
    assert said.err == cli("--help").out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("verfy", "x"), "lastcall: there is no command 'verfy'. Did you mean: lastcall verify?"),
        (("nope",), "lastcall: there is no command 'nope'. List them with: lastcall --help"),
        (("--nope",), "lastcall: there is no option --nope. See: lastcall --help"),
        (("ls",), "lastcall ls: the following arguments are required: DIR. See: lastcall ls --help"),
        (("ls", "x", "--jsn"), "lastcall ls: there is no option --jsn. Did you mean --json?"),
        (("show", "x", "y"), "lastcall show: 'y' is one word too many. See: lastcall show --help"),
        (("kube", "pasue"), "lastcall kube: there is no command 'pasue'. Did you mean: lastcall kube pause?"),
        (
            ("export", "x", "y", "--format", "pts"),
            "lastcall export: --format: 'pts' is not one of safetensors, pt. Did you mean pt?",
        ),
        (("run", "--grce", "5", "--", "x"), "lastcall run: there is no option --grce. Did you mean --grace?"),
        (
            ("watch", "x", "--interval", "-1"),
            "lastcall watch: --interval: '-1' is negative. For example: 30",
        ),
        (
            ("prune", "x", "--keep", "0"),
            "lastcall prune: --keep: '0' is not a whole number of at least 1. For example: 3",
        ),
        (
            ("kube", "webhook", "--port", "x"),
            "lastcall kube webhook: --port: 'x' is not a port. For example: 8443",
        ),
        (("completion", "tcsh"), "lastcall completion: SHELL: 'tcsh' is not one of bash, zsh, fish"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_one_line_with_what_to_type(
    arguments: tuple[str, ...], line: str, cli: Cli
) -> None:
    said = cli(*arguments)
    assert (said.code, said.out, said.err) == (2, "", f"{line}\n")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (errors.LastcallError("it is\n so"), 1, "lastcall: it is so\n"),
        (errors.BusyError("in use"), 1, "lastcall: in use\n"),
        (
            PermissionError(13, "Permission denied", "/x"),
            1,
            "lastcall: /x: Permission denied. See who may use it: ls -ld /x\n",
        ),
        (FileNotFoundError(2, "No such file", "/x"), 1, "lastcall: /x: No such file. Check the path.\n"),
        (OSError(28, "No space left", "/x"), 1, "lastcall: /x: No space left. See what is free: df -h /x\n"),
        (OSError(5, "Input/output error", "/x"), 1, "lastcall: /x: Input/output error\n"),
        (OSError("odd"), 1, "lastcall: odd\n"),
        (SystemExit("words"), 1, "lastcall: words\n"),
        (SystemExit(None), 0, ""),
        (errors.Preempted(75, "saved"), 75, ""),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    error: BaseException, code: int, line: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ls, "run", failing(error))
    said = cli("ls", "x")
    assert (said.code, said.err) == (code, line)


def test_a_wrong_setting_is_said_once_and_leaves_with_78(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ls, "run", lambda args: settings.fail("LASTCALL_X=1 is wrong"))
    said = cli("ls", "x")
    assert (said.code, said.err) == (78, "lastcall: LASTCALL_X=1 is wrong\n")


def test_a_fault_of_our_own_is_not_hidden(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ls, "run", failing(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli("ls", "x")


def test_help_imports_no_command_and_nothing_heavy() -> None:
    source = """
    import sys
    from lastcall.cli.main import main
    main(["--help"])
    loaded = [name for name in sys.modules if name.startswith("lastcall.c") and name not in ("lastcall.cli", "lastcall.cli.main", "lastcall.cli.parser")]
    assert loaded == [], loaded
    assert not {"torch", "numpy", "ctypes", "threading", "logging"} & set(sys.modules)
    """  # noqa: E501
    source = "\n".join(line.strip() for line in source.splitlines())
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, env=environment(), timeout=90
    )
    assert done.returncode == 0, done.stderr


def test_the_reading_commands_work_where_torch_and_numpy_are_not_installed(make_run: MakeRun) -> None:
    root = make_run("run", 1, 2)
    source = f"""
    import sys
    for name in ("torch", "numpy", "safetensors"):
        sys.modules[name] = None  # importing it is an ImportError
    from lastcall.cli.main import main
    for words in ("ls", "show", "verify", "prune --keep 2", "watch --once", "pause --wait", "resume"):
        name, *more = words.split()
        for extra in ([], ["--json"]):
            assert main([name, {str(root)!r}, *more, *extra]) == 0, words
    """
    source = "\n".join(line.removeprefix("    ") for line in source.splitlines())
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, env=environment(), timeout=90
    )
    assert done.returncode == 0, done.stderr


def test_a_reader_that_leaves_early_is_no_error(make_run: MakeRun) -> None:
    roots = [make_run(f"run-{n}", 1) for n in range(3)]
    process = subprocess.Popen(
        [sys.executable, "-m", "lastcall", "ls", *map(str, roots * 20)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(PYTHONUNBUFFERED=""),
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()  # before it has written anything
    assert process.wait(90) == 128 + signal.SIGPIPE
    assert process.stderr.read() == b""
    process.stderr.close()


def test_a_terminal_that_knows_only_ascii_gets_the_rest_escaped(make_run: MakeRun) -> None:
    root = make_run("run", 1, reason="geräumt")
    argv = [sys.executable, "-m", "lastcall", "ls", str(root)]
    done = subprocess.run(argv, capture_output=True, env=environment(PYTHONIOENCODING="ascii"), timeout=90)
    assert done.returncode == 0, done.stderr
    assert b"ger\\xe4umt" in done.stdout


def test_ctrl_c_ends_a_watch_with_130_and_without_a_traceback(make_run: MakeRun) -> None:
    root = make_run("run", 1)
    argv = [sys.executable, "-u", "-m", "lastcall", "watch", str(root), "--forever", "--json"]
    process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith('{"schema": 1')
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=90)
    assert (process.returncode, err) == (130, "")


def test_it_runs_as_a_module_in_a_directory_of_runs(make_run: MakeRun) -> None:
    root = make_run("runs/a", 5)
    done = command("ls", ".", cwd=root.parent)
    assert done.returncode == 0, done.stderr
    assert "checkpoint-5" in done.stdout


OTHERS = (
    "run",
    "doctor",
    "kube",
    "drill",
    "completion",
)  # they take no directory, or one that need not exist


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OTHERS])
def test_a_directory_that_is_not_there_or_holds_no_run_is_said_clearly(
    name: str, cli: Cli, tmp_path: Path
) -> None:
    more = {"prune": ["--keep", "2"], "export": [str(tmp_path / "out")]}.get(name, [])
    said = cli(name, tmp_path / "none", *more)
    assert (said.code, said.out) == (1, "")
    assert (
        said.err
        == f"lastcall: {tmp_path / 'none'} does not exist. Give the directory that was passed to protect().\n"
    )
    (tmp_path / "file").touch()
    assert "is a file" in cli(name, tmp_path / "file", *more).err
    (tmp_path / "empty" / "below").mkdir(parents=True)
    said = cli(name, tmp_path / "empty", *more)
    assert said.code == 1
    assert said.err.startswith(f"lastcall: {tmp_path / 'empty'} contains no run")
