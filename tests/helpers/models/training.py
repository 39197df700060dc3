"""What the training scripts under test share: a seed, a small model, data, and a digest of everything at the
end.

python script.py DIRECTORY RESULT      trains in DIRECTORY, writes the digest of the final state to RESULT
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lastcall import Run
from lastcall.storage import files as storage

DIRECTORY, RESULT = sys.argv[1], Path(sys.argv[2])
PAUSE = 0.004  # seconds of every step in which a signal may fall


def seed() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


class Block(nn.Module):
    """One layer of a transformer, with dropout, and an output that shares its weights with the input."""

    def __init__(self, width: int = 16, words: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.2, batch_first=True)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embed(tokens)))

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Sentences(Dataset[torch.Tensor]):
    """Tokens that are changed at random, with all three generators, when they are read."""

    def __init__(self, count: int = 96) -> None:
        self.tokens = torch.randint(0, 32, (count, 8), generator=torch.Generator().manual_seed(4))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> torch.Tensor:
        tokens = self.tokens[index].clone()
        tokens[random.randrange(8)] = random.randrange(32)
        tokens[np.random.randint(8)] = int(np.random.randint(32))
        tokens[torch.randint(8, ())] = torch.randint(32, ())
        return tokens


def cycle(loader: DataLoader[torch.Tensor]) -> Iterator[torch.Tensor]:
    while True:
        yield from loader


def batch() -> torch.Tensor:
    """A batch made of python's, numpy's and torch's randomness."""
    tokens = torch.randint(0, 32, (4, 8))
    tokens[random.randrange(4), int(np.random.randint(8))] = int(abs(np.random.normal()) * 8) % 32
    tokens[0, 0] = int(abs(random.gauss(0, 1)) * 8) % 32
    return tokens


def parts() -> tuple[Block, torch.optim.Optimizer]:
    """A seeded model and its optimizer."""
    seed()
    model = Block()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model: Block, optimizer: torch.optim.Optimizer) -> float:
    """A whole step on a random batch."""
    loss = model.loss(batch())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def wait_for(name: str) -> None:
    """Wait until the test makes this file in the working directory: a main thread that is busy, but comes to
    no boundary."""
    print("waiting for", name, flush=True)
    while not Path(name).exists():
        time.sleep(0.01)


def interrupt_first_pass(run: Run) -> None:
    """With INTERRUPT=1: the notice comes in the first pass of every incarnation, and is served at the end of
    it. Not a global that says so: lastcall would bring it back."""
    if run._driver is not None and os.environ.pop("INTERRUPT", "") == "1":
        os.kill(os.getpid(), signal.SIGTERM)
        while not run._driver.session.open:
            time.sleep(0.001)


def wait_until_saved(run: Run) -> None:
    """Let the periodic save that may be in progress come to its end, so that none is put off."""
    assert run._driver is not None
    run._driver.session.wait_for_background()


def hang() -> None:
    """A C call that never returns: a mutex that this thread holds already."""
    mutex = ctypes.create_string_buffer(64)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_init(mutex, None)
    libc.pthread_mutex_lock(mutex)
    print("hanging", flush=True)
    libc.pthread_mutex_lock(mutex)


class SlowFiles(storage.Files):
    """A disk whose first fsync takes until the test makes the file `disk` in the working directory."""

    def __init__(self) -> None:
        self.slow = True

    def fsync(self, fd: int) -> None:
        if self.slow:
            self.slow = False
            wait_for("disk")
        super().fsync(fd)


def say(step: int) -> None:
    """A pass has begun. Then some time, so that signals fall into the middle of steps and not between
    processes."""
    print("at", step, flush=True)
    time.sleep(PAUSE)


def average(ema: dict[str, torch.Tensor], model: nn.Module, decay: float = 0.9) -> None:
    with torch.no_grad():
        for name, value in model.named_parameters():
            ema[name].mul_(decay).add_(value, alpha=1 - decay)


def finish(**state: Any) -> None:
    """Write the digest of this state and of the generators."""
    digests = {
        name: digest(value.state_dict() if hasattr(value, "state_dict") else value)
        for name, value in state.items()
    }
    digests |= {"python": digest(random.getstate()), "torch": digest(torch.get_rng_state())}
    digests |= {"numpy": digest(np.random.get_state())}
    RESULT.write_text("\n".join(f"{name} {value}" for name, value in sorted(digests.items())))


def digest(value: Any) -> str:
    hasher = hashlib.sha256()
    _update(hasher, value)
    return hasher.hexdigest()[:16]


def _update(hasher: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        hasher.update(
            f"{value.dtype}{tuple(value.shape)}".encode() + value.detach().contiguous().numpy().tobytes()
        )
    elif isinstance(value, np.ndarray):
        hasher.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=repr):
            hasher.update(repr(key).encode())
            _update(hasher, value[key])
    elif isinstance(value, list | tuple):
        hasher.update(type(value).__name__.encode())
        for item in value:
            _update(hasher, item)
    else:
        hasher.update(repr(value).encode())
