"""Two ranks around an Accelerator: one is told to stop, both save the same step, and go on as if nothing had
happened."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

from helpers.processes import interruption_chain as chain
from helpers.processes.forkserver import Child, Nursery, until
from helpers.servers.ports import free_port

SCRIPT = Path(__file__).parent / "scripts" / "loop.py"


def start(nursery: Nursery, folder: Path, run: str, result: str, **env: str) -> list[Child]:
    """`run`: the directory of both, or with {rank} in it one for each."""
    world = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "LASTCALL_KILL_WAIT_SECONDS": "0",
    }
    return [
        nursery.start(
            folder,
            SCRIPT,
            folder / run.format(rank=rank),
            folder / f"{result}-{rank}",
            **world,
            **env,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
        )
        for rank in range(2)
    ]


def ended(children: list[Child]) -> list[int]:
    return [child.wait() for child in children]


def test_a_notice_to_one_of_two_ranks_leaves_no_trace(accelerated: Nursery, tmp_path: Path) -> None:
    plain = start(accelerated, tmp_path, "unused", "reference", LASTCALL_ENABLED="0")
    assert ended(plain) == [0, 0], plain[0].log()
    for told, at in ((1, 3), (0, 9)):
        ranks = start(accelerated, tmp_path, "run", "result")
        until(lambda: chain.position(ranks[told]) >= at or ranks[told].poll() is not None, f"pass {at}")  # noqa: B023
        ranks[told].send(signal.SIGTERM)
        assert ended(ranks) == [chain.SAVED, chain.SAVED], ranks[0].log() + ranks[1].log()
    last = start(accelerated, tmp_path, "run", "result")
    assert ended(last) == [0, 0], last[0].log() + last[1].log()
    for rank in range(2):
        assert (tmp_path / f"result-{rank}").read_text() == (tmp_path / f"reference-{rank}").read_text(), (
            last[rank].log()
        )
    newest = max(
        (tmp_path / "run").glob("checkpoint-*"),
        key=lambda path: json.loads((path / "lastcall.json").read_text())["sequence"],
    )
    names = {path.name for path in newest.iterdir()}
    assert {
        "model.safetensors",
        "optimizer.bin",
        "scheduler.bin",
        "random_states_0.pkl",
        "random_states_1.pkl",
    } <= names, names


def test_ranks_that_share_no_directory_lose_theirs_and_go_on_from_the_mirror(
    accelerated: Nursery, tmp_path: Path
) -> None:
    plain = start(accelerated, tmp_path, "unused", "reference", LASTCALL_ENABLED="0")
    assert ended(plain) == [0, 0], plain[0].log()
    mirror = {"LASTCALL_MIRROR": f"file://{tmp_path}/mirror"}
    first = start(accelerated, tmp_path, "run-{rank}", "result", **mirror)
    until(lambda: chain.position(first[1]) >= 5 or first[1].poll() is not None, "pass 5")
    first[1].send(signal.SIGTERM)
    assert ended(first) == [chain.SAVED, chain.SAVED], first[0].log() + first[1].log()
    assert not list((tmp_path / "run-1").glob("checkpoint-*"))
    for rank in range(2):
        shutil.rmtree(tmp_path / f"run-{rank}")
    last = start(accelerated, tmp_path, "run-{rank}", "result", **mirror)
    assert ended(last) == [0, 0], last[0].log() + last[1].log()
    for rank in range(2):
        assert (tmp_path / f"result-{rank}").read_text() == (tmp_path / f"reference-{rank}").read_text(), (
            last[rank].log()
        )
