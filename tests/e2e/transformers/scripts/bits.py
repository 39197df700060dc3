"""What the scripts of test_bit_identical.py share: a tiny model, data, a journal of every micro-batch, and a
result to compare.

OUTPUT     the output_dir of the run
RESULT     where the result is written, one file a rank: weights, history, callbacks, randomness
JOURNAL    where every micro-batch is written, one file a rank, appended to by each incarnation
HF_RESUME  1: resume as Transformers does by itself (to learn what it restores); nothing of lastcall reads
           this
STOP_AT    end the process without a word after this step
"""

import hashlib
import json
import os
import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

WORDS, LONGEST = 64, 20
RANK = int(os.environ.get("RANK", "0"))
TIMES = ("_runtime", "_per_second")  # what differs from run to run by nature


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def sentence(number: int) -> torch.Tensor:
    """Arithmetic progressions of different lengths."""
    dice = random.Random(number)
    return (dice.randrange(WORDS) + dice.randrange(1, 9) * torch.arange(dice.randrange(6, LONGEST))) % WORDS


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """`noise` names the generators that replace a word each time a sentence is read."""

    def __init__(self, count: int, noise: str = "", first: int = 0) -> None:
        self._rows = [sentence(first + number) for number in range(count)]
        self._noise = noise

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": noisy(self._rows[index], self._noise)}


def noisy(tokens: torch.Tensor, noise: str) -> torch.Tensor:
    tokens = tokens.clone()
    if "python" in noise:
        tokens[random.randrange(len(tokens))] = random.randrange(WORDS)
    if "numpy" in noise:
        tokens[np.random.randint(len(tokens))] = np.random.randint(WORDS)
    if "torch" in noise:
        tokens[int(torch.randint(len(tokens), ()))] = int(torch.randint(WORDS, ()))
    return tokens


def padded(rows: list[dict[str, torch.Tensor]], length: int = 0) -> dict[str, torch.Tensor]:
    longest = length or max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for number, row in enumerate(rows):
        ids[number, : len(row["input_ids"])] = row["input_ids"]
        labels[number, : len(row["input_ids"])] = row["input_ids"]
    return {"input_ids": ids, "attention_mask": (labels != -100).long(), "labels": labels}


def packed(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """All sentences of a batch in one row, without padding, as packing collators make it."""
    ids = torch.cat([row["input_ids"] for row in rows])[None]
    position = torch.cat([torch.arange(len(row["input_ids"])) for row in rows])[None]
    labels = ids.clone()
    labels[position == 0] = -100
    return {"input_ids": ids, "position_ids": position, "labels": labels}


def arguments(**more: Any) -> TrainingArguments:
    usual: dict[str, Any] = {
        "output_dir": os.environ["OUTPUT"],
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": 24,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "save_strategy": "steps",
        "save_steps": 5,
        "save_total_limit": 2,
        "disable_tqdm": True,
        "report_to": "none",
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    if "num_train_epochs" in more:
        del usual["max_steps"]
    return TrainingArguments(**(usual | more))


class Stop(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == int(os.environ.get("STOP_AT", "-1")):
            os._exit(9)


def journal(trainer: Trainer) -> None:
    """Write the loss and the data of every micro-batch."""
    path = os.environ.get("JOURNAL")
    if not path:
        return
    file = os.open(f"{path}-{RANK}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    place = {"step": -1, "micro": 0}

    def note(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not module.training:
            return
        step = trainer.state.global_step
        place.update({"step": step, "micro": place["micro"] + 1 if place["step"] == step else 0})
        loss = output.loss if output.loss is not None else output.logits.sum()
        data = zlib.crc32(kwargs["input_ids"].numpy().tobytes())
        os.write(file, (json.dumps([step, place["micro"], loss.item().hex(), data]) + "\n").encode())

    trainer.model.register_forward_hook(note, with_kwargs=True)


def train(trainer: Trainer) -> None:
    """Train, and write what is compared."""
    journal(trainer)
    trainer.add_callback(Stop())
    output = trainer.train(resume_from_checkpoint=True if os.environ.get("HF_RESUME") else None)
    state = trainer.state
    best = Path(state.best_model_checkpoint).name if state.best_model_checkpoint else None
    result = {
        "weights": digest(trainer.model.state_dict()),
        "history": [plain(entry) for entry in state.log_history],
        "best": [state.best_metric, state.best_global_step, best],
        "place": [
            state.global_step,
            state.epoch,
            state.max_steps,
            state.num_train_epochs,
            state.num_input_tokens_seen,
        ],
        "flos": state.total_flos,
        "train_loss": output.training_loss,
        "callbacks": [
            vars(each)
            for each in trainer.callback_handler.callbacks
            if hasattr(each, "state") and not type(each).__module__.startswith("lastcall")
        ],
        "schedule": trainer.lr_scheduler.state_dict(),
        "randomness": [random.random(), float(np.random.rand()), float(torch.rand(()))],
    }
    Path(f"{os.environ['RESULT']}-{RANK}").write_text(json.dumps(result, default=str, indent=1))


def plain(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if not key.endswith(TIMES)}


def digest(state: dict[str, torch.Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(state):
        value: Any = state[name]
        # sharded: all ranks come by here
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        total.update(name.encode() + whole.contiguous().numpy().tobytes())
    return total.hexdigest()
