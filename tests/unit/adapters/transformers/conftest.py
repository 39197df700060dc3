"""A Trainer so small that making one is the expensive part, of a class that no other test has patched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from lastcall.adapters.transformers import patch

Make = Callable[..., Any]


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((self.linear(x) - labels) ** 2).mean()}


@pytest.fixture(autouse=True)
def _settings_and_signals_as_before(monkeypatch: pytest.MonkeyPatch, leaving: None) -> None:
    for name in ("LASTCALL_ENABLED", "LASTCALL_RUN_ID", "LASTCALL_SAVE_STRATEGY", "LASTCALL_SAVE_STEPS", "LASTCALL_SAVE_TOTAL_LIMIT",  # noqa: E501
                 "LASTCALL_DIRECTORY"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> type:
    """Trainer as Hugging Face wrote it, to be patched at will: a class of its own, since patches stay."""
    monkeypatch.setattr(patch, "_everywhere", False)
    originals = {
        name: getattr(getattr(Trainer, name), "_lastcall_original", getattr(Trainer, name))
        for name in ("train", "__init__")
    }
    return type("Fresh", (Trainer,), originals)


@pytest.fixture
def make(fresh: type, tmp_path: Path) -> Make:
    """Makes a trainer; what is said is an argument of TrainingArguments."""

    def made(kind: type | None = None, callbacks: list[Any] | None = None, **said: Any) -> Any:
        said = {
            "output_dir": str(tmp_path / "out"),
            "max_steps": 2,
            "save_strategy": "no",
            "report_to": "none",
            **said,
        }
        said.setdefault("logging_strategy", "steps" if "logging_steps" in said else "no")
        arguments = TrainingArguments(use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False, **said)
        torch.manual_seed(0)
        data = [{"x": torch.ones(2) * number, "labels": torch.zeros(1)} for number in range(8)]
        return (kind or fresh)(
            model=Tiny(), args=arguments, train_dataset=data, eval_dataset=data, callbacks=callbacks
        )

    return made
