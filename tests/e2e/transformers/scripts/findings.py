"""A fine-tuning as a user of Transformers writes it, on a tiny random GPT-2, with a journal of all that
happens.

    python findings.py OUTPUT_DIR        TRAINER_PLAN: its shape; TRAINER_MODE: hf (their callback), lastcall
                                         (nothing), plain (nothing)

In a forked process the modules are imported already, so what lastcall-auto.pth does in a started one is done
here.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

from helpers.ranks import plan as ranks_plan
from helpers.trainer import plan as trainer_plan

MODE = os.environ.get("TRAINER_MODE", "plain")
if MODE == "lastcall" and os.environ.get("TRAINER_FORKED"):
    from lastcall.auto import bootstrap, imports

    imports.Finder(bootstrap.PATCHES).install()

journal = ranks_plan.Journal(int(os.environ.get("RANK", "0")))
plan = trainer_plan.read_plan()
directory = Path(sys.argv[1])
if plan.import_seconds:
    journal.say("importing")
    time.sleep(plan.import_seconds)

import torch  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed  # noqa: E402


class Tokens(torch.utils.data.Dataset):
    """Random tokens, always the same."""

    def __init__(self, count: int, seed: int) -> None:
        self.tokens = torch.randint(0, 64, (count, 16), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Watched(Trainer):
    """A Trainer that says what it does, and that takes its time."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        journal.say("training", step=self.state.global_step)
        time.sleep(plan.seconds)
        if self.state.global_step == plan.long:
            time.sleep(2.0)
        if self.state.global_step == plan.raises and journal.first_time("raised"):
            raise ValueError("a bad batch")
        loss = super().training_step(model, inputs, num_items_in_batch)
        data = zlib.crc32(inputs["input_ids"].numpy().tobytes())
        journal.say(
            "micro", step=self.state.global_step, data=f"{data:08x}", state={"loss": loss.item().hex()}
        )
        return loss

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        journal.say("evaluation", step=self.state.global_step)
        return super().evaluate(*args, **options)

    def prediction_step(self, *args: Any, **options: Any) -> Any:
        journal.say("evaluating", step=self.state.global_step)
        time.sleep(plan.eval_seconds)
        return super().prediction_step(*args, **options)

    def _save_checkpoint(self, *args: Any, **options: Any) -> None:
        journal.say("save", step=self.state.global_step)
        super()._save_checkpoint(*args, **options)


class Telling(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        journal.say("at", step=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        journal.say("did", step=state.global_step)
        if plan.chatty:
            for number in range(40):
                print(f"step {state.global_step}: line {number} {'.' * 200}")

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        journal.say("on_save", step=state.global_step)


def arguments() -> TrainingArguments:
    best = (
        {"load_best_model_at_end": True, "metric_for_best_model": "score", "greater_is_better": True}
        if plan.best is not None
        else {}
    )
    return TrainingArguments(
        output_dir=str(directory),
        max_steps=plan.steps,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=plan.accumulate,
        learning_rate=plan.rate,
        seed=plan.seed,
        save_strategy=plan.save,
        save_steps=plan.save_steps,
        save_total_limit=plan.limit,
        eval_strategy=plan.evaluate,
        eval_steps=plan.save_steps,
        dataloader_num_workers=plan.workers,
        logging_steps=5,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        enable_jit_checkpoint=MODE == "hf",
        **best,
    )


def make() -> Trainer:
    set_seed(plan.seed)
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), plan.dropout)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64,
            n_positions=16,
            n_embd=32,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
            **rates,
        )
    )
    more: dict[str, Any] = {}
    if plan.best is not None:
        more = {
            "compute_metrics": lambda _: {"score": -abs(trainer.state.global_step - plan.best)},
            "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
        }
    trainer = Watched(
        model=model,
        args=arguments(),
        train_dataset=Tokens(plan.samples, plan.seed),
        eval_dataset=Tokens(plan.eval_batches * 2, 99),
        callbacks=[Telling()],
        **more,
    )
    return trainer


def train() -> None:
    trainer = make()
    if plan.make_seconds:
        journal.say("made")
        time.sleep(plan.make_seconds)
    if plan.first:
        trainer.args.max_steps = plan.first
        trainer.train()
        trainer.args.max_steps = plan.steps
        journal.say("again")
    resume = True if os.environ.get("TRAINER_RESUME") else None
    trainer.train(resume_from_checkpoint=resume)
    journal.say("tail", step=trainer.state.global_step)
    time.sleep(plan.tail_seconds)
    trainer.save_model(str(directory / "final"))
    weights = hashlib.sha256()
    for _, value in sorted(trainer.model.state_dict().items()):
        weights.update(value.numpy().tobytes())
    journal.say("done", step=trainer.state.global_step, state={"weights": weights.hexdigest()})


def favoured() -> None:
    """Transformers waits for 3 s after SIGTERM before it asks for a save, and cannot be told otherwise. Here
    it gets our kill wait."""
    from transformers import trainer_jit_checkpoint

    trainer_jit_checkpoint.CheckpointManager.__init__.__defaults__ = (
        float(os.environ.get("LASTCALL_KILL_WAIT_SECONDS", "3")),
    )


if MODE == "hf":
    favoured()
trainer_plan.Disk(plan, journal).install(ours=MODE == "lastcall")
torch.set_num_threads(1)
if plan.thread:
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            train()
        except BaseException as error:
            # a thread's exception must end the process as one of the main thread would
            failed.append(error)
            raise

    worker = threading.Thread(target=guarded)
    worker.start()
    worker.join()
    if failed:
        sys.exit(1)
else:
    train()
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
