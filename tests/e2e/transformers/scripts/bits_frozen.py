"""A frozen base with small trainable matrices beside it, saved on their own, as PEFT does; with LIBRARY=peft
by PEFT itself."""

import json
import os
from pathlib import Path
from typing import Any

import bits
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Trainer

case: dict[str, Any] = json.loads(os.environ.get("CASE", "{}"))


class LowRank(nn.Module):
    """A frozen layer, and a correction of rank 4 with dropout before it."""

    def __init__(self, base: nn.Module, width: int, out: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(width, 4) / 8)
        self.up = nn.Parameter(torch.zeros(4, out))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x) + self.dropout(x) @ self.down @ self.up
        return result


def adapted() -> nn.Module:
    model = bits.model()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = LowRank(block.attn.c_attn, 32, 96)
    return model


def adapted_by_peft() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4, lora_dropout=0.1, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True
    )
    model: nn.Module = get_peft_model(bits.model(), config)
    return model


class Small(Trainer):  # type: ignore[misc]
    """Saves and loads what is trained, and nothing of the base."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        trained = {
            name: value.detach() for name, value in self.model.named_parameters() if value.requires_grad
        }
        save_file(trained, folder / "adapter.safetensors", metadata={"format": "pt"})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.model.load_state_dict(
            load_file(Path(resume_from_checkpoint, "adapter.safetensors")), strict=False
        )

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)


peft = os.environ.get("LIBRARY") == "peft"
trainer = (Trainer if peft else Small)(
    model=adapted_by_peft() if peft else adapted(),
    args=bits.arguments(**({"load_best_model_at_end": True, "learning_rate": 0.03} | case)),
    train_dataset=bits.Sentences(60),
    eval_dataset=bits.Sentences(10, first=1000),
    data_collator=bits.padded,
)
bits.train(trainer)
