"""Loops as people write them: how they count, and what they hand over."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from helpers.data.pipelines import BATCHES, forever, learn, loader, parts, protect, samples, shape

EPOCH_KILLS = (5, BATCHES - 1, (3, BATCHES + 5))


@shape(kills=EPOCH_KILLS)
def index_of_the_run() -> None:
    """A3: run.batch is right in a resumed epoch: the last accumulation window, a learning rate by the index,
    and a break."""
    data = loader()
    _, optimizer = parts()
    with protect() as run:
        for _ in run.epochs(3):
            for batch in run.batches(data):
                for group in optimizer.param_groups:
                    group["lr"] = 1e-2 / (1 + run.batch)
                learn(batch, update=(run.batch + 1) % 2 == 0 or run.batch + 1 == len(data))
                if run.batch >= 8:
                    break


@shape(kills=EPOCH_KILLS)
def epochs_from_one() -> None:
    """E9: run.epochs(n, start=1), as in range(1, n)."""
    data = loader()
    _, optimizer = parts()
    with protect() as run:
        for epoch in run.epochs(4, start=1):
            assert epoch == run.epoch >= 1
            for batch in run.batches(data):
                for group in optimizer.param_groups:
                    group["lr"] = 1e-2 / epoch
                learn(batch)
        assert run.epoch == 4


@shape(case="X_two_batches_loops_per_epoch")
def two_loops_in_an_epoch() -> None:
    """A3: each batches() loop counts for itself."""
    first, second = loader(), loader()
    with protect() as run:
        for _ in run.epochs(2):
            for batch in run.batches(first):
                learn(batch, scale=1.0 + run.batch)
                if run.batch == 6:
                    break
            for batch in run.batches(second):
                learn(torch.stack(list(batch)), scale=2.0 + run.batch)


def counted(i: int, batch: Any, last: int = BATCHES) -> None:
    """A learning rate and an accumulation window by the index."""
    for group in parts()[1].param_groups:
        group["lr"] = 1e-2 / (1 + i)
    learn(batch, update=(i + 1) % 2 == 0 or i + 1 == last)


@shape(kills=EPOCH_KILLS)
def enumerated() -> None:
    """A3: plain enumerate, with accumulation windows and timm's learning rate."""
    data = loader()
    with protect() as run:
        for _ in run.epochs(3):
            for i, batch in enumerate(run.batches(data)):
                assert i == run.batch
                counted(i, batch)


@shape(case="Z_enumerate_limit", kills=EPOCH_KILLS)
def enumerated_and_left() -> None:
    """A3: `if i >= k: break`."""
    data = loader()
    with protect() as run:
        for _ in run.epochs(3):
            for i, batch in enumerate(run.batches(data), start=1):
                if i > 9:
                    break
                counted(i, batch)


@shape(case="X_tqdm", kills=EPOCH_KILLS)
def enumerated_progress_bar() -> None:
    """A3: enumerate(tqdm(run.batches(...)))."""
    data = loader()
    with protect() as run:
        for _ in run.epochs(3):
            for i, batch in enumerate(tqdm(run.batches(data), total=len(data), disable=None)):
                counted(i, batch)


@shape(kills=EPOCH_KILLS)
def progress_bar_of_enumerated() -> None:
    """A3: tqdm(enumerate(run.batches(...)))."""
    data = loader()
    with protect() as run:
        for _ in run.epochs(3):
            for i, batch in tqdm(enumerate(run.batches(data)), total=len(data), disable=None):
                counted(i, batch)


@shape(case="X_islice_limit_train_batches", kills=(5, 6, 7, 8, (2, 7, 12)))
def some_batches_of_an_epoch() -> None:
    """A3: islice(run.batches(...), k), killed at its last batch, too."""
    data = loader()
    with protect() as run:
        for _ in run.epochs(3):
            for i, batch in enumerate(itertools.islice(run.batches(data), 7)):
                counted(i, batch, 7)


@shape(kills=EPOCH_KILLS)
def enumerated_elsewhere() -> None:
    """A3: the count is made in a function that the batches are handed to."""

    def logged(batches: Any) -> Iterator[Any]:
        for batch in batches:
            yield [part.clone() for part in batch]

    def train_one_epoch(batches: Any) -> None:
        for i, (batch,) in enumerate(logged(batches)):
            counted(i, batch)

    data = loader()
    with protect() as run:
        for _ in run.epochs(3):
            train_one_epoch(run.batches(data))


@shape(kills=(5,), warned="the count of enumerate around run.batches()")
def enumerated_pairs() -> None:
    """A3: an index that is not that of the batches cannot be set: warned of in the first steps."""

    def pairs(batches: Any) -> Iterator[Any]:
        for batch in batches:
            yield batch, next(batches)

    data = loader()
    with protect() as run:
        for _ in run.epochs(3):
            for i, batch in enumerate(pairs(run.batches(data))):
                counted(i, batch)


@shape(kills=(5,), warned="the islice around run.batches()")
def batches_from_the_middle() -> None:
    """A3: islice(run.batches(...), 2, None)."""
    data = loader()
    with protect() as run:
        for _ in run.epochs(2):
            for batch in itertools.islice(run.batches(data), 2, None):
                learn(batch)


@shape(kills=(5, BATCHES + 5))
def epochs_that_begin_where_a_snapshot_of_the_scripts_own_ends() -> None:
    """minGPT-ddp: range(self.epochs_run, n). The snapshot may be newer than the checkpoint whose weights are
    trained."""
    data = loader()
    with protect(data=data) as run:
        snapshot = Path(run.directory).with_name("epochs-run")
        begun = int(snapshot.read_text()) if run.resumed is not None and snapshot.exists() else 0
        for epoch in run.epochs(3, start=begun):
            snapshot.write_text(str(epoch + 1))
            for batch in run.batches(data):
                learn(batch, scale=1.0 + epoch)


# ---- an inner loop of the script's own with tick(), inside run.epochs() ------------------------------------

_STARTS_OVER = "starts from the beginning in an epoch that is resumed"


@shape(kills=(5,), warned=_STARTS_OVER)
def inner_while_that_counts_with_ticks() -> None:
    """A fixed number of steps in an epoch, over an endless generator."""
    data = loader()
    with protect(data=data) as run:
        batches, scale = forever(data), 1.0
        for _ in run.epochs(4):
            total = 0.0
            n = 0
            while n < 7:
                total += learn(next(batches), scale=scale)
                n += 1
                run.tick()
            scale = 1 / (1 + total / n)


@shape(kills=(5,), warned=_STARTS_OVER)
def inner_while_of_a_function_that_an_epoch_calls() -> None:
    def one_epoch(run: Any) -> None:
        n = 0
        while True:
            learn(torch.randn(4))
            n += 1
            run.tick()
            if n >= 7:
                break

    with protect() as run:
        for _ in run.epochs(4):
            one_epoch(run)


@shape(kills=(5,), warned=_STARTS_OVER)
def inner_while_that_counts_in_an_attribute() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.n = 0

        def train(self) -> None:
            with protect() as run:
                for _ in run.epochs(4):
                    self.n = 0
                    while self.n < 7:
                        learn(torch.randn(4))
                        self.n += 1
                        run.tick()

    Trainer().train()


@shape(kills=(5,), warned=_STARTS_OVER)
def sum_of_an_epoch_in_a_loop_over_data_with_ticks() -> None:
    data = loader()
    with protect(data=data) as run:
        scale = 1.0
        for _ in run.epochs(3):
            total = 0.0
            for batch in data:
                total += learn(batch, scale=scale)
                run.tick()
            scale = 1 / (1 + total)


@shape(kills=EPOCH_KILLS)
def inner_loop_over_data_with_ticks() -> None:
    data = loader()
    with protect(data=data) as run:
        for epoch in run.epochs(3):
            for batch in data:
                learn(batch, scale=1.0 + epoch)
                run.tick()


@shape(kills=(5,), warned=_STARTS_OVER)
def inner_while_that_counts_in_a_parameter() -> None:
    def one_epoch(run: Any, n: int = 0) -> None:
        while n < 7:
            learn(torch.randn(4))
            n += 1
            run.tick()

    with protect() as run:
        for _ in run.epochs(4):
            one_epoch(run)


@shape(kills=EPOCH_KILLS)
def inner_loop_over_data_with_ticks_and_a_clock() -> None:
    """Times that are taken for a log line are no part of training."""

    class Timer:
        began = 0.0
        spent = 0.0

    data, timer = loader(), Timer()
    with protect(data=data) as run:
        for _ in run.epochs(3):
            timer.began = began = time.time()
            timer.spent = 0.0
            for batch in data:
                learn(batch)
                timer.spent += time.time() - timer.began
                timer.began, began = time.time(), time.time()
                assert began > 0
                run.tick()


@shape(kills=EPOCH_KILLS)
def inner_while_without_a_tick() -> None:
    """Accumulation, and an evaluation: no step of theirs is counted."""
    data = loader()
    with protect(data=data) as run:
        for _ in run.epochs(3):
            for batch in run.batches(data):
                n = 0
                while n < 2:
                    learn(batch, update=n == 1)
                    n += 1
            k = 0
            while k < 3:
                k += 1


@shape(kills=EPOCH_KILLS)
def inner_while_up_to_what_the_run_has_done() -> None:
    """The head asks the run, and nothing is set at the top of an epoch."""
    with protect() as run:
        for epoch in run.epochs(3):
            while run.step < 10 * (epoch + 1):
                learn(torch.randn(4))
                run.tick()


# ---- epochs of the script's own ----------------------------------------------------------------------------


@shape(kills=(5,), warned="`for epoch in range(3)`")
def own_epochs_with_tick() -> None:
    """A6."""
    data = loader()
    with protect(data=data) as run:
        for epoch in range(3):
            for batch in data:
                learn(batch, scale=1.0 + epoch)
                run.tick()


@shape(kills=(5,), warned="`for _ in range(30)`")
def own_steps_with_tick() -> None:
    """A6: 30 more steps after each resume."""
    data = loader()
    with protect(data=data) as run:
        batches = iter(data)
        for _ in range(30):
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(data)
                batch = next(batches)
            learn(batch)
            run.tick()


@shape(kills=EPOCH_KILLS)
def own_steps_that_ask_the_run() -> None:
    """A6: range(run.step, n) goes on where the run is."""
    with protect() as run:
        for step in range(run.step, 30):
            learn(torch.randn(4) + step)
            run.tick()


@shape(kills=EPOCH_KILLS)
def while_the_run_has_steps_left() -> None:
    """A6: the guide's third loop."""
    data = loader()
    with protect(data=data) as run:
        while run.step < 30:
            for batch in data:
                learn(batch)
                run.tick()
                if run.step >= 30:
                    break


@shape(kills=EPOCH_KILLS)
def first_batch_drawn_in_the_block_before_a_loop_that_asks() -> None:
    """nanoGPT with tick(): the random numbers of the first batch are drawn after the block has put the
    generators back."""
    with protect() as run:
        batch = torch.randn(4)
        while run.step < 30:
            ahead = torch.randn(4)
            learn(batch)
            batch = ahead
            run.tick()


@shape(kills=(5,), warned="`batch`")
def first_batch_drawn_in_the_block_before_a_loop_that_does_not_ask() -> None:
    with protect() as run:
        batch = torch.randn(4)
        while True:
            ahead = torch.randn(4)
            learn(batch)
            batch = ahead
            run.tick()
            if run.step >= 30:
                break


@shape(kills=(6, 11, (6, 17)))
def passes_without_a_tick_come_to_the_head_again() -> None:
    """An accumulation by `continue`: what the loop carries is put back at the first pass of a resumed run,
    and not at the second."""
    with protect() as run:
        windows = 0
        while run.step < 15:
            windows += 1
            learn(torch.randn(4), update=windows % 3 == 0, scale=1.0 + windows)
            if windows % 3:
                continue
            run.tick()


@shape(kills=(5, BATCHES - 2))
def one_pass_with_tick() -> None:
    """A6: a single pass has no epochs to begin anew."""
    data = loader()
    with protect(data=data) as run:
        for batch in data:
            learn(batch)
            run.tick()


@shape(kills=(5,), warned="`for epoch in range(3)`")
def own_epochs_around_batches() -> None:
    """A6."""
    data = loader()
    with protect() as run:
        for epoch in range(3):
            for batch in run.batches(data):
                learn(batch, scale=1.0 + epoch)
            print("epoch", epoch, "is over")


@shape(kills=(5,), warned="`for epoch in range(3)`")
def own_epochs_with_a_scheduler() -> None:
    """A6: ... but what else is done in an epoch is done again."""
    data = loader()
    scheduler = torch.optim.lr_scheduler.StepLR(parts()[1], 1, 0.5)
    with protect(scheduler=scheduler) as run:
        for epoch in range(3):
            for batch in run.batches(data):
                learn(batch, scale=1.0 + epoch)
            scheduler.step()


@shape(kills=(5,), warned="`for epoch in range(1, epochs + 1)`")
def own_epochs_around_a_function() -> None:
    """A6: the loop over batches is in a function, as in pytorch/examples' mnist."""
    data = loader()
    epochs = 2

    def train(run: Any, epoch: int) -> None:
        parts()[0].train()
        for batch_idx, batch in enumerate(run.batches(data)):
            learn(batch, scale=1.0 + epoch + batch_idx)

    with protect() as run:
        for epoch in range(1, epochs + 1):
            train(run, epoch)


@shape(kills=EPOCH_KILLS)
def phases_of_an_epoch() -> None:
    """A6: a loop inside of run.epochs() is no loop of epochs."""
    loaders = {"train": loader(), "more": loader()}
    with protect() as run:
        for _ in run.epochs(2):
            for phase in ("train", "more"):
                for batch in run.batches(loaders[phase]):
                    learn(batch)


# ---- as public scripts write them --------------------------------------------------------------------------


class AverageMeter:
    """As in pytorch/examples' imagenet."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reset()

    def reset(self) -> None:
        self.value = self.average = self.total = 0.0
        self.count = 0

    def update(self, value: float, n: int = 1) -> None:
        self.value, self.total, self.count = value, self.total + value * n, self.count + n
        self.average = self.total / self.count


class ProgressMeter:
    """As there: it holds meters in a list."""

    def __init__(self, batches: int, meters: list[AverageMeter], prefix: str = "") -> None:
        self.batches, self.meters, self.prefix = batches, meters, prefix

    def display(self, batch: int) -> None:
        print(self.prefix, f"[{batch}/{self.batches}]", *(each.average for each in self.meters))


@shape(kills=EPOCH_KILLS)
def as_mnist() -> None:
    """train() and test() in functions, StepLR, epochs from 1."""
    train_loader, test_loader = loader(), loader(shuffle=False)
    model, optimizer = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)

    def train(run: Any, epoch: int) -> None:
        model.train()
        for batch_idx, data in enumerate(run.batches(train_loader)):
            loss = learn(data)
            if batch_idx % 10 == 0:
                print(f"Train Epoch: {epoch} [{batch_idx * 4}/{len(train_loader) * 4}] Loss: {loss:.6f}")

    def test() -> None:
        model.eval()
        test_loss = 0.0
        with torch.no_grad():
            for (data,) in test_loader:
                test_loss += model(data).sum().item()
        print(f"Average loss: {test_loss / len(test_loader):.4f}")

    with protect(scheduler=scheduler) as run:
        for epoch in run.epochs(4, start=1):
            train(run, epoch)
            test()
            scheduler.step()


@shape(kills=EPOCH_KILLS)
def as_imagenet() -> None:
    """Meters that are made in each epoch, times, a best accuracy, validation."""
    train_loader, val_loader = loader(), loader(shuffle=False)
    model, optimizer = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)

    def train(run: Any, epoch: int) -> None:
        batch_time, losses = AverageMeter("Time"), AverageMeter("Loss")
        progress = ProgressMeter(len(train_loader), [batch_time, losses], prefix=f"Epoch: [{epoch}]")
        model.train()
        end = time.time()
        for i, batch in enumerate(run.batches(train_loader)):
            losses.update(learn(batch), 4)
            batch_time.update(time.time() - end)
            end = time.time()
            if i % 10 == 0:
                progress.display(i + 1)

    def validate() -> float:
        found = AverageMeter("Acc")
        model.eval()
        with torch.no_grad():
            for (batch,) in val_loader:
                found.update(model(batch).mean().item())
        return found.average

    best = 0.0
    with protect(scheduler=scheduler) as run:
        for epoch in run.epochs(3, start=0):
            train(run, epoch)
            acc1 = validate()
            scheduler.step()
            best = max(acc1, best)


@shape(kills=EPOCH_KILLS)
def meters_in_containers_made_in_each_epoch() -> None:
    """Beside the loop and handed to a function: other objects in each epoch, and nothing that the loop
    carries."""
    data = loader()

    def train(run: Any, meters: dict[str, AverageMeter]) -> None:
        own = [AverageMeter(name) for name in ("Time", "Loss")]
        for batch in run.batches(data):
            own[1].update(learn(batch))
            meters["loss"].update(own[1].average)

    with protect() as run:
        for epoch in run.epochs(3):
            meters = {"loss": AverageMeter("Loss"), "epoch": AverageMeter("Epoch")}
            train(run, meters)
            progress = ProgressMeter(len(data), [*meters.values()], prefix=f"Epoch: [{epoch}]")
            for batch in run.batches(data):
                learn(batch, scale=1.0 + meters["loss"].average / 100)
                progress.meters[0].update(1.0)


class Member:
    def __init__(self, weight: float) -> None:
        self.weight = weight


@shape(kills=(BATCHES + 5,), warned="population.members")
def objects_in_a_list_replaced_between_epochs() -> None:
    """A list of objects that is another one in each epoch, made from the one before."""
    data = loader()

    class Population:
        def __init__(self) -> None:
            self.members = [Member(1.0), Member(2.0)]

    def train(run: Any, population: Population) -> None:
        for batch in run.batches(data):
            learn(batch, scale=sum(each.weight for each in population.members))

    population = Population()
    with protect() as run:
        for _ in run.epochs(3):
            train(run, population)
            population.members = [Member(each.weight * 0.9) for each in population.members] + [Member(0.1)]


@shape(kills=EPOCH_KILLS)
def as_nanogpt() -> None:
    """while True, iterations counted by hand, a learning rate from the number, random batches,
    accumulation."""
    tokens = torch.arange(200.0)
    optimizer = parts()[1]

    def get_batch() -> torch.Tensor:
        ix = torch.randint(len(tokens) - 4, (2,))
        return torch.stack([tokens[i : i + 4] for i in ix.tolist()])

    with protect() as run:
        for iter_num in run.steps(30):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * (iter_num + 1) / 10 if iter_num < 10 else 1e-2
            for micro_step in range(2):
                learn(get_batch(), update=micro_step == 1, scale=0.5)


@shape(kills=EPOCH_KILLS)
def as_mingpt() -> None:
    """A Trainer class with self.iter_num, callbacks, and an iterator that is made anew when it ends."""

    class Trainer:
        def __init__(self) -> None:
            self.loader = loader(
                sampler=torch.utils.data.RandomSampler(samples(), replacement=True, num_samples=48),
                shuffle=None,
            )
            self.callbacks: list[Any] = []
            self.iter_num = 0

        def run(self) -> None:
            with protect(data=self.loader) as run:
                self.iter_num = run.step
                data_iter = iter(self.loader)
                while run.step < 30:
                    try:
                        batch = next(data_iter)
                    except StopIteration:
                        data_iter = iter(self.loader)
                        batch = next(data_iter)
                    self.loss = learn(batch)
                    for callback in self.callbacks:
                        callback(self)
                    self.iter_num += 1
                    run.tick()

    trainer = Trainer()
    trainer.callbacks.append(
        lambda trainer: print(trainer.iter_num, trainer.loss) if trainer.iter_num % 10 == 0 else None
    )
    trainer.run()


@shape(kills=EPOCH_KILLS)
def as_word_language_model() -> None:
    """Batches cut from one tensor by position, a learning rate that is divided when validation does not
    improve."""
    corpus = torch.arange(96.0).reshape(-1, 4)
    optimizer = parts()[1]
    state = {"lr": 1e-2, "best": float("inf")}
    with protect(schedule=state) as run:
        for step in run.steps(36):
            i = step % 12
            for group in optimizer.param_groups:
                group["lr"] = state["lr"]
            loss = learn(corpus[2 * i : 2 * i + 2])
            if i == 11:
                if loss < state["best"]:
                    state["best"] = loss
                else:
                    state["lr"] /= 4.0
