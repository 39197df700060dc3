"""Loops of less usual shapes, chosen by SHAPE: an optimizer that steps rarely beside one that steps always,
loaders made anew in every epoch, a loop left by `break` before another."""

from __future__ import annotations

import os

import torch
from torch.utils.data import DataLoader

import lastcall
from helpers.models import training


def rare(model: torch.nn.Module) -> dict[str, object]:
    head = torch.nn.Linear(1, 1)
    often = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rarely = torch.optim.SGD(head.parameters(), lr=1e-2, momentum=0.9)
    state = {"model": model, "head": head, "often": often, "rarely": rarely}
    with lastcall.protect(training.DIRECTORY, **state) as run:
        for step in run.steps(14):
            training.interrupt_first_pass(run)
            tokens = training.batch()
            head(model.loss(tokens).reshape(1, 1)).square().mean().backward()
            if step % 3 == 2:
                rarely.step()
                rarely.zero_grad()
            often.step()
            often.zero_grad()
    return state


def anew(model: torch.nn.Module) -> dict[str, object]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer) as run:
        for _ in run.epochs(3):
            for tokens in run.batches(DataLoader(training.Sentences(20), batch_size=4, shuffle=True)):
                training.interrupt_first_pass(run)
                optimizer.zero_grad()
                model.loss(tokens).backward()
                optimizer.step()
    return {"model": model, "optimizer": optimizer}


def broken(model: torch.nn.Module) -> dict[str, object]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first, second = (DataLoader(training.Sentences(count), batch_size=4, shuffle=True) for count in (20, 16))
    seen = {"batches": 0}
    with lastcall.protect(
        training.DIRECTORY, model=model, optimizer=optimizer, seen=seen, data=[first, second]
    ) as run:
        for _ in run.epochs(2):
            for loader in (first, second):
                for tokens in run.batches(loader):
                    training.interrupt_first_pass(run)
                    optimizer.zero_grad()
                    model.loss(tokens).backward()
                    optimizer.step()
                    seen["batches"] += 1
                    if loader is first and seen["batches"] % 7 == 3:
                        break
    return {"model": model, "optimizer": optimizer, "seen": seen}


if __name__ == "__main__":
    training.seed()
    shapes = {"rare": rare, "anew": anew, "broken": broken}
    training.finish(**shapes[os.environ["SHAPE"]](training.Block()))
