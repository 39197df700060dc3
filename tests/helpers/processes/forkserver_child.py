"""A process that has imported torch and forks a fresh child for each request, so that a test pays
milliseconds for a process and not the seconds that the import takes. What the child does from then on is what
`python script.py` does: its own session, its own output files, the script as `__main__`, exit functions, exit
code.

    python forkserver_child.py FD [MODULE ...]       requests and answers are JSON lines on the socket FD
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import numpy  # noqa: F401
import torch
import torch.utils.data
import torchdata.stateful_dataloader  # noqa: F401

import lastcall


def become(request: dict[str, Any]) -> Path:
    """In the child: everything that exec would have changed."""
    os.setsid()
    for number, name in ((1, "stdout"), (2, "stderr")):
        fd = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, number)
        os.close(fd)
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    script = Path(request["argv"][0])
    sys.argv = list(request["argv"])
    sys.path.insert(0, str(script.parent))
    return script


def poll(pid: int) -> int | None:
    """Its return code as subprocess gives it, or None while it runs."""
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def serve(channel: socket.socket) -> Path | None:
    """Returns in each child with its script, and in the parent with None once nobody asks any more."""
    lines = channel.makefile("r")
    for line in lines:
        request = json.loads(line)
        if "poll" in request:
            answer: dict[str, Any] = {"code": poll(request["poll"])}
        else:
            pid = os.fork()
            if pid == 0:
                lines.close()
                channel.close()
                return become(request)
            answer = {"pid": pid}
        channel.sendall((json.dumps(answer) + "\n").encode())
    return None


def warm_up() -> None:
    """What every script would import or build by itself. No backward(): its engine's threads do not survive a
    fork."""
    assert lastcall.protect is not None
    for module in sys.argv[2:]:
        importlib.import_module(module)
    torch.set_num_threads(1)
    parameter = torch.zeros(2, requires_grad=True)
    parameter.grad = torch.zeros(2)
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        optimizer = kind([parameter], lr=0.1)
        optimizer.step()  # the first one imports torch._dynamo, for seconds
        optimizer.zero_grad()
    gc.collect()
    gc.freeze()  # the collector of a child must not touch, and so copy, the pages of all these modules


def run(script: Path) -> int:
    """The script as `__main__`; its exit code, as the interpreter would give it."""
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return left.code or 0
        print(left.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def leave(code: int) -> None:
    """The interpreter's way out: threads are waited for, exit functions run. Only the modules are not taken
    apart, since that would copy every page of this process, for half a second. tests/e2e/test_examples.py
    leaves in full."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


warm_up()
chosen = serve(socket.socket(fileno=int(sys.argv[1])))
if chosen is not None:
    leave(run(chosen))
