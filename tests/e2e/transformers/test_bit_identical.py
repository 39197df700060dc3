"""Interrupted at random moments and started again each time, a training with Trainer ends with the very bits
of one never interrupted.

Each script runs once without lastcall, then with LASTCALL_ENABLED=1 under SIGTERMs. Compared: the weights,
the loss and the data of every micro-batch, the whole log (losses, learning rates, evaluations, epochs), the
best checkpoint, the callbacks, the randomness that is left. LASTCALL_TEST_INTERRUPTIONS=10 makes it ten for
each.
"""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from helpers.processes.forkserver import ROOT, Nursery, environment, until
from helpers.ranks import jobs as ranks_jobs
from helpers.trainer import interruption_chain as trainer_chain
from helpers.trainer.interruption_chain import PLAIN, QUICK, SCRIPTS, Blow, Chain, compare, places, results

FINETUNE = ROOT / "examples" / "finetune.py"
NOISE = "python numpy torch"


@pytest.fixture
def nursery(trainers: Nursery) -> Any:
    yield trainers
    trainers.clear()


# ---- examples/finetune.py ----------------------------------------------------------------------------------


def outcome(directory: Path) -> dict[str, Any]:
    """What a run of finetune.py leaves behind."""
    state = json.loads((directory / "trainer_state.json").read_text())
    best = Path(state["best_model_checkpoint"])
    kept = (
        "best_metric",
        "best_global_step",
        "epoch",
        "global_step",
        "max_steps",
        "num_train_epochs",
        "total_flos",
    )
    return {
        "history": trainer_chain.timeless(state["log_history"]),
        "best": best.name,
        "final": {
            path.name: digest(path)
            for path in (directory / "final").iterdir()
            if path.name != "training_args.bin"
        },
        "best weights": {
            name: value.tobytes() for name, value in load_file(best / "model.safetensors").items()
        },
        **{key: state[key] for key in kept},
    }


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def finetuned(
    nursery: Nursery, folder: Path, *options: str, seed: int, count: int, ranks: int = 1, **env: str
) -> Chain:
    """finetune.py in peace and under blows: the same outcome."""
    peace, struck = folder / "peace", folder / "struck"
    trainer_chain.run(nursery, folder, [FINETUNE, "--output-dir", peace, *options], [], ranks, **PLAIN)
    expected = outcome(peace)
    plan = trainer_chain.moments(seed, count, expected["history"], ranks)
    chain = trainer_chain.run(
        nursery, folder, [FINETUNE, "--output-dir", struck, *options], plan, ranks, **{**QUICK, **env}
    )
    found = outcome(struck)
    wrong = [
        f"{part}: {expected[part]} and {found[part]}"[:500]
        for part in expected
        if found[part] != expected[part]
    ]
    assert not wrong, "\n".join([f"seed {seed}", *wrong, str(plan), str(chain)])
    # The first blow may come before train(), and the last ones after it where a kill wait lets training go on
    # for a while.
    assert chain.saved >= count - (1 if "LASTCALL_KILL_WAIT_SECONDS" not in env else 4), (
        f"seed {seed}, {plan}\n{chain}"
    )
    return chain


@pytest.mark.smoke
def test_finetune_ends_with_the_same_bits(nursery: Nursery, tmp_path: Path) -> None:
    finetuned(nursery, tmp_path, seed=1, count=trainer_chain.interruptions(4))


def test_finetune_on_two_ranks_ends_with_the_same_bits(nursery: Nursery, tmp_path: Path) -> None:
    finetuned(nursery, tmp_path, "--accumulation", "1", seed=2, count=trainer_chain.interruptions(4), ranks=2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ranks", [1, 2])
def test_ten_interruptions_of_finetune_leave_no_trace(
    nursery: Nursery, tmp_path: Path, ranks: int, seed: int
) -> None:
    steps = ("--accumulation", "1") if ranks == 2 else ()  # 48 of them, either way
    finetuned(
        nursery,
        tmp_path,
        *steps,
        seed=seed,
        count=10,
        ranks=ranks,
        LASTCALL_KILL_WAIT_SECONDS=["0", "0.1"][seed % 2],
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_finetune_below_the_real_launchers_ends_with_the_same_bits(nursery: Nursery, tmp_path: Path) -> None:
    """`lastcall run -- torchrun`, struck twice: every process is started as a user starts it."""
    trainer_chain.run(nursery, tmp_path, [FINETUNE, "--output-dir", tmp_path / "peace"], [], 2, **PLAIN)
    command = [
        *ranks_jobs.LASTCALL_RUN,
        *ranks_jobs.torchrun(2, "--standalone"),
        str(FINETUNE),
        "--output-dir",
        str(tmp_path / "struck"),
    ]
    codes = []
    for life, lines in enumerate((7, 8, 0)):
        said = tmp_path / f"said-{life}"
        with said.open("w") as file:
            job = subprocess.Popen(
                command, env=environment(LASTCALL_KILL_WAIT_SECONDS="0"), stdout=file, stderr=file
            )
        if lines:
            until(
                lambda said=said, lines=lines, job=job: (
                    said.read_text().count("{'loss'") >= lines or job.poll() is not None
                ),
                said.name,
            )
            job.send_signal(signal.SIGTERM)
        codes.append(job.wait(120))
    told = "\n".join((tmp_path / f"said-{life}").read_text()[-3000:] for life in range(3))
    assert codes == [75, 75, 0], told
    assert outcome(tmp_path / "struck") == outcome(tmp_path / "peace"), told


# ---- other trainers ----------------------------------------------------------------------------------------


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "a subclass with a loss and a loader of its own": ("bits_subclass.py", {}),
    "a trainer in the style of TRL": ("bits_trl.py", {}),
    "a trainer that counts in attributes of its own": (
        "bits_trl.py",
        {"count_tokens": True, "logging_steps": 3},
    ),
    "a frozen base": ("bits_frozen.py", {}),
    "a stream without a length": ("bits_iterable.py", {}),
    "a stream with a length": ("bits_iterable.py", {"length": True, "num_train_epochs": 2}),
    "a stream that shuffles with the global generator": ("bits_iterable.py", {"shuffle": "global"}),
    "group_by_length": ("bits_options.py", {"train_sampling_strategy": "group_by_length"}),
    "packing": ("bits_options.py", {"packing": True}),
    "an uneven last window": (
        "bits_options.py",
        {"gradient_accumulation_steps": 4, "num_train_epochs": 3, "count": 88},
    ),
    "a log every four steps": ("bits_options.py", {"logging_steps": 4}),
    "everything once an epoch": (
        "bits_options.py",
        {"eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 2},
    ),
    "noise in the data set": ("bits_options.py", {"noise": NOISE}),
    "two workers": ("bits_options.py", {"dataloader_num_workers": 2, "noise": NOISE}),
    "early stopping": (
        "bits_options.py",
        {"patience": 3, "load_best_model_at_end": True, "learning_rate": 0.3, "max_steps": 60},
    ),
    "a plateau scheduler": (
        "bits_options.py",
        {"lr_scheduler_type": "reduce_lr_on_plateau", "load_best_model_at_end": True},
    ),
}

MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "no saves but ours": ("bits_options.py", {"save_strategy": "no"}),
    "saves of the best only": (
        "bits_options.py",
        {"save_strategy": "best", "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"},
    ),
    "a log once an epoch": (
        "bits_options.py",
        {"logging_strategy": "epoch", "num_train_epochs": 3, "count": 30},
    ),
    "an evaluation at the start": ("bits_options.py", {"eval_on_start": True}),
    "callbacks restored by Transformers, too": (
        "bits_trl.py",
        {"restore_callback_states_from_checkpoint": True},
    ),
    "early stopping, restored by Transformers, too": (
        "bits_options.py",
        {
            "patience": 3,
            "load_best_model_at_end": True,
            "learning_rate": 0.3,
            "max_steps": 60,
            "restore_callback_states_from_checkpoint": True,
        },
    ),
    "batch_rebalance": ("bits_options.py", {"train_sampling_strategy": "batch_rebalance"}),
    "a cosine": ("bits_options.py", {"lr_scheduler_type": "cosine", "warmup_steps": 5}),
    "NEFTune": ("bits_options.py", {"neftune_noise_alpha": 5.0}),
    "tokens seen": ("bits_options.py", {"include_num_input_tokens_seen": "all"}),
    "noise and accumulation": (
        "bits_options.py",
        {"noise": NOISE, "gradient_accumulation_steps": 3, "max_steps": 14},
    ),
    "persistent workers": (
        "bits_options.py",
        {"dataloader_num_workers": 2, "dataloader_persistent_workers": True, "noise": NOISE},
    ),
    "a stream with noise": ("bits_iterable.py", {"noise": NOISE}),
    "a stream with workers": ("bits_iterable.py", {"dataloader_num_workers": 2, "noise": NOISE}),
    "a stream and accumulation": ("bits_iterable.py", {"gradient_accumulation_steps": 2, "max_steps": 16}),
    "ignore_data_skip": ("bits_options.py", {"ignore_data_skip": True}),
    "a loader that Accelerate has not seen": ("bits_loaders.py", {"plain": True, "noise": NOISE}),
    "epochs that are cut short": ("bits_loaders.py", {"cut": 7, "num_train_epochs": 4, "noise": NOISE}),
    "epochs that are cut short, and persistent workers": (
        "bits_loaders.py",
        {
            "cut": 7,
            "num_train_epochs": 4,
            "noise": NOISE,
            "dataloader_num_workers": 2,
            "dataloader_persistent_workers": True,
        },
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_one_interruption_leaves_no_trace_in(nursery: Nursery, tmp_path: Path, kind: str) -> None:
    script, case = KINDS[kind]
    compare(nursery, tmp_path, script, case)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS | MORE)
def test_five_interruptions_leave_no_trace_in(nursery: Nursery, tmp_path: Path, kind: str) -> None:
    script, case = (KINDS | MORE)[kind]
    compare(nursery, tmp_path, script, case, count=5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "a subclass with a loss and a loader of its own",
        "a trainer in the style of TRL",
        "a frozen base",
        "a stream with a length",
        "a stream without a length",
        "a stream that shuffles with the global generator",
        "a stream with noise",
        "a stream with workers",
        "group_by_length",
        "noise in the data set",
        "two workers",
    ],
)
def test_two_ranks_leave_no_trace_in(nursery: Nursery, tmp_path: Path, kind: str) -> None:
    script, case = (KINDS | MORE)[kind]
    compare(nursery, tmp_path, script, case, count=3, ranks=2)


@pytest.mark.slow
def test_a_stream_begins_anew_where_ignore_data_skip_asks_for_it(nursery: Nursery, tmp_path: Path) -> None:
    case = json.dumps({"ignore_data_skip": True, "noise": "torch"})
    command = [SCRIPTS / "bits_iterable.py"]
    chain = trainer_chain.run(
        nursery, tmp_path, command, [Blow(7, 0.0)], **QUICK, CASE=case, **places(tmp_path, "struck")
    )
    assert "the data is a stream: it starts over in the middle of epoch 0" in chain.logs[1], str(chain)
    assert "draws from the global random generator of torch, and so does the training" in chain.logs[0], str(
        chain
    )


@pytest.mark.slow
def test_peft_itself_leaves_no_trace(nursery: Nursery, tmp_path: Path) -> None:
    compare(nursery, tmp_path, "bits_frozen.py", {}, count=5, LIBRARY="peft")


# ---- single moments ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("lines", range(1, 17))
def test_no_line_of_the_log_is_a_bad_moment(nursery: Nursery, tmp_path: Path, lines: int) -> None:
    """Fourteen steps, three of them evaluated and saved, an epoch that ends at the tenth, the last step in
    the middle of an epoch."""
    case = json.dumps({"max_steps": 14, "count": 40, "load_best_model_at_end": True})
    trainer_chain.run(
        nursery, tmp_path, [SCRIPTS / "bits_options.py"], [], **PLAIN, CASE=case, **places(tmp_path, "peace")
    )
    command = [SCRIPTS / "bits_options.py"]
    chain = trainer_chain.run(
        nursery, tmp_path, command, [Blow(lines, 0.0)], **QUICK, CASE=case, **places(tmp_path, "struck")
    )
    assert results(tmp_path, "struck", 1) == results(tmp_path, "peace", 1), str(chain)
