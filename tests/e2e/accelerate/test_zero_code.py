"""Scripts with an Accelerator that know nothing of lastcall: their own save is run when a notice comes, and
their own resume works."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from helpers.processes import interruption_chain as chain
from helpers.processes.forkserver import Child, Nursery, until
from helpers.servers.ports import free_port
from lastcall.cli.main import main

SCRIPT = Path(__file__).parent / "scripts" / "plain.py"
ON = {"LASTCALL_ENABLED": "1", "FORKED": "1", "LASTCALL_KILL_WAIT_SECONDS": "0"}


@pytest.mark.parametrize(
    "shape",
    ["nested", *(pytest.param(shape, marks=pytest.mark.slow) for shape in ("flat", "main", "helper"))],
)
def test_the_scripts_own_save_is_run_at_once(accelerated: Nursery, tmp_path: Path, shape: str) -> None:
    out, result = tmp_path / "out", tmp_path / "result"
    plain = accelerated.run(tmp_path, SCRIPT, tmp_path / "other", tmp_path / "reference", SHAPE=shape)
    assert plain.code == 0, plain.log()
    for at in (5, 31):
        child = accelerated.start(tmp_path, SCRIPT, out, result, SHAPE=shape, **ON)
        chain.strike(child, chain.Blow(at, 0.0))
        assert child.wait() == chain.SAVED, child.log()
        assert "by the script's own save" in child.log()
    saved = sorted(int(path.name.split("_")[1]) for path in out.iterdir())
    assert len(saved) == 2 and 5 < saved[0] <= 9 and 31 < saved[1] <= 35, saved
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    last = accelerated.run(tmp_path, SCRIPT, out, result, SHAPE=shape, **ON)
    assert last.code == 0, last.log()
    assert f"resumed {saved[1]}" in last.lines()
    assert result.read_text() == (tmp_path / "reference").read_text()


def test_what_happened_is_written_down_where_there_is_a_place_for_it(
    accelerated: Nursery, tmp_path: Path
) -> None:
    """Not beside the script's checkpoints: it may take whatever lies there for one of them."""
    told = tmp_path / "told"
    child = accelerated.start(
        tmp_path, SCRIPT, tmp_path / "out", tmp_path / "result", LASTCALL_DIRECTORY=str(told), **ON
    )
    chain.strike(child, chain.Blow(5, 0.0))
    assert child.wait() == chain.SAVED, child.log()
    events = [json.loads(line) for line in (told / ".lastcall" / "events-0.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events if event["kind"] != "phase"] == [
        "start",
        "notice",
        "save-begins",
        "committed",
        "stop",
    ]
    phases = [event["phase"] for event in events if event["kind"] == "phase"]
    assert phases == ["waiting", "holding", "boundary", "saving", "committed", "leaving"]
    assert events[-1]["outcome"] == "saved" and events[-1]["step"] > 0
    beside = accelerated.start(
        tmp_path,
        SCRIPT,
        tmp_path / "out",
        tmp_path / "result",
        LASTCALL_DIRECTORY=str(tmp_path / "out"),
        **ON,
    )
    chain.strike(beside, chain.Blow(31, 0.0))
    assert beside.wait() == chain.SAVED, beside.log()
    assert all(path.name.startswith("step_") for path in (tmp_path / "out").iterdir())


def test_a_script_without_a_save_is_told_so_and_dies_of_the_signal(
    accelerated: Nursery, tmp_path: Path
) -> None:
    source = SCRIPT.read_text()
    begin, end = source.index('            if SHAPE == "nested"'), source.index("    weights = ")
    script = accelerated.write(tmp_path, source[:begin] + source[end:])
    child = accelerated.start(tmp_path, script, tmp_path / "out", tmp_path / "result", **ON)
    chain.strike(child, chain.Blow(5, 0.0))
    assert child.wait() == -signal.SIGTERM, child.log()
    assert child.log().count("This script is not protected: no frame of the training loop calls") == 1


@pytest.mark.parametrize("shape", ["flat", pytest.param("main", marks=pytest.mark.slow)])
def test_two_ranks_save_at_the_same_step(accelerated: Nursery, tmp_path: Path, shape: str) -> None:
    """main: only one of them calls save_state(), so it saves alone, and nobody waits for the other."""
    world = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "EPOCHS": "6",
        "SHAPE": shape,
        **ON,
    }
    out = tmp_path / "out"

    def start() -> list[Child]:
        port = str(free_port())
        return [
            accelerated.start(
                tmp_path,
                SCRIPT,
                out,
                tmp_path / f"result-{n}",
                **world,
                MASTER_PORT=port,
                RANK=str(n),
                LOCAL_RANK=str(n),
            )
            for n in range(2)
        ]

    ranks = start()
    until(lambda: chain.position(ranks[1]) >= 6 or ranks[1].poll() is not None, "step 6")
    ranks[1].send(signal.SIGTERM)
    assert [rank.wait() for rank in ranks] == [chain.SAVED] * 2, ranks[0].log() + ranks[1].log()
    (folder,) = out.iterdir()
    ranks_seen = {"random_states_0.pkl"} | ({"random_states_1.pkl"} if shape == "flat" else set())
    assert {*ranks_seen, "model.safetensors", "lastcall.json"} == {path.name for path in folder.iterdir()} - {
        "optimizer.bin"
    }
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert main(["verify", str(out)]) == 0
    last = start() if shape == "flat" else []
    if shape == "main":
        return  # load_state() needs a file of each rank, which such a script does not save
    assert [rank.wait() for rank in last] == [0, 0], last[0].log() + last[1].log()
    assert f"resumed {folder.name.split('_')[1]}" in last[0].lines()
    assert (tmp_path / "result-0").read_text() == (tmp_path / "result-1").read_text()
