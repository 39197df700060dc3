"""A small language model, trained the way people train: dropout, tied weights, AdamW with a cosine schedule,
clipped gradients, an average of the weights, a shuffled loader with two workers and random augmentation,
accumulation of four.

    python examples/train.py runs/exp1 --epochs 3

Three lines belong to lastcall: `protect`, `run.epochs` and `run.batches`. Stopped at any moment and started
again with the same command, it goes on where it was, and ends with the bits of a run that was never stopped.
"""

import argparse
import hashlib
import math
import random
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lastcall

WORDS, LENGTH, WIDTH = 64, 33, 128
BATCH, WINDOW = 8, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.05)
        self.position = nn.Parameter(torch.zeros(LENGTH - 1, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layers(self.embed(tokens) + self.position, mask=mask, is_causal=True))


class Sequences(Dataset[torch.Tensor]):
    """Arithmetic progressions, a few words of which are replaced at random each time they are read."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        start, step = torch.randint(0, WORDS, (2, count, 1), generator=generator)
        self.tokens = (start + step * torch.arange(LENGTH)) % WORDS

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> torch.Tensor:
        tokens = self.tokens[index].clone()
        for _ in range(random.randrange(3)):
            tokens[np.random.randint(LENGTH)] = int(torch.randint(WORDS, ()))
        return tokens


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, held_out: torch.Tensor, seconds: float) -> float:
    """The loss on data that is not trained on, as slowly as asked."""
    model.eval()
    end = time.monotonic() + seconds
    loss = loss_of(model, held_out).item()
    while time.monotonic() < end:
        time.sleep(0.02)
    model.train()
    return loss


def train(args: argparse.Namespace) -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)

    data = Sequences(args.samples)
    loader = DataLoader(data, BATCH, shuffle=True, num_workers=2)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    total = args.epochs * len(loader) // WINDOW
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / total))
    )
    ema = {name: value.detach().clone() for name, value in model.named_parameters()}
    counters = {"batches": 0, "best": math.inf}
    held_out = Sequences(16).tokens

    with lastcall.protect(
        args.directory,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        ema=ema,
        counters=counters,
        data=loader,
    ) as run:
        for epoch in run.epochs(args.epochs):
            for tokens in run.batches(loader):
                loss = loss_of(model, tokens)
                (loss / WINDOW).backward()
                counters["batches"] += 1
                if counters["batches"] % WINDOW == 0:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
                    with torch.no_grad():
                        for name, value in model.named_parameters():
                            ema[name].lerp_(value, 0.05)
                    step = counters["batches"] // WINDOW
                    run.report(loss=loss)
                    if step % args.print_steps == 0:
                        print(f"epoch {epoch} step {step}/{total} loss {loss.item():.4f}", flush=True)
                time.sleep(args.slow_seconds)
            print(f"evaluating after epoch {epoch}", flush=True)
            counters["best"] = min(counters["best"], evaluate(model, held_out, args.eval_seconds))

    print(f"finished: best loss {counters['best']:.4f}")
    if args.result is not None:
        args.result.write_text(digest(model, optimizer, scheduler, ema, counters))


def digest(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    ema: dict[str, torch.Tensor],
    counters: dict[str, float],
) -> str:
    """A line of SHA-256 for each part of the final state, bit for bit."""
    state = {
        "parameters": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "ema": ema,
        "counters": counters,
        "randomness": [random.getstate(), np.random.get_state(), torch.get_rng_state()],
    }
    return "".join(
        f"{name} {hashlib.sha256(canonical(value)).hexdigest()}\n" for name, value in state.items()
    )


def canonical(value: object) -> bytes:
    if isinstance(value, torch.Tensor):
        return canonical(value.detach().numpy())
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}".encode() + value.tobytes()
    if isinstance(value, dict):
        return (
            b"{"
            + b",".join(repr(key).encode() + b":" + canonical(item) for key, item in value.items())
            + b"}"
        )
    if isinstance(value, list | tuple):
        return b"[" + b",".join(map(canonical, value)) + b"]"
    return repr(value).encode()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="where checkpoints are kept")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=640, help="sequences in an epoch")
    parser.add_argument("--result", type=Path, help="write a digest of the final state to this file")
    parser.add_argument("--slow-seconds", type=float, default=0.0, help="sleep so long after each batch")
    parser.add_argument(
        "--eval-seconds", type=float, default=0.0, help="let each evaluation take at least so long"
    )
    parser.add_argument("--print-steps", type=int, default=10, help="print a line every so many steps")
    args = parser.parse_args()
    torch.set_num_threads(1)
    train(args)


if __name__ == "__main__":
    main()
