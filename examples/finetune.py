"""A small causal language model, trained on a text file with transformers.Trainer: dropout, evaluation, the
best model at the end.

    python examples/finetune.py --output-dir runs/finetune
    lastcall run -- python examples/finetune.py --output-dir runs/finetune
    LASTCALL_ENABLED=1 torchrun --nproc-per-node 2 examples/finetune.py --output-dir runs/finetune

There is no line of lastcall in it. Run as in the second or the third line, it can be stopped at any moment
and started again with the same command: it goes on where it was, and ends with the bits of a run that was
never stopped. Nothing is downloaded.
"""

import argparse
import hashlib
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

TEXT = Path(__file__).resolve().parent / "data" / "harbour.txt"


def tokenizer_of(text: str) -> PreTrainedTokenizerFast:
    """Byte pairs, learned from the text itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text.splitlines(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", bos_token="<end>", pad_token="<end>"
    )


def pieces(tokenizer: PreTrainedTokenizerFast, text: str, length: int) -> list[dict[str, list[int]]]:
    """The text as rows of so many tokens, each of which begins in the middle of the one before."""
    tokens = tokenizer(text)["input_ids"]
    return [
        {"input_ids": tokens[start : start + length]}
        for start in range(0, len(tokens) - length + 1, length // 2)
    ]


def model_of(tokenizer: PreTrainedTokenizerFast, length: int, width: int) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=length,
        n_embd=width,
        n_layer=2,
        n_head=4,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return GPT2LMHeadModel(config)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", default="runs/finetune")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--epochs", type=float, default=8.0)
    parser.add_argument("--steps", type=int, default=-1, help="end after so many, whatever --epochs says")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--eval-steps", type=int, default=5)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options = parse()
    set_seed(options.seed)
    text = options.text.read_text()
    tokenizer = tokenizer_of(text)
    rows = pieces(tokenizer, text, options.length)
    held_out = rows[::8]
    training = [row for number, row in enumerate(rows) if number % 8]

    trainer = Trainer(
        model=model_of(tokenizer, options.length, options.width),
        args=TrainingArguments(
            output_dir=options.output_dir,
            num_train_epochs=options.epochs,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch,
            gradient_accumulation_steps=options.accumulation,
            dataloader_num_workers=options.workers,
            dataloader_pin_memory=torch.cuda.is_available(),
            # or two ranks without a GPU would train alone, each in the other's folder
            use_cpu=not torch.cuda.is_available(),
            learning_rate=2e-3,
            lr_scheduler_type="cosine",
            warmup_steps=5,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=options.eval_steps,
            save_strategy="steps",
            save_steps=options.eval_steps,
            save_total_limit=2,
            load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
            seed=options.seed,
            disable_tqdm=True,
            report_to="none",
        ),
        train_dataset=training,
        eval_dataset=held_out,
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    trainer.save_model(f"{options.output_dir}/final")
    trainer.save_state()
    if trainer.is_world_process_zero():
        weights = Path(options.output_dir, "final", "model.safetensors").read_bytes()
        print(
            f"finished {trainer.state.global_step} steps, weights {hashlib.sha256(weights).hexdigest()}",
            flush=True,
        )


if __name__ == "__main__":
    main()
