"""`lastcall run` around real processes: signals, the middle shell, zombies, exit codes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.scripts.launch_harness import MEMBER, SCRIPTS, Launched, children, in_session, script
from helpers.processes import interruption_chain as chain
from helpers.processes.forkserver import environment, until
from lastcall import testing

TRAIN = SCRIPTS / "launch_train.py"


def entrypoint(folder: Path, steps: int) -> Path:
    """As in the Run:ai seed: the shell stays in between, and its last line hides the exit code."""
    train = f"{sys.executable} {TRAIN} {folder / 'run'} {folder / 'result'} {steps}"
    return script(
        folder, "entrypoint.sh", f"#!/bin/bash\necho starting\n{train}\ncode=$?\necho ended $code\n"
    )


@pytest.mark.parametrize(
    ("platform", "code"), [pytest.param("auto", 75, marks=pytest.mark.smoke), ("runai", 1)]
)
def test_a_training_below_a_shell_saves_on_sigterm_and_resumes(
    tmp_path: Path, platform: str, code: int
) -> None:
    with Launched(tmp_path, [entrypoint(tmp_path, 100_000)], "--platform", platform) as first:
        first.expect("at 3")
        first.send()
        assert first.wait() == code, first.log()
        assert f"ended {code}" in first.lines()
    entry = testing.assert_resumable(tmp_path / "run", exact=True)
    assert (entry.record.kind.value, entry.record.reason) == ("jit", "SIGTERM")
    assert f"Exit code {code}: stopped and saved in run/{entry.path.name}" in first.log()
    with Launched(tmp_path, [entrypoint(tmp_path, entry.record.step + 5)], "--platform", platform) as second:
        assert second.expect("resumed") == str(entry.record.step)
        assert second.wait() == 0, second.log()
    assert "Exit code 0: training finished" in second.log()


def test_the_kill_of_the_middle_shell_ends_nothing(tmp_path: Path) -> None:
    with Launched(tmp_path, [entrypoint(tmp_path, 100_000)]) as launched:
        launched.expect("at 3")
        (shell,) = children(launched.pid)
        trainer = int(launched.expect("pid"))
        os.kill(shell, signal.SIGKILL)
        launched.expect_log(f"The command has ended (SIGKILL), but process {trainer} below it still runs")
        assert trainer in children(launched.pid)
        before = chain.position(launched)
        until(lambda: chain.position(launched) > before + 3, "steps without the shell")
        launched.send()
        assert launched.wait() == 75, launched.log()
    testing.assert_resumable(tmp_path / "run", exact=True)


def test_the_kill_of_the_middle_shell_before_the_training_has_joined_ends_nothing(tmp_path: Path) -> None:
    command = ["bash", "-c", f"{' '.join(MEMBER)} run --steps 5 --late go; true"]
    with Launched(tmp_path, command) as launched:
        launched.expect("started")
        (shell,) = children(launched.pid)
        os.kill(shell, signal.SIGKILL)
        launched.expect_log("still runs: waiting for the end")
        (tmp_path / "go").touch()
        assert launched.wait() == 137, launched.log()
        assert "left finished" in launched.lines()


def test_dataloader_workers_are_not_signalled(tmp_path: Path) -> None:
    command = [sys.executable, TRAIN, tmp_path / "run", tmp_path / "result", 100_000, 2]
    with Launched(tmp_path, command) as launched:
        launched.expect("at 3")
        assert len(children(int(launched.expect("pid")))) >= 2
        launched.send()
        assert launched.wait() == 75, launched.log()
        assert "DataLoader worker" not in launched.log()
        until(lambda: not in_session(launched.pid), "the end of the workers")
    testing.assert_resumable(tmp_path / "run", exact=True)


WORKERS = """
import multiprocessing, os, signal, sys, time

def say(line):
    os.write(1, f"{line}\\n".encode())  # in one piece: three processes have this output

def work(method, parent):
    signal.signal(signal.SIGTERM, lambda *_: say("worker heard"))
    say(f"worker {method}")
    while os.getppid() == parent:
        time.sleep(0.01)

def end(*_):
    say("main heard")
    time.sleep(0.5)
    say("main leaves")
    os._exit(7)

if __name__ == "__main__":
    for method in ("fork", "spawn"):
        multiprocessing.get_context(method).Process(target=work, args=(method, os.getpid())).start()
    signal.signal(signal.SIGTERM, end)
    while True:
        time.sleep(0.01)
"""


def test_without_training_the_signal_goes_to_all_but_the_children_of_multiprocessing(tmp_path: Path) -> None:
    path = tmp_path / "server.py"
    path.write_text(WORKERS)
    with Launched(
        tmp_path, ["bash", "-c", f"trap 'echo shell heard' TERM; {sys.executable} {path}; exit $?"]
    ) as launched:
        launched.expect("worker fork")
        launched.expect("worker spawn")
        launched.send()
        assert launched.wait() == 7, launched.log()
        assert launched.lines().index("main leaves") == launched.lines().index("main heard") + 1
        assert "shell heard" in launched.lines()
    assert "no training process has joined, SIGTERM to processes" in launched.log()


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("exit 0", 0),
        ("exit 3", 3),
        ("kill -KILL $$", 137),
        ("kill -TERM $$", 143),
        ("exit 78", 78),
        ("exit 130", 130),
    ],
)
def test_a_plain_command_keeps_its_exit_code_and_nothing_is_said(
    tmp_path: Path, line: str, code: int
) -> None:
    with Launched(tmp_path, ["bash", "-c", line]) as launched:
        assert launched.wait() == code
        assert launched.log() == ""


def test_a_command_that_does_not_exist_is_127_and_one_that_cannot_run_126(tmp_path: Path) -> None:
    plain = tmp_path / "plain.txt"
    plain.write_text("no program")
    for command, code, word in (
        ("no-such-command", 127, "no-such-command: command not found"),
        (plain, 126, f"{plain} is not executable. Run: chmod +x {plain}"),
        (tmp_path, 126, "is a directory"),
        (script(tmp_path, "bare", "echo 1\n"), 126, "has no #! line"),
        (script(tmp_path, "lost", "#!/no/such/interpreter\n"), 127, "No such file or directory"),
    ):
        with Launched(tmp_path, [command]) as launched:
            assert launched.wait() == code
            assert word in launched.log()


def test_bad_options_are_78_with_a_remedy() -> None:
    for words, message in (
        (["run"], "for example: lastcall run -- python train.py"),
        (["run", "--grace", "soon", "--", "true"], "--grace 'soon' is not a number of seconds"),
        (["run", "--platform", "moon", "--", "true"], "auto, runai, kubernetes, slurm, htcondor, plain"),
        (["run", "--exit-code", "0", "--", "true"], "--exit-code 75"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "lastcall", *words],
            capture_output=True,
            text=True,
            env=environment(),
            check=False,
            timeout=60,
        )
        assert done.returncode == 78
        assert message in done.stderr


def test_stdin_and_stdout_pass_through_byte_for_byte(tmp_path: Path) -> None:
    data = bytes(range(256)) * 1000
    command = [sys.executable, "-m", "lastcall", "run", "--cloud", "none", "--", "cat"]
    done = subprocess.run(
        command, input=data, capture_output=True, env=environment(), check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, data, b"")


def test_file_descriptors_that_were_given_reach_the_command(tmp_path: Path) -> None:
    text = f"{sys.executable} -m lastcall run --cloud none -- cat <(echo through) 7<<<seventh /dev/fd/7"
    done = subprocess.run(
        ["bash", "-c", text], capture_output=True, env=environment(), check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, b"through\nseventh\n"), done.stderr


def test_signals_are_neither_blocked_nor_ignored_in_the_command(tmp_path: Path) -> None:
    status = ["grep", "-E", "^Sig(Blk|Ign):", "/proc/self/status"]

    def masks(lines: list[str]) -> list[int]:
        # 32 and 33 belong to the C library, which leaves them ignored after posix_spawn and sets them anew
        internal = 0b11 << 31
        return [int(line.split()[1], 16) & ~internal for line in lines]

    plain = subprocess.run(status, capture_output=True, text=True, check=True).stdout
    with Launched(tmp_path, status) as launched:
        assert launched.wait() == 0
        assert masks(launched.lines()) == masks(plain.splitlines())


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    with Launched(tmp_path, [*MEMBER, "run"], before=["nohup"]) as launched:
        launched.expect("joined")
        launched.send(signal.SIGHUP)
        launched.send()
        assert launched.wait() == 75
        assert "SIGHUP" not in launched.log()


def test_orphans_are_reaped(tmp_path: Path) -> None:
    orphans = "for i in 1 2 3 4 5; do (bash -c 'true & true &' &); done; echo done; read line < <(sleep 1000)"
    with Launched(tmp_path, ["bash", "-c", orphans]) as launched:
        launched.expect("done")
        until(lambda: len(children(launched.pid)) == 1, "the end of the orphans")
        assert "Z" not in children(launched.pid).values()


def test_as_pid_1_it_saves_and_reaps(tmp_path: Path) -> None:
    before = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
    shell = f"(sleep 0.05 & ) ; {' '.join(MEMBER)} run; echo status $?"
    with Launched(tmp_path, ["bash", "-c", shell], before=before) as launched:
        launched.expect("joined")
        (init,) = children(launched.pid)
        until(lambda: len(children(init)) == 1, "the end of the orphan")
        os.kill(init, signal.SIGTERM)
        assert launched.wait() == 75, launched.log()
        assert "status 75" in launched.lines()


def test_two_sigterms_are_one_notice(tmp_path: Path) -> None:
    with Launched(tmp_path, [*MEMBER, "run", "--hold", "go"]) as launched:
        launched.expect("joined")
        launched.send()
        launched.expect("saving")
        launched.send()
        launched.expect("heard SIGTERM", 2)
        (tmp_path / "go").touch()
        assert launched.wait() == 75, launched.log()
        assert launched.lines().count("saving") == 1


def test_sigterm_before_the_training_has_joined_ends_it_with_143(tmp_path: Path) -> None:
    with Launched(tmp_path, ["bash", "-c", f"{' '.join(MEMBER)} run --late never; echo after"]) as launched:
        launched.expect("started")
        launched.send()
        assert launched.wait() == 143, launched.log()
        assert "after" not in launched.lines()
        until(lambda: not in_session(launched.pid), "the end of everything")


def test_a_training_that_joins_after_the_notice_still_hears_of_it(tmp_path: Path) -> None:
    with Launched(tmp_path, ["bash", "-c", f"trap '' TERM; {' '.join(MEMBER)} run --late go"]) as launched:
        launched.expect("started")
        launched.send()
        launched.expect_log("no training process has joined")
        (tmp_path / "go").touch()
        assert launched.wait() == 75, launched.log()
        assert "notice signal SIGTERM" in launched.lines()


def test_a_run_that_could_not_be_saved_is_143_whatever_the_shell_says(tmp_path: Path) -> None:
    with Launched(tmp_path, ["bash", "-c", f"{' '.join(MEMBER)} run --bad; exit 0"]) as launched:
        launched.expect("joined")
        launched.send()
        assert launched.wait() == 143
        assert "Exit code 143: got SIGTERM, and process" in launched.log()


def test_a_failure_is_not_hidden_by_the_last_line_of_a_script(tmp_path: Path) -> None:
    with Launched(tmp_path, ["bash", "-c", f"{' '.join(MEMBER)} run --crash-at 3; echo done"]) as launched:
        assert launched.wait() == 1
        assert "the command ended with exit code 0, but training process" in launched.log()


def test_a_stop_file_is_a_notice(tmp_path: Path) -> None:
    with Launched(tmp_path, [*MEMBER, "run"], "--stop-file", tmp_path / "stop") as launched:
        launched.expect("joined")
        (tmp_path / "stop").touch()
        assert launched.wait() == 75, launched.log()
        assert launched.expect("notice").startswith("stop-file")
        assert not [line for line in launched.lines() if line.startswith("heard")]


def test_a_stop_file_ends_a_command_that_does_not_train(tmp_path: Path) -> None:
    with Launched(
        tmp_path, ["bash", "-c", "echo up; sleep 1000"], "--stop-file", tmp_path / "stop"
    ) as launched:
        launched.expect("up")
        (tmp_path / "stop").touch()
        assert launched.wait() == 143, launched.log()


def test_the_rest_of_the_script_does_not_outlive_the_training(tmp_path: Path) -> None:
    with Launched(
        tmp_path, ["bash", "-c", f"{' '.join(MEMBER)} run; echo next; sleep 1000; true"]
    ) as launched:
        launched.expect("joined")
        launched.send()
        launched.expect("next")
        assert launched.wait() == 75, launched.log()
        until(lambda: not in_session(launched.pid), "the end of everything")


def test_what_ignores_sigterm_is_killed_when_the_grace_is_over(tmp_path: Path) -> None:
    with Launched(
        tmp_path, ["bash", "-c", "trap '' TERM; echo up; sleep 1000; true"], "--grace", 1, "--kill-after", 2
    ) as launched:
        launched.expect("up")
        launched.send()
        assert launched.wait() == 137, launched.log()
        assert "SIGKILL to what is left" in launched.log()


def test_a_training_that_still_saves_is_not_killed_when_the_grace_is_over(tmp_path: Path) -> None:
    with Launched(tmp_path, [*MEMBER, "run", "--hold", "go"], "--grace", 0.2) as launched:
        launched.expect("joined")
        launched.send()
        launched.expect_log("The grace is over and process")
        (tmp_path / "go").touch()
        assert launched.wait() == 75, launched.log()


def test_kill_after_kills_a_training_that_still_saves(tmp_path: Path) -> None:
    with Launched(tmp_path, [*MEMBER, "run", "--hold", "never"], "--kill-after", 1) as launched:
        launched.expect("joined")
        launched.send()
        assert launched.wait() == 143, launched.log()
        assert "--kill-after is over" in launched.log()


def test_sigint_from_a_process_is_handed_on_and_leaves_130(tmp_path: Path) -> None:
    with Launched(
        tmp_path, [sys.executable, "-c", "print('up', flush=True); import time; time.sleep(1000)"]
    ) as launched:
        launched.expect("up")
        launched.send(signal.SIGINT)
        assert launched.wait() == 130
        assert launched.log().count("KeyboardInterrupt") == 1


def test_ctrl_c_in_a_terminal_reaches_the_command_once(tmp_path: Path) -> None:
    """The terminal tells the whole foreground job. Told again by the launcher, a session would leave at
    once."""
    source = (
        "import signal, time\nheard = []\nsignal.signal(signal.SIGINT, lambda *_: "
        "heard.append(1))\nprint('up', flush=True)\n"
        "while not heard: time.sleep(0.01)\ntime.sleep(0.5)\nprint('heard', len(heard), flush=True)\n"
    )
    (tmp_path / "counts.py").write_text(source)
    words = [
        sys.executable,
        "-m",
        "lastcall",
        "run",
        "--cloud",
        "none",
        "--",
        sys.executable,
        str(tmp_path / "counts.py"),
    ]
    pid, terminal = os.forkpty()
    if pid == 0:
        os.execve(sys.executable, words, environment())
    seen = b""
    try:
        while b"up" not in seen:
            seen += os.read(terminal, 1000)
        os.write(terminal, b"\x03")
        while not re.search(rb"heard \d", seen):
            seen += os.read(terminal, 1000)
        assert b"heard 1" in seen
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


def test_sigusr1_reaches_those_who_expect_it(tmp_path: Path) -> None:
    inner = "trap 'echo inner heard; exit 5' USR1; echo up; while :; do sleep 0.05; done"
    (tmp_path / "inner.sh").write_text(inner)
    with Launched(tmp_path, ["bash", "-c", f"bash {tmp_path / 'inner.sh'}; exit $?"]) as launched:
        launched.expect("up")
        launched.send(signal.SIGUSR1)
        assert launched.wait() == 5, launched.log()
        assert "inner heard" in launched.lines()


def test_a_stop_and_its_end_reach_the_command(tmp_path: Path) -> None:
    shell = "trap 'echo stop' TSTP; trap 'echo continue; exit 6' CONT; echo up; while :; do sleep 0.05; done"
    with Launched(tmp_path, ["bash", "-c", shell]) as launched:
        launched.expect("up")
        launched.send(signal.SIGTSTP)
        launched.expect("stop")
        launched.send(signal.SIGCONT)
        assert launched.wait() == 6
        assert launched.lines()[-1] == "continue"


def test_ctrl_z_stops_the_whole_job_and_it_goes_on(tmp_path: Path) -> None:
    """In a shell with job control, as a person has it: the shell must see the launcher stopped, or it would
    wait for ever."""
    words = f"{sys.executable} -m lastcall run --cloud none -- {' '.join(MEMBER)} run --steps 30"
    pid, terminal = os.forkpty()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve(
            "/bin/bash",
            ["bash", "--norc", "-i", "-c", f"set -m; {words}; echo back $?; fg; echo end $?"],
            environment(),
        )
    seen = b""
    try:
        while b"joined" not in seen:
            seen += os.read(terminal, 1000)
        os.write(terminal, b"\x1a")
        while not re.search(rb"end \d+", seen):
            seen += os.read(terminal, 1000)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)
    assert b"back 147" in seen and b"end 0" in seen, seen.decode()  # 128 + SIGSTOP


def test_what_was_there_before_the_launcher_is_left_alone(tmp_path: Path) -> None:
    inner = f"{sys.executable} -m lastcall run --cloud none -- {' '.join(MEMBER)} run"
    with Launched(
        tmp_path, ["bash", "-c", f"sleep 1000 & echo helper $!; exec {inner}"], "--no-auto"
    ) as launched:
        helper = int(launched.expect("helper"))
        launched.expect("joined")
        (middle,) = children(launched.pid)
        os.kill(middle, signal.SIGTERM)  # to the inner launcher, whose child the sleeper is
        launched.expect("left saved")
        launched.expect_log("Exit code 75")
        assert helper in in_session(launched.pid)
        assert launched.wait() == 75


def test_below_torchrun_every_worker_gets_its_time_and_the_code_is_restored(tmp_path: Path) -> None:
    """torchrun kills the others 30 s after the first worker has left with 75, and says 1."""
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        MEMBER[1],
        "run",
        "--hold",
        "go",
    ]
    with Launched(tmp_path, ["bash", "-c", " ".join(torchrun) + "; echo torchrun said $?"]) as launched:
        launched.expect("joined", 2)
        launched.send()
        launched.expect("saving", 2)
        launched.expect_log("death signal, shutting down workers")
        (tmp_path / "go").touch()
        assert launched.wait() == 75, launched.log()
        assert launched.lines().count("left saved") == 2
        assert launched.expect("torchrun said") == "1"
