from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from helpers.processes.forkserver import until
from lastcall.launch.shell import commandline, outline, scripts


def of(text: str, shell: str = "bash", options: str = "") -> scripts.ShellScript:
    return scripts.ShellScript("entry.sh", "entry.sh", shell, options, tuple(outline.read(text)))


@pytest.mark.parametrize(
    "text",
    [
        "exec python train.py",
        "#!/bin/bash\n# it's a comment\npython prepare.py\nexec torchrun train.py  # 'quoted",
        "cat <<EOF\npython not.py\nEOF\nexec python train.py",
        "exec lastcall run -- python train.py",
        'exec "$@"',
        "A=1 B=2 exec python train.py",
    ],
)
def test_a_shell_that_execs_the_training_does_not_stay(text: str) -> None:
    script = of(text)
    assert script.training is not None and not script.stays
    assert script.swallows() is None


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("python train.py", 1, ("python", "train.py")),
        ("cd x &&\\\n  python \\\n  train.py --a 'b c'", 1, ("python", "train.py", "--a", "b c")),
        (
            "\n\nCUDA_VISIBLE_DEVICES=0 /usr/bin/python3.11 train.py 2>&1 >log",
            3,
            ("/usr/bin/python3.11", "train.py"),
        ),
        ("if true; then\n  torchrun a.py\nfi", 2, ("torchrun", "a.py")),
        ("V=$(python --version)\nNAME='a\nb'\naccelerate launch a.py", 4, ("accelerate", "launch", "a.py")),
        ("lastcall doctor runs\nlastcall run -- python a.py", 2, ("lastcall", "run", "--", "python", "a.py")),
        ("python a.py --n ${#list}", 1, ("python", "a.py", "--n", "${#list}")),
    ],
)
def test_the_training_is_found_in_a_script_that_stays(text: str, line: int, words: tuple[str, ...]) -> None:
    script = of(text)
    assert script.training is not None and script.stays
    assert (script.training.line, script.training.words) == (line, words)


@pytest.mark.parametrize(
    "text", ["", "echo hello", "V=$(python --version)", "echo 'unclosed\npython train.py", "lastcall doctor"]
)
def test_where_nothing_is_known_to_train_nothing_is_claimed(text: str) -> None:
    script = of(text)
    assert script.training is None and not script.stays and script.swallows() is None


# Each is run by a real bash, with a `python` that fails with 75: what the doctor says of the exit code is
# what happens.
LOST = [
    "python train.py || true",
    "python train.py || echo failed",
    "python train.py || :",
    "(python train.py) || true",
    "python train.py | tee log",
    "python train.py 2>&1 | tee log | cat",
    "python train.py; exit 0",
    "python train.py\necho done",
    "python train.py &\nwait",
    "python train.py & sleep 0",
    "set -e\npython train.py || true",
    "set -e\npython train.py | tee log",
    "python train.py && echo yes\necho done",
]
KEPT = [
    "python train.py",
    "cd . && python train.py",
    "set -e\npython train.py\necho done",
    "set -euo pipefail\npython train.py | tee log\necho done",
    "set -o pipefail\npython train.py | tee log",
    "python train.py && echo yes",
    "python train.py\nexit $?",
    "python train.py\ncode=$?\necho $code\nexit $code",
    "python train.py || exit 75",
    "python train.py || { echo failed; exit 75; }",
    "python train.py & wait $!",
    "trap 'kill $P' TERM\npython train.py & P=$!\nwait $P",
]


@pytest.mark.parametrize("text", LOST + KEPT)
def test_an_exit_code_is_called_lost_exactly_where_bash_loses_it(text: str, tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\nexit 75\n")
    fake.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", text], cwd=tmp_path, env=environ, capture_output=True, timeout=60)
    assert (done.returncode == 0) == (of(text).swallows() is not None) == (text in LOST)


@pytest.mark.parametrize(
    "text",
    [
        "if python train.py; then echo yes; fi",
        "while ! python train.py; do sleep 1; done",
        "! python train.py",
    ],
)
def test_of_a_code_that_a_condition_takes_nothing_is_claimed(text: str) -> None:
    assert of(text).swallows() is None


def test_errexit_may_come_from_the_command_line_or_the_first_line(tmp_path: Path) -> None:
    text = "python train.py\necho done\n"
    path = tmp_path / "entry.sh"
    path.write_text(text)
    for words in (
        ("bash", "-e", str(path)),
        ("bash", "-o", "errexit", str(path)),
        ("/bin/sh", "-eu", str(path)),
    ):
        script = scripts.of_command(words)
        assert script is not None and script.path == str(path) and script.swallows() is None
    plain = scripts.of_command(("bash", "--norc", str(path)))
    assert plain is not None and plain.swallows() is not None
    path.write_text(f"#!/usr/bin/env -S bash -e\n{text}")
    path.chmod(0o755)
    direct = scripts.of_command((str(path),))
    assert direct is not None and direct.swallows() is None


@pytest.mark.parametrize(
    "text",
    ["{python} {script}", "cd . && {python} {script}", "A=1; {python} {script}", "{python} {script}; true"],
)
@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_a_shell_with_c_stays_exactly_where_it_does(shell: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n")
    text = text.format(python=sys.executable, script=tmp_path / "train.py")
    script = scripts.of_command((shell, "-c", text))
    assert script is not None
    process = subprocess.Popen([shell, "-c", text], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        replaced = int(process.stdout.readline()) == process.pid
        process.stdout.close()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        until(lambda: process.poll() is not None, "the end of the shell")
    assert script.stays or replaced  # never called harmless where it is not
    if shell == "bash":
        assert script.stays == (not replaced)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("bash",), True),
        (("-bash",), True),
        (("bash", "-l"), True),
        (("bash", "x.sh"), False),
        (("bash", "-c", "a"), False),
        (("python",), False),
        ((), False),
    ],
)
def test_a_shell_without_a_script_is_interactive(words: tuple[str, ...], expected: bool) -> None:
    assert scripts.is_interactive(words) is expected


def test_what_is_no_script_is_none(tmp_path: Path) -> None:
    binary, other = tmp_path / "binary", tmp_path / "other.py"
    binary.write_bytes(b"\x7fELF\0\0")
    other.write_text("#!/usr/bin/env python3\n")
    for words in (
        (),
        (str(binary),),
        (str(other),),
        (str(tmp_path),),
        ("bash", "missing.sh"),
        ("bash",),
        ("python", "x.py"),
    ):
        assert scripts.of_command(words) is None


# ---- the command as a whole --------------------------------------------------------------------------------


def test_a_command_is_understood_down_to_the_program(tmp_path: Path) -> None:
    inner = tmp_path / "inner.sh"
    inner.write_text("torchrun --nproc-per-node 8 --shutdown-timeout=90 train.py\n")
    launch = commandline.understand(("env", "A=1", "bash", "-c", f"exec bash {inner}"), {})
    assert launch.words[0] == "torchrun" and launch.torchrun and not launch.wrapped
    assert [script.path for script in launch.shells] == [None, str(inner)]
    assert (
        launch.option("--shutdown-timeout") == "90"
        and launch.option("--nproc-per-node") == "8"
        and launch.option("--rdzv") is None
    )


def test_shells_below_lastcall_run_are_not_in_the_way(tmp_path: Path) -> None:
    launch = commandline.understand(
        (
            "python",
            "-m",
            "lastcall",
            "run",
            "--grace=60",
            "--guard",
            "--",
            "bash",
            "-c",
            "python x.py || true",
        ),
        {},
    )
    assert launch.wrapped and launch.shells == () and launch.words == ("python", "x.py")
    assert dict(launch.options) == {"--grace": "60", "--guard": ""}
    outside = commandline.understand(("bash", "-c", "lastcall run -- python x.py || true"), {})
    assert outside.wrapped and len(outside.shells) == 1 and outside.words == ("python", "x.py")


def test_a_doctor_below_lastcall_run_knows_it(tmp_path: Path) -> None:
    assert commandline.understand(("python", "x.py"), {"LASTCALL_REGISTRY": str(tmp_path)}).wrapped
    assert not commandline.understand(
        ("python", "x.py"), {"LASTCALL_REGISTRY": str(tmp_path / "gone")}
    ).wrapped


def test_no_command_is_understood_too() -> None:
    assert commandline.understand((), {}) == commandline.Launch()
    assert commandline.understand(("lastcall", "run"), {}).words == ()


def test_a_script_that_calls_itself_ends(tmp_path: Path) -> None:
    path = tmp_path / "again.sh"
    path.write_text(f"#!/bin/sh\nexec lastcall run -- {path}\n")
    path.chmod(0o755)
    assert commandline.understand((str(path),), {}).wrapped


_PIECES = [
    "python t.py",
    "||",
    "|",
    "&&",
    "&",
    ";",
    "\n",
    "exec",
    "(",
    ")",
    "{",
    "}",
    "$(",
    "'",
    '"',
    "\\",
    "\\\n",
    "<<EOF\n",
    "EOF",
    "if",
    "then",
]
_PIECES += [
    "fi",
    "# c",
    "true",
    "exit 0",
    "wait",
    "$!",
    "A=1",
    ">x",
    "2>&1",
    '"$@"',
    "set -e",
    "lastcall run --",
    "bash -c",
    "`",
    "$",
    "\0",
    " ",
]


@hypothesis.given(st.lists(st.sampled_from(_PIECES), max_size=16))
@hypothesis.settings(max_examples=300, deadline=None)
def test_no_text_whatever_makes_it_fail(pieces: list[str]) -> None:
    launch = commandline.understand(("sh", "-c", " ".join(pieces)), {})
    for script in launch.shells:
        assert script.stays in (True, False) and script.traps in (True, False)
        assert script.swallows() is None or script.training is not None
