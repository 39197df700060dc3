from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing import process
from pathlib import Path
from typing import Any

import pytest

from helpers.processes.scripts import Script, eventually, gone, state
from lastcall.shield.child_shield import WorkerShield

LOADER = """
import multiprocessing, os, signal, sys, threading, time
import torch
from torch.utils.data import DataLoader, Dataset
from lastcall.shield.child_shield import WorkerShield
from lastcall.notices.signals import SignalListener

class Numbers(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return torch.tensor(index)

noticed = threading.Event()
def hear(signum, count):
    print('heard', signal.Signals(signum).name, count, flush=True)
    noticed.set()

def begin(*names):
    SignalListener(names, hear).start()
    shield = WorkerShield()
    shield.install([signal.Signals[name] for name in names])
    return shield

def workers(iterator):
    return [worker.pid for worker in iterator._workers]

def fail(self):
    print('TERMINATED', flush=True)

"""

CONSUME = """
def consume(iterator):
    first = [next(iterator)]
    print('workers', *workers(iterator), flush=True)
    assert noticed.wait(60)
    return torch.cat(first + list(iterator)).tolist()

if __name__ == '__main__':
    begin(SIGNAL)
    loader = DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context=METHOD, **OPTIONS)
    iterator = iter(loader)
    print('complete', consume(iterator) == list(range(40)), flush=True)
    multiprocessing.process.BaseProcess.terminate = fail  # what a loader does with workers that do not leave in 5 s
    if OPTIONS:
        noticed.clear()
        print('again', torch.cat(list(loader)).tolist() == list(range(40)), flush=True)
        iterator._shutdown_workers()
    print('statuses', *(worker.exitcode for worker in iterator._workers), flush=True)
    sys.exit(75)
"""  # noqa: E501


def pids(line: str) -> list[int]:
    return [int(word) for word in line.split()]


def consume(method: str, *, options: str = "{}", name: str = "SIGTERM") -> str:
    return LOADER + CONSUME.replace("SIGNAL", repr(name)).replace("METHOD", repr(method)).replace(
        "OPTIONS", options
    )


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_outlive_the_sigterm_of_their_group_and_deliver_every_batch(
    tmp_path: Path, method: str
) -> None:
    with Script(tmp_path, consume(method)) as script:
        workers = pids(script.expect("workers"))
        script.send_group(signal.SIGTERM)
        assert script.expect("heard") == "SIGTERM 1"
        assert script.expect("complete") == "True"
        assert script.expect("statuses") == "0 0"
        assert script.wait() == 75
        assert "TERMINATED" not in script.lines
        assert script.errors() == ""
        assert eventually(lambda: all(map(gone, workers)))


def test_persistent_workers_outlive_it_and_serve_another_epoch(tmp_path: Path) -> None:
    with Script(tmp_path, consume("fork", options="dict(persistent_workers=True)")) as script:
        workers = pids(script.expect("workers"))
        script.send_group(signal.SIGTERM)
        assert script.expect("complete") == "True"
        assert script.expect("again") == "True"
        assert script.expect("statuses") == "0 0"
        assert script.wait() == 75
        assert "TERMINATED" not in script.lines
        assert script.errors() == ""
        assert eventually(lambda: all(map(gone, workers)))


def test_workers_do_not_hear_the_ctrl_c_of_their_terminal(tmp_path: Path) -> None:
    with Script(tmp_path, consume("fork", name="SIGINT")) as script:
        script.expect("workers")
        script.send_group(signal.SIGINT)
        assert script.expect("heard") == "SIGINT 1"
        assert script.expect("complete") == "True"
        assert script.wait() == 75
        assert script.errors() == ""


def test_the_workers_of_a_stateful_loader_are_shielded_too(tmp_path: Path) -> None:
    source = consume("fork").replace(
        "    begin(", "    from torchdata.stateful_dataloader import StatefulDataLoader\n    begin("
    )
    source = source.replace("loader = DataLoader", "loader = StatefulDataLoader")
    with Script(tmp_path, source) as script:
        script.expect("workers")
        script.send_group(signal.SIGTERM)
        assert script.expect("complete") == "True"
        assert script.wait() == 75


LEAVE = """
if __name__ == '__main__':
    begin('SIGTERM')
    iterator = iter(DataLoader(Numbers(), num_workers=2, multiprocessing_context=%r))
    %s
    print('workers', *workers(iterator), flush=True)
    assert noticed.wait(60)
    %s
"""


@pytest.mark.parametrize(
    ("method", "first", "leave"),
    [
        ("fork", "next(iterator)", "sys.exit(75)"),
        (
            "spawn",
            "pass",
            "sys.exit(75)",
        ),  # the workers are still importing torch: the group's SIGTERM hides the parent's
        ("fork", "next(iterator)", "os._exit(75)"),
        ("spawn", "pass", "os._exit(75)"),
    ],
)
def test_no_worker_stays_behind_when_its_parent_leaves_in_the_middle_of_an_epoch(
    tmp_path: Path, method: str, first: Any, leave: Any
) -> None:
    with Script(tmp_path, LOADER + LEAVE % (method, first, leave)) as script:
        workers = pids(script.expect("workers"))
        script.send_group(signal.SIGTERM)
        assert script.expect("heard") == "SIGTERM 1"
        assert script.wait() == 75
        assert eventually(lambda: all(map(gone, workers)))
        if leave.startswith("sys"):
            assert script.errors() == ""


CHILD = """
import multiprocessing, os, signal, subprocess, sys, threading, time
from lastcall.shield.child_shield import WorkerShield
from lastcall.notices.signals import SignalListener

def echo(pipe):
    pipe.send('ready')
    while True:
        pipe.send(pipe.recv())

def handle(pipe):
    def leave(signum, frame):
        pipe.send('handled')
        os._exit(7)
    signal.signal(signal.SIGTERM, leave)
    pipe.send('ready')
    time.sleep(600)

def clean_up(pipe):
    def leave(signum, frame):
        print('cleaning up', flush=True)
        time.sleep(1)  # long enough to be told again
        print('cleaned up', flush=True)
        os._exit(0)
    signal.signal(signal.SIGTERM, leave)
    pipe.send('ready')
    time.sleep(600)

def launch(pipe):
    program = subprocess.Popen(['sleep', '600'])
    program.terminate()
    pipe.send(program.wait())

def fork(pipe):
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
    os.kill(pid, signal.SIGTERM)
    pipe.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

def nest(pipe):
    inner = multiprocessing.get_context('spawn').Process(target=echo, args=[pipe])
    inner.start()
    time.sleep(600)

def nest_and_end(pipe):
    here, there = multiprocessing.Pipe()
    inner = multiprocessing.get_context('spawn').Process(target=echo, args=[there])
    inner.start()
    here.recv()
    inner.terminate()
    inner.join()
    pipe.send(inner.exitcode)

def protect(pipe):
    def hear(signum, count):
        pipe.send('heard')
    SignalListener(['SIGTERM'], hear).start()
    WorkerShield().install([signal.SIGTERM])
    pipe.send('ready')
    time.sleep(600)

def suicide(pipe):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)

def start(method, target, **options):
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context(method).Process(target=target, args=[there], **options)
    child.start()
    return child, here

if __name__ == '__main__':
    shield = WorkerShield()
    shield.install([signal.SIGTERM])
"""

METHODS = pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])


def child(method: str, body: str) -> str:
    lines = [f"    method = {method!r}", *("    " + line for line in body.strip().splitlines())]
    return CHILD + "\n".join(lines) + "\n"


AWAIT = "signal.sigwait([signal.SIGUSR1])"  # blocked before the child is started, so that none is missed


@METHODS
def test_a_child_outlives_a_signal_from_elsewhere_and_dies_of_its_parents(
    tmp_path: Path, method: str
) -> None:
    body = f"""
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
process, pipe = start(method, echo)
print(pipe.recv(), process.pid, flush=True)
{AWAIT}
pipe.send('still here')
print(pipe.recv(), flush=True)
process.terminate()
process.join()
print('status', process.exitcode, flush=True)
"""
    with Script(tmp_path, child(method, body)) as script:
        pid = int(script.expect("ready"))
        os.kill(pid, signal.SIGTERM)
        script.send(signal.SIGUSR1)
        script.expect("still here")
        assert script.expect("status") == str(-signal.SIGTERM)
        assert script.wait() == 0


@METHODS
def test_a_child_hears_its_parent_even_if_the_groups_signal_was_still_pending(
    tmp_path: Path, method: str
) -> None:
    body = f"""
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
process, pipe = start(method, echo)
print(pipe.recv(), process.pid, flush=True)
{AWAIT}
process.terminate()
os.kill(process.pid, signal.SIGCONT)
process.join()
print('status', process.exitcode, flush=True)
"""
    with Script(tmp_path, child(method, body)) as script:
        pid = int(script.expect("ready"))
        os.kill(pid, signal.SIGSTOP)
        assert eventually(lambda: state(pid) == "T")
        os.kill(pid, signal.SIGTERM)
        script.send(signal.SIGUSR1)
        assert script.expect("status") == str(-signal.SIGTERM)
        assert script.wait() == 0


def test_a_child_that_held_a_signal_back_dies_of_it_when_its_parent_is_gone(tmp_path: Path) -> None:
    body = """
process, pipe = start(method, echo)
print(pipe.recv(), process.pid, flush=True)
time.sleep(600)
"""
    with Script(tmp_path, child("fork", body)) as script:
        pid = int(script.expect("ready"))
        os.kill(pid, signal.SIGTERM)
        script.send(signal.SIGKILL)
        script.wait()
        assert eventually(lambda: gone(pid))


@METHODS
def test_a_childs_own_handler_runs_when_its_parent_terminates_it(tmp_path: Path, method: str) -> None:
    body = """
process, pipe = start(method, handle)
pipe.recv()
process.terminate()
print('child says', pipe.recv(), flush=True)
process.join()
print('status', process.exitcode, flush=True)
"""
    with Script(tmp_path, child(method, body)) as script:
        assert script.expect("child says") == "handled"
        assert script.expect("status") == "7"


def test_a_daemon_that_cleans_up_is_not_disturbed_when_its_parent_exits(tmp_path: Path) -> None:
    body = """
process, pipe = start(method, clean_up, daemon=True)
pipe.recv()
"""
    with Script(tmp_path, child("fork", body)) as script:
        assert script.wait() == 0
        script.expect("cleaned up")
        assert script.lines == ["cleaning up", "cleaned up"]


@pytest.mark.parametrize("target", ["launch", "fork", "nest_and_end"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_a_child_starts_can_be_terminated(tmp_path: Path, method: str, target: Any) -> None:
    body = f"process, pipe = start(method, {target})\nprint('grandchild', pipe.recv(), flush=True)"
    with Script(tmp_path, child(method, body)) as script:
        assert script.expect("grandchild") == str(-signal.SIGTERM)
        assert script.wait() == 0


def test_a_child_can_kill_itself(tmp_path: Path) -> None:
    body = "process, pipe = start(method, suicide)\nprocess.join()\nprint('status', process.exitcode)"
    with Script(tmp_path, child("fork", body)) as script:
        assert script.expect("status") == str(-signal.SIGTERM)


@METHODS
def test_a_child_that_protects_a_run_of_its_own_hears_its_notices(tmp_path: Path, method: str) -> None:
    body = """
process, pipe = start(method, protect, daemon=True)
print(pipe.recv(), process.pid, flush=True)
print('child', pipe.recv(), flush=True)
process.kill()
"""
    with Script(tmp_path, child(method, body)) as script:
        os.kill(int(script.expect("ready")), signal.SIGTERM)
        assert script.expect("child") == "heard"
        assert script.wait() == 0


@METHODS
def test_children_started_after_uninstall_die_of_any_signal(tmp_path: Path, method: str) -> None:
    body = """
process, pipe = start(method, echo)
pipe.recv()
shield.uninstall()
later, other = start(method, echo)
print(other.recv(), later.pid, flush=True)
later.join()
print('status', later.exitcode, flush=True)
process.terminate()
process.join()
print('earlier', process.exitcode, flush=True)
"""
    with Script(tmp_path, child(method, body)) as script:
        os.kill(int(script.expect("ready")), signal.SIGTERM)
        assert script.expect("status") == str(-signal.SIGTERM)
        assert script.expect("earlier") == str(-signal.SIGTERM)


def test_installing_changes_process_start_and_uninstalling_puts_it_back() -> None:
    before = process.BaseProcess.start
    shield = WorkerShield()
    shield.install([signal.SIGTERM])
    try:
        assert process.BaseProcess.start is not before
        with pytest.raises(RuntimeError, match="already installed"):
            WorkerShield().install([signal.SIGTERM])
    finally:
        shield.uninstall()
    assert process.BaseProcess.start is before
    shield.uninstall()
    shield.install([signal.SIGTERM])
    shield.uninstall()
    assert process.BaseProcess.start is before


def test_a_shield_that_was_refused_uninstalls_nothing() -> None:
    shield, other = WorkerShield(), WorkerShield()
    shield.install([signal.SIGTERM])
    try:
        with pytest.raises(RuntimeError):
            other.install([signal.SIGTERM])
        installed = process.BaseProcess.start
        other.uninstall()
        assert process.BaseProcess.start is installed
    finally:
        shield.uninstall()


def test_wrappers_of_somebody_else_below_and_above_ours_stay_and_are_called_once() -> Any:
    before = process.BaseProcess.start
    calls: list[str] = []

    def wrapper(name: str, inner: Any) -> Any:
        def start(self) -> None:
            calls.append(name)
            inner(self)

        return start

    below = process.BaseProcess.start = wrapper("below", before)
    shield = WorkerShield()
    try:
        shield.install([signal.SIGTERM])
        above = process.BaseProcess.start = wrapper("above", process.BaseProcess.start)
        shield.uninstall()
        shield.install([signal.SIGTERM])
        child = multiprocessing.get_context("fork").Process(target=os.getpid)
        child.start()
        child.join()
        assert calls == ["above", "below"]
        assert hasattr(child, "_lastcall_shield")
        shield.uninstall()
        assert process.BaseProcess.start is above
        process.BaseProcess.start = below
        shield.install([signal.SIGTERM])
        shield.uninstall()
        assert process.BaseProcess.start is below
    finally:
        shield.uninstall()
        process.BaseProcess.start = before


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_starting_a_child_leaves_the_signal_mask_of_the_parent_alone(method: str) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    shield = WorkerShield()
    shield.install([signal.SIGTERM, signal.SIGUSR1])
    try:
        child = multiprocessing.get_context(method).Process(target=os.getpid)
        child.start()
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
        child.join()
        assert child.exitcode == 0
    finally:
        shield.uninstall()
