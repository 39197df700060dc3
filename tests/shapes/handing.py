"""What a loop forgets to hand over, and what it need not hand over. The rows that are warned of would be
silently different."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from helpers.data.pipelines import BATCHES, learn, loader, parts, protect, shape

KILLS = (5, BATCHES + 5)


@shape(kills=KILLS, warned="the learning rate scheduler `scheduler` (StepLR)")
def forgotten_scheduler() -> None:
    """A5, of an epoch: it steps only when the first one is over, and is warned of before."""
    data = loader()
    scheduler = StepLR(parts()[1], 1, 0.5)
    with protect() as run:
        for _ in run.epochs(3):
            for batch in run.batches(data):
                learn(batch)
            scheduler.step()


@shape(kills=KILLS, warned="the learning rate scheduler `scheduler` (SequentialLR)")
def forgotten_schedulers_in_one() -> None:
    """A5: one doubt, not one for each scheduler in it."""
    data = loader()
    optimizer = parts()[1]
    scheduler = SequentialLR(optimizer, [LinearLR(optimizer, 0.5, 1.0, 3), StepLR(optimizer, 2)], [3])
    with protect() as run:
        for _ in run.epochs(2):
            for batch in run.batches(data):
                learn(batch)
                scheduler.step()


@shape(kills=KILLS, warned="the learning rate scheduler `self.scheduler` (ReduceLROnPlateau)")
def forgotten_scheduler_of_a_trainer() -> None:
    """A5: found through the attribute of the object that trains."""

    class Trainer:
        def __init__(self) -> None:
            self.scheduler = ReduceLROnPlateau(parts()[1], patience=0)

        def train(self) -> None:
            data = loader()
            with protect() as run:
                for _ in run.epochs(2):
                    for batch in run.batches(data):
                        learn(batch)
                    self.scheduler.step(1.0)

    Trainer().train()


@shape(kills=KILLS)
def schedulers_handed_over() -> None:
    """A5: the same, handed over."""
    data = loader()
    optimizer = parts()[1]
    scheduler = SequentialLR(optimizer, [LinearLR(optimizer, 0.5, 1.0, 3), StepLR(optimizer, 2)], [3])
    with protect(scheduler=scheduler) as run:
        for _ in run.epochs(2):
            for batch in run.batches(data):
                learn(batch)
                scheduler.step()


@shape(kills=KILLS, warned="the parameters of `ema` (AveragedModel) change")
def forgotten_average() -> None:
    """A5: torch's own EMA."""
    data = loader()
    model, _ = parts()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    with protect() as run:
        for _ in run.epochs(2):
            for batch in run.batches(data):
                learn(batch)
                ema.update_parameters(model)


@shape(kills=KILLS, warned="the parameters of `ema` (Net) change")
def forgotten_average_by_hand() -> None:
    """A5: a copy of the model, moved a little towards it at every step."""
    data = loader()
    model, _ = parts()
    ema = copy.deepcopy(model)
    with protect() as run:
        for _ in run.epochs(2):
            for batch in run.batches(data):
                learn(batch)
                with torch.no_grad():
                    for mine, theirs in zip(ema.parameters(), model.parameters(), strict=True):
                        mine.lerp_(theirs, 0.1)


@shape(kills=KILLS)
def average_handed_over() -> None:
    data = loader()
    model, _ = parts()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    with protect(ema=ema) as run:
        for _ in run.epochs(2):
            for batch in run.batches(data):
                learn(batch)
                ema.update_parameters(model)


@shape(kills=KILLS)
def frozen_and_copied_models() -> None:
    """A5: a frozen teacher, and a copy that is made before each evaluation, need not be handed over."""
    data = loader()
    model, _ = parts()
    teacher = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).requires_grad_(False)
    judged = copy.deepcopy(model).eval()
    with protect() as run:
        for _ in run.epochs(2):
            for batch in run.batches(data):
                with torch.no_grad():
                    teacher(batch[0].reshape(-1, 1))
                learn(batch)
                if run.step % 3 == 0:
                    judged.load_state_dict(model.state_dict())
                    judged(batch[0])


@shape(kills=KILLS, warned="`target` (Net) is used in a later step than it is written")
def forgotten_target_network() -> None:
    """A5: a copy that serves until the next one is made."""
    data = loader()
    model, _ = parts()
    target = copy.deepcopy(model).eval()
    with protect() as run:
        for _ in run.epochs(2):
            for (batch,) in run.batches(data):
                with torch.no_grad():
                    wanted = target(batch)
                learn(wanted.flatten())
                if run.step % 4 == 0:
                    target.load_state_dict(model.state_dict())


def second() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    other = nn.Linear(1, 1)
    return other, torch.optim.Adam(other.parameters(), 1e-2)


def learn_both(other: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    out = other(batch[0].reshape(-1, 1) / 100)
    out.square().mean().backward()
    optimizer.step()
    learn(out.detach().flatten())


@shape(kills=KILLS, warned="the optimizer `other_optimizer` (Adam) steps")
def forgotten_second_optimizer() -> None:
    """A5, F9."""
    data = loader()
    other, other_optimizer = second()
    with protect(other=other) as run:
        for _ in run.epochs(2):
            for batch in run.batches(data):
                learn_both(other, other_optimizer, batch)


@shape(kills=KILLS, warned="the parameters of `other` (Linear) change")
def forgotten_second_model() -> None:
    """A5: its optimizer was handed over."""
    data = loader()
    other, other_optimizer = second()
    with protect(other_optimizer=other_optimizer) as run:
        for _ in run.epochs(2):
            for batch in run.batches(data):
                learn_both(other, other_optimizer, batch)


@shape(kills=KILLS, warned="the optimizer `late` (Adam) steps")
def optimizer_made_inside_the_block() -> None:
    """F9."""
    data = loader()
    other, _ = second()
    with protect(other=other) as run:
        late = torch.optim.Adam(other.parameters(), 1e-2)
        for _ in run.epochs(2):
            for batch in run.batches(data):
                learn_both(other, late, batch)


@shape(kills=KILLS, warned="the optimizer `optimizer` (Adam) steps")
def no_optimizer_handed_over() -> None:
    """F9: protect(model=model) and nothing else; a scheduler that was handed over refers to it, and does not
    save it."""
    data = loader()
    other, optimizer = second()
    scheduler = StepLR(optimizer, 5)
    with protect(other=other, scheduler=scheduler) as run:
        for _ in run.epochs(2):
            for batch in run.batches(data):
                learn_both(other, optimizer, batch)
                scheduler.step()


@shape(kills=KILLS)
def plain_sgd_has_no_state() -> None:
    """F9: nothing is lost with an optimizer that keeps nothing."""
    data = loader()
    other, _ = second()
    sgd = torch.optim.SGD(other.parameters(), 1e-2)
    with protect(other=other) as run:
        for _ in run.epochs(2):
            for batch in run.batches(data):
                learn_both(other, sgd, batch)


@shape(kills=KILLS, warned="the gradient scaler `scaler` is in use")
def forgotten_scaler() -> None:
    """A5: the scale grows every three steps."""
    data = loader()
    other, optimizer = second()
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    with protect(other=other, other_optimizer=optimizer) as run:
        for _ in run.epochs(2):
            for batch in run.batches(data):
                optimizer.zero_grad()
                scaler.scale(other(batch[0].reshape(-1, 1)).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
                learn(torch.tensor([scaler.get_scale() / 1e4]))


@shape(kills=KILLS)
def scaler_that_is_off() -> None:
    """A5: GradScaler(enabled=False), as in every script with a switch for mixed precision."""
    data = loader()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with protect() as run:
        for _ in run.epochs(2):
            for batch in run.batches(data):
                scaler.scale(torch.zeros(1))
                learn(batch)
                scaler.update()


@shape(kills=(5, 6, BATCHES + 5))
def adversaries_whose_gradients_wait() -> None:
    """F2: the generator's backward leaves gradients at the discriminator, whose optimizer has stepped before
    and clears afterwards."""
    data = loader()
    other, other_optimizer = second()
    model, optimizer = parts()
    with protect(other=other, other_optimizer=other_optimizer) as run:
        for _ in run.epochs(2):
            for batch in run.batches(data):
                other(batch[0].reshape(-1, 1) / 100).square().mean().backward()
                other_optimizer.step()
                other_optimizer.zero_grad()
                fake = model(batch[0])
                (other(fake).mean() * 0.1).backward()
                optimizer.step()
                optimizer.zero_grad()
                learn(other(fake.detach()).detach().flatten(), update=False, scale=0.0)


@shape(kills=(70, 71))
def adversary_that_begins_late() -> None:
    """F2: after the passes from which the shape of the loop is learned."""
    other, other_optimizer = second()
    model, optimizer = parts()
    with protect(other=other, other_optimizer=other_optimizer) as run:
        for step in run.steps(76):
            batch = torch.full((4,), float(step))
            if step >= 66:
                other(batch.reshape(-1, 1) / 100).square().mean().backward()
                other_optimizer.step()
                other_optimizer.zero_grad()
            fake = model(batch)
            (other(fake).mean() * 0.1).backward()
            if step < 66:
                other_optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
            learn(other(fake.detach()).detach().flatten(), update=False, scale=0.0)


@shape(kills=(5, BATCHES - 1, BATCHES + 5))
def no_optimizer_at_all() -> None:
    """A8: manual SGD. A pass that changes the parameters is a step."""
    data = loader()
    model, _ = parts()
    with protect(optimizer=None) as run:
        for _ in run.epochs(2):
            for batch in run.batches(data):
                learn(batch, update=False)
                with torch.no_grad():
                    for parameter in model.parameters():
                        assert parameter.grad is not None
                        parameter -= 1e-2 * parameter.grad
                        parameter.grad = None
            assert run.step % BATCHES == 0


@shape(kills=(5, 6, 7, BATCHES + 5))
def no_optimizer_and_accumulation() -> None:
    """A8: through .data, and every other pass only."""
    data = loader()
    model, _ = parts()
    with protect(optimizer=None) as run:
        for _ in run.epochs(2):
            for i, batch in enumerate(run.batches(data)):
                learn(batch, update=False)
                if i % 2 == 1:
                    for parameter in model.parameters():
                        assert parameter.grad is not None
                        parameter.data -= 1e-2 * parameter.grad.data
                        parameter.grad.zero_()
            assert run.step == BATCHES // 2 * (run.epoch + 1)


@shape(kills=(), warned="outside of run.steps() and run.batches()")
def no_loop_at_all() -> None:
    """F7: run.steps() was forgotten; said at the second step."""
    data = loader()
    with protect():
        for batch in data:
            learn(batch)


@shape(kills=(), warned="outside of run.steps() and run.batches()")
def epochs_without_batches() -> None:
    """F7: run.batches() was forgotten."""
    data = loader()
    with protect() as run:
        for _ in run.epochs(2):
            for batch in data:
                learn(batch)


@shape(kills=(), warned="outside of run.steps() and run.batches()")
def no_loop_and_no_optimizer() -> None:
    """F7, A8: not even an optimizer tells. "finished at step 0, exact" is never said."""
    data = loader()
    model, _ = parts()
    with protect():
        for batch in data:
            learn(batch, update=False)
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter -= 1e-2 * parameter.grad


@shape(kills=(23, 47))
def many_updates_in_a_step() -> None:
    """F7: a rollout and many updates, then tick(): no false alarm."""
    with protect() as run:
        while run.step < 3:
            for number in range(24):
                learn(torch.tensor([float(number)]))
            run.tick()
