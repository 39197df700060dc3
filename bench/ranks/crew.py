"""The ranks as processes that do what they are told, one line each: the same methods as in one process, run
by all of them at once."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.distributed import TCPStore

from bench.measure import Kind, Method, Timing

_ROOT = Path(__file__).resolve().parents[2]
_PATIENCE = 900.0  # seconds for one line; whoever takes longer hangs
_LEAVING = 60.0


class Crew:
    """`size` processes with a process group. Their store lives here, as torchrun's lives in its agent."""

    def __init__(self, size: int, work: str, **arguments: object) -> None:
        self.size = size
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_RUN_ID": f"bench-{os.getpid()}",
            # of the cluster that rank 0 starts where ray is measured: the others must be let in
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // size)),
        }
        command = [sys.executable, "-m", "bench.ranks.member", work, json.dumps(arguments)]
        self._members = [
            subprocess.Popen(
                command,
                cwd=_ROOT,
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]

    def ask(self, what: str, **arguments: object) -> list[Any]:
        """What each of them answers. RuntimeError with the words of the first that failed."""
        late = threading.Timer(_PATIENCE, self._end)
        late.start()
        try:
            for member in self._members:
                assert member.stdin is not None
                member.stdin.write(json.dumps({"what": what, **arguments}) + "\n")
                member.stdin.flush()
            lines = [member.stdout.readline() if member.stdout else "" for member in self._members]
        except BrokenPipeError:
            lines = [""]
        finally:
            late.cancel()
        if not all(lines):
            self._end()
            raise RuntimeError(f"a rank has died, or did not {what} in {_PATIENCE:.0f} s")
        answers = [json.loads(line) for line in lines]
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise RuntimeError(f"rank {rank}: {answer['error']}")
        return [answer["answer"] for answer in answers]

    def tell(self, what: str) -> None:
        """Something that has no answer."""
        self.ask(what)

    def _end(self) -> None:
        for member in self._members:
            member.kill()

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for member in self._members:
                member.communicate(timeout=_LEAVING if error is None else 1.0)
        except subprocess.TimeoutExpired:
            self._end()
        for member in self._members:
            member.wait()


class Remote(Method):
    """A method that every rank runs. Its time is that of the slowest rank; CPU and memory are those of
    all."""

    def __init__(self, crew: Crew, name: str, kind: Kind, family: str) -> None:
        super().__init__(name, kind, family)
        self._crew = crew

    def setup(self) -> None:
        self._crew.ask("setup", name=self.name)

    def before(self) -> None:
        self._crew.ask("before", name=self.name)

    def run(self) -> Timing:
        found = self._crew.ask("run", name=self.name)
        seconds = max(one["seconds"] for one in found)
        return Timing(seconds, cpu=sum(one["cpu"] for one in found), peak=sum(one["peak"] for one in found))

    def after(self) -> None:
        self._crew.ask("after", name=self.name)

    def close(self) -> None:
        self._crew.ask("close", name=self.name)


def methods(crew: Crew) -> list[Method]:
    """What the ranks say they can run."""
    return [Remote(crew, name, Kind(kind), family) for name, kind, family in crew.ask("methods")[0]]
