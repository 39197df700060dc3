from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.processes.forkserver import environment
from lastcall.doctor.checks import delivery
from lastcall.doctor.checks.delivery import Ancestor
from lastcall.launch.shell import commandline

NOTHING = commandline.Launch()


def chain(*argvs: str, minds: bool = False) -> list[Ancestor]:
    """From the parent up; the last is PID 1."""
    return [Ancestor(len(argvs) - index, tuple(argv.split()), minds) for index, argv in enumerate(argvs)]


@pytest.mark.parametrize(
    "argv",
    [
        "/sbin/tini -- python train.py",
        "/sbin/docker-init -- bash x",
        "dumb-init x",
        "/lib/systemd/systemd --system",
        "/sbin/init",
        "/usr/bin/python3 /usr/local/bin/lastcall run -- bash x",
        "python -m lastcall run -- bash x",
    ],
)
def test_an_init_as_pid_1_is_fine(argv: str) -> None:
    assert delivery.check_first(7, chain("bash", argv)).level == "ok"


def test_a_program_as_pid_1_is_judged_by_its_handler() -> None:
    assert delivery.check_first(7, chain("python serve.py", minds=True)).level == "ok"
    deaf = delivery.check_first(7, chain("sleep infinity"))
    assert deaf.level == "warning" and "lastcall" in deaf.remedy
    assert delivery.check_first(1, []).level == "ok"
    assert delivery.check_first(7, [Ancestor(1, (), False)]).level == "ok"  # it hides from us


def test_a_shell_as_pid_1_is_a_risk_unless_it_execs_or_traps(tmp_path: Path) -> None:
    script = tmp_path / "entry.sh"
    script.write_text("lastcall doctor\npython train.py\n")
    argv = f"bash {script}"
    assert delivery.check_first(7, chain(argv)).level == "risk"
    assert delivery.check_first(7, chain(argv, minds=True)).level == "warning"
    assert delivery.check_first(7, chain("bash")).level == "risk"
    # an interactive one catches SIGTERM to ignore it
    assert delivery.check_first(7, chain("bash", minds=True)).level == "risk"
    script.write_text("lastcall doctor\nexec python train.py\n")
    assert delivery.check_first(7, chain(argv)).level == "ok"


def test_a_shell_in_between_is_a_risk_unless_somebody_tells_everyone(tmp_path: Path) -> None:
    script = tmp_path / "entry.sh"
    script.write_text("lastcall doctor\npython train.py\n")
    argv = f"bash {script}"
    assert delivery.check_between(chain(argv, "tini"), {}).level == "risk"
    assert delivery.check_between(chain("python x", argv, "tini"), {}).level == "risk"
    assert delivery.check_between(chain(argv, "systemd"), {}).level == "ok"
    assert delivery.check_between(chain(argv, "python -m lastcall run", "tini"), {}).level == "ok"
    assert delivery.check_between(chain("python -m lastcall run", argv, "tini"), {}).level == "risk"
    assert delivery.check_between(chain(argv, "-bash", "sshd"), {}).level == "ok"  # a person's terminal
    assert delivery.check_between(chain(argv, "slurmstepd"), {"SLURM_JOB_ID": "1"}).level == "ok"
    assert delivery.check_between([], {}).level == "ok"  # docker exec: nobody above
    script.write_text("trap 'kill $P' TERM\nlastcall doctor\npython train.py & P=$!\nwait $P")
    assert delivery.check_between(chain(argv, "tini"), {}).level == "warning"


def test_where_a_stop_file_is_the_notice_a_shell_is_no_risk() -> None:
    deaf = delivery.check_first(7, chain("bash"))
    heard = delivery.with_stop_file(deaf, "/opt/lastcall/stop")
    assert (heard.name, heard.level, heard.remedy) == (
        "pid-1",
        "ok",
        "",
    ) and "/opt/lastcall/stop" in heard.says
    assert delivery.with_stop_file(deaf, None) is deaf
    fine = delivery.check_first(1, [])
    assert delivery.with_stop_file(fine, "/opt/lastcall/stop") is fine


def test_slurm_tells_the_processes_below_a_script_itself(tmp_path: Path) -> None:
    launch = commandline.understand(("bash", "-c", "python train.py; exit $?"), {})
    assert [item.level for item in delivery.check_command(launch, {})] == ["risk"]
    assert [item.level for item in delivery.check_command(launch, {"SLURM_JOB_ID": "1"})] == ["ok"]
    assert list(delivery.check_command(NOTHING, {})) == []


def test_the_processes_above_are_found() -> None:
    source = (
        "from lastcall.doctor.checks import delivery; import os; print(delivery.above(os.getpid())[0].pid)"
    )
    done = subprocess.run(
        [sys.executable, "-c", source],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert int(done.stdout) == os.getpid()
    assert delivery.above(-1) == []


def test_the_masks_of_a_process_are_read() -> None:
    source = (
        "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\nsignal.signal(signal.SIGUSR1, lambda "
        "*_: None)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\nprint('ready', flush=True)\ninput()"
    )
    process = subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    process.stdout.readline()
    caught, blocked, ignored = delivery.masks(process.pid)
    minds = delivery.ancestor(process.pid).minds
    process.communicate(b"\n", timeout=60)
    assert signal.SIGUSR1 in caught and blocked == {signal.SIGTERM} and signal.SIGHUP in ignored and minds
    assert delivery.masks(process.pid) == (set(), set(), set())  # it is gone


def test_a_notice_that_cannot_arrive_is_a_risk_and_below_lastcall_run_a_warning() -> None:
    deaf = list(delivery.check_signals(("SIGTERM", "SIGUSR1"), set(), {signal.SIGTERM}, NOTHING))
    assert (
        [item.level for item in deaf] == ["risk"]
        and "SIGTERM is inherited as ignored" in deaf[0].says
        and "--default-signal=TERM" in deaf[0].remedy
    )
    blocked = list(delivery.check_signals(("SIGTERM",), {signal.SIGTERM}, set(), NOTHING))
    assert [item.level for item in blocked] == ["risk"] and "blocked" in blocked[0].says
    wrapped = commandline.understand(("lastcall", "run", "--", "python", "x.py"), {})
    assert [
        item.level for item in delivery.check_signals(("SIGTERM",), set(), {signal.SIGTERM}, wrapped)
    ] == ["warning"]


def test_an_ignored_signal_that_is_no_notice_matters_to_nobody() -> None:
    # nohup
    found = list(delivery.check_signals(("SIGTERM",), set(), {signal.SIGHUP, signal.SIGRTMIN + 1}, NOTHING))
    assert [item.level for item in found] == ["ok"] and found[0].facts["ignored"] == ["SIGHUP"]


def test_no_signal_at_all_is_a_risk() -> None:
    assert [item.level for item in delivery.check_signals((), set(), set(), NOTHING)] == ["risk"]


def test_torchrun_dies_of_signals_that_it_does_not_know() -> None:
    launch = commandline.understand(("torchrun", "train.py"), {})
    found = list(delivery.check_signals(("SIGTERM", "SIGUSR1"), set(), set(), launch))
    assert [item.level for item in found] == ["warning"] and found[
        0
    ].remedy == "lastcall run -- torchrun train.py"


def test_the_remedy_for_an_ignored_signal_works() -> None:
    """As pasted: env puts the signal back."""
    (found,) = delivery.check_signals(("SIGTERM",), set(), {signal.SIGTERM}, NOTHING)
    show = (
        f"{found.remedy.removesuffix(' COMMAND')} {sys.executable} -c 'import signal; "
        "print(signal.getsignal(signal.SIGTERM).name)'"
    )
    done = subprocess.run(["bash", "-c", f"trap '' TERM; {show}"], capture_output=True, text=True, timeout=60)
    assert done.stdout == "SIG_DFL\n", done.stderr


def test_the_remedy_for_a_blocked_signal_works() -> None:
    (found,) = delivery.check_signals(("SIGTERM",), {signal.SIGTERM}, set(), NOTHING)
    show = (
        f"{found.remedy.removesuffix(' COMMAND')} {sys.executable} -c 'import signal; "
        "print(len(signal.pthread_sigmask(0, [])))'"
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        done = subprocess.run(["bash", "-c", show], capture_output=True, text=True, timeout=60)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert done.stdout == "0\n", done.stderr
