"""A model that is sharded over the ranks, by FSDP2 or by DeepSpeed, is saved by all of them together at the
agreed step, in the format that Hugging Face has for it; a run that was interrupted ends with the very bits of
one that was not. Nobody can save it alone."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from helpers.processes.forkserver import Nursery, environment, until
from helpers.ranks import jobs as ranks_jobs
from helpers.trainer import interruption_chain as trainer_chain
from helpers.trainer.interruption_chain import PLAIN, QUICK, SAVED, SCRIPTS, Blow, Chain, places
from lastcall.core.checkpoint import record as records
from lastcall.types import Kind

SCRIPT = SCRIPTS / "bits_sharded.py"
SHARDED: dict[str, Any] = {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
FULL: dict[str, Any] = {**SHARDED, "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}}
DEEPSPEED: dict[str, Any] = {
    "use_cpu": False,
    "deepspeed": {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
    },
}
ALONE = "only all of them together can save it"


@pytest.fixture
def nursery(trainers: Nursery) -> Any:
    yield trainers
    trainers.clear()


def in_peace(nursery: Nursery, folder: Path, case: dict[str, Any], **env: str) -> None:
    trainer_chain.run(
        nursery, folder, [SCRIPT], [], 2, **PLAIN, CASE=json.dumps(case), **places(folder, "peace"), **env
    )


def struck(nursery: Nursery, folder: Path, case: dict[str, Any], *blows: Blow, **env: str) -> Chain:
    setting = {**QUICK, "CASE": json.dumps(case), **places(folder, "struck"), **env}
    return trainer_chain.run(nursery, folder, [SCRIPT], blows, 2, **setting)


def the_same(folder: Path, said: object) -> None:
    assert trainer_chain.results(folder, "struck", 2) == trainer_chain.results(folder, "peace", 2), str(said)
    for rank in range(2):
        batches = [
            trainer_chain.micro_batches(folder / f"{name}.journal-{rank}") for name in ("peace", "struck")
        ]
        assert batches[0] == batches[1], str(said)


def checkpoints(folder: Path) -> dict[Path, records.Record]:
    return {path: records.read(path) for path in sorted((folder / "struck").glob("checkpoint-*"))}


def one_notice(nursery: Nursery, folder: Path, case: dict[str, Any], **env: str) -> set[str]:
    """A run in peace, and one that is stopped by a notice to one of its ranks: the same. Returns the files of
    the checkpoint that answered the notice; it gives way to a later one."""
    in_peace(nursery, folder, case, **env)
    life = trainer_chain.Life(
        nursery, folder, [SCRIPT], 2, {**QUICK, "CASE": json.dumps(case), **places(folder, "struck"), **env}
    )
    life.strike(Blow(4, 0.0, ranks=(1,)))
    assert life.wait() == (SAVED, SAVED), life.log()
    newest = max(checkpoints(folder).values(), key=lambda record: record.sequence)
    assert (newest.kind, newest.exact, newest.world) == (Kind.JIT, True, 2), life.log()
    chain = struck(nursery, folder, case, **env)
    assert f"Resuming from checkpoint-{newest.step} " in chain.logs[0], str(chain)
    the_same(folder, chain)
    return {file.name for file in newest.files}


def test_a_notice_to_one_rank_leads_both_to_one_sharded_checkpoint(nursery: Nursery, tmp_path: Path) -> None:
    files = one_notice(nursery, tmp_path, {**SHARDED, "max_steps": 12, "save_steps": 11})
    for folder in ("pytorch_model_fsdp_0", "optimizer_0"):
        assert {f"{folder}/{name}" for name in (".metadata", "__0_0.distcp", "__1_0.distcp")} <= files


@pytest.mark.slow
@pytest.mark.parametrize("case", [SHARDED, FULL], ids=["sharded", "full"])
def test_five_interruptions_leave_no_trace(nursery: Nursery, tmp_path: Path, case: dict[str, Any]) -> None:
    trainer_chain.compare(
        nursery, tmp_path, SCRIPT.name, {**case, "noise": "python numpy torch"}, ranks=2, count=5
    )


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_who_is_left_when_a_rank_is_killed_saves_nothing_and_says_why(
    nursery: Nursery, tmp_path: Path, killed: int
) -> None:
    in_peace(nursery, tmp_path, SHARDED)
    life = trainer_chain.Life(
        nursery, tmp_path, [SCRIPT], 2, {**QUICK, "CASE": json.dumps(SHARDED), **places(tmp_path, "struck")}
    )
    until(lambda: life.over() or life.lines() >= 8, "8 lines", trainer_chain.PATIENCE)
    life.children[killed].send(signal.SIGKILL)
    codes = life.wait()
    assert codes[killed] == -signal.SIGKILL and codes[1 - killed] not in (0, SAVED), life.log()
    assert ALONE in life.log(), life.log()
    assert {record.kind for record in checkpoints(tmp_path).values()} == {Kind.PERIODIC}, life.log()
    chain = struck(nursery, tmp_path, SHARDED)
    assert "Resuming from checkpoint-5" in chain.logs[0], str(chain)
    the_same(tmp_path, chain)


@pytest.mark.slow
def test_a_notice_in_an_evaluation_waits_for_its_end(nursery: Nursery, tmp_path: Path) -> None:
    case = {**SHARDED, "evaluation": 2.0, "eval_steps": 7, "max_steps": 10}
    in_peace(nursery, tmp_path, {**case, "evaluation": 0.0})
    chain = struck(nursery, tmp_path, case, Blow(7, 0.3, ranks=(0,)))
    assert chain.codes == [(SAVED, SAVED), (0, 0)], str(chain)
    assert ALONE not in chain.logs[0], str(chain)
    the_same(tmp_path, chain)


@pytest.mark.slow
def test_an_evaluation_that_outlasts_the_grace_costs_the_steps_since_the_last_save_and_says_why(
    nursery: Nursery, tmp_path: Path
) -> None:
    case = json.dumps({**SHARDED, "evaluation": 30.0, "eval_steps": 7})
    env = {**QUICK, "LASTCALL_GRACE_SECONDS": "3", "CASE": case, **places(tmp_path, "struck")}
    life = trainer_chain.Life(nursery, tmp_path, [SCRIPT], 2, env)
    life.strike(Blow(7, 0.3, ranks=(0,)))
    assert not {0, SAVED} & set(life.wait()), life.log()
    assert ALONE in life.log(), life.log()
    assert [record.step for record in checkpoints(tmp_path).values()] == [5], life.log()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_sharded_run_below_the_real_launchers_goes_on_by_itself(nursery: Nursery, tmp_path: Path) -> None:
    in_peace(nursery, tmp_path, SHARDED)
    command = [*ranks_jobs.LASTCALL_RUN, *ranks_jobs.torchrun(2, "--standalone"), str(SCRIPT)]
    codes, said = [], tmp_path / "said"
    env = environment(
        LASTCALL_KILL_WAIT_SECONDS="0",
        CASE=json.dumps(SHARDED),
        GLOO_SOCKET_IFNAME="lo",
        **places(tmp_path, "struck"),
    )
    for lines in (7, 0):
        with said.open("a") as file:
            job = subprocess.Popen(command, env=env, stdout=file, stderr=file)
        if lines:
            until(
                lambda job=job, lines=lines: (
                    said.read_text().count("{'loss'") >= lines or job.poll() is not None
                ),
                "lines",
                120,
            )
            job.send_signal(signal.SIGTERM)
        codes.append(job.wait(150))
    assert codes == [SAVED, 0], said.read_text()[-5000:]
    the_same(tmp_path, said.read_text()[-5000:])


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="it takes a compiler and minutes to install: by hand, pip install deepspeed==0.19.8",
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_leaves_no_trace(nursery: Nursery, tmp_path: Path, stage: int) -> None:
    deepspeed = {**DEEPSPEED["deepspeed"], "zero_optimization": {"stage": stage}}
    case = {**DEEPSPEED, "deepspeed": deepspeed, "max_steps": 12, "save_steps": 11}
    files = one_notice(nursery, tmp_path, case, DS_ACCELERATOR="cpu")
    assert len([name for name in files if name.endswith("optim_states.pt")]) == 2, files
