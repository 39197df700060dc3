# ruff: noqa: E101, W291, N806
# fmt: off
"""Training functions as people write them, for jobs of Kubeflow. Each stands alone: its text is all that
travels."""

from __future__ import annotations

from typing import Any


def peculiar(path: str, words: list[str], nothing: None = None) -> None:
    r"""What a shell, a here-document, Kubernetes and a format string would each like to change: ${x} `date`
    $(HOSTNAME) $$ {y} \n."""
    import json
    import os

    price, HOSTNAME = 3, "mine"
    said = {
        "braces": f"cost is ${price} and ${{price}}",
        "dollars": "$HOME ${HOME} $$ $1 $(HOSTNAME) $$(HOSTNAME) $((1+1)) $'a'",
        "backticks": "`echo pwned` and `touch harmed`",
        "backslashes": "\\n \\\\ \t \\$ \\`",
        "raw": r"\d+\.\\ \$ \`",
        "continued": "one \
line",
        "quotes": "it's \"so\" '''and''' so",
        "unicode": "Grüße, 日本語, 🐳, \u2028, \x00",
        "name": HOSTNAME,
        "words": words,
        "nothing": nothing,
        "lines": """first
EOM
  	tab and spaces  
"""
        """
last
""",
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"said": said, "harmed": os.path.exists("harmed")}, file)


def shelled(path: str) -> None:
    with open(path, "w") as file:
        file.write("${x} `echo pwned` $(HOSTNAME)")


def train(epochs: float, length: int = 64, pause: float = 0.0) -> None:
    """A tiny random language model, trained as anybody would. Nothing is downloaded."""
    import os
    import time

    import torch
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    set_seed(0)
    rows = torch.randint(0, 64, (length, 8), generator=torch.Generator().manual_seed(0)).tolist()
    data = [{"input_ids": row, "labels": row} for row in rows]

    class Slow(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            print(f"step {state.global_step}", flush=True)
            time.sleep(pause)

    args = TrainingArguments(
        output_dir="lost",
        num_train_epochs=epochs,
        per_device_train_batch_size=8,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        use_cpu=True,
    )
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0))  # noqa: E501
    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[Slow()])
    trainer.train()
    trainer.save_model(os.path.join(args.output_dir, "final"))
