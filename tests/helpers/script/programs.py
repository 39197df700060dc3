"""Whole training scripts of other makes: classes, callbacks, generators, state in objects. Each resumes by
itself. Their save point is far from the step; steps.py has those that pass it at every step."""

from __future__ import annotations

import textwrap

from helpers.script.shapes import LEARNING

WRITE = """
def write(folder, model, optimizer, **counts):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **counts}, os.path.join(folder, "state.pt"))
    return Checkpoint.from_directory(folder)
"""  # noqa: E501


def program(source: str) -> str:
    return LEARNING + WRITE + textwrap.dedent(source)


FAR = {
    "class": program("""
        class Trainer:
            def __init__(self, config):
                self.model, self.optimizer = make()
                state = begin(self.model, self.optimizer)
                self.epoch, self.step, self.every = state.get("epoch", -1) + 1, state.get("step", 0), config["every"]

            def fit(self):
                while self.epoch < EPOCHS:
                    self.train_epoch()
                    if self.epoch % self.every == 999:
                        self.save()
                    self.epoch += 1

            def train_epoch(self):
                for index, batch in enumerate(LOADER):
                    learn(self.model, self.optimizer, batch)
                    self.step += 1
                    seen((self.epoch, index))

            def save(self):
                with tempfile.TemporaryDirectory() as folder:
                    train.report({}, write(folder, self.model, self.optimizer, epoch=self.epoch, step=self.step))

        def main(config):
            Trainer(config).fit()
    """),  # noqa: E501
    "class that sets its epoch in the epoch": program("""
        class Trainer:
            def __init__(self, config):
                self.model, self.optimizer = make()
                self.start, self.every = begin(self.model, self.optimizer).get("epoch", -1) + 1, config["every"]

            def fit(self):
                for epoch in range(self.start, EPOCHS):
                    self.begin_epoch(epoch)
                    self.train_epoch()
                    self.end_epoch()

            def begin_epoch(self, number):
                self.epoch = number

            def train_epoch(self):
                for index, batch in enumerate(LOADER):
                    learn(self.model, self.optimizer, batch)
                    seen((self.epoch, index))

            def end_epoch(self):
                if (self.epoch + 1) % self.every:
                    return
                with tempfile.TemporaryDirectory() as folder:
                    train.report({}, write(folder, self.model, self.optimizer, epoch=self.epoch))

        def main(config):
            Trainer(config).fit()
    """),  # noqa: E501
    "save at the end of the function that trains an epoch": program("""
        def train_epoch(model, optimizer, epoch, every):
            total = 0.0
            for index, batch in enumerate(LOADER):
                total += learn(model, optimizer, batch)
                seen((epoch, index))
            metrics = {"loss": total / len(LOADER)}
            if epoch % every == every - 1:
                with tempfile.TemporaryDirectory() as folder:
                    train.report(metrics, checkpoint=write(folder, model, optimizer, epoch=epoch))
            else:
                train.report(metrics)

        def main(config):
            model, optimizer = make()
            for epoch in range(begin(model, optimizer).get("epoch", -1) + 1, EPOCHS):
                train_epoch(model, optimizer, epoch, config["every"])
    """),
    "callbacks": program("""
        class Saver:
            def __init__(self, every):
                self.every = every

            def on_epoch_end(self, trainer, epoch):
                if epoch % self.every == 999:
                    with tempfile.TemporaryDirectory() as folder:
                        train.report({}, checkpoint=write(folder, trainer.model, trainer.optimizer, epoch=epoch))

        class Printer:
            def on_epoch_end(self, trainer, epoch):
                pass

        class Trainer:
            def __init__(self, callbacks):
                self.model, self.optimizer = make()
                self.callbacks = callbacks

            def fit(self):
                for epoch in range(begin(self.model, self.optimizer).get("epoch", -1) + 1, EPOCHS):
                    for index, batch in enumerate(LOADER):
                        learn(self.model, self.optimizer, batch)
                        seen((epoch, index))
                    for callback in self.callbacks:
                        callback.on_epoch_end(self, epoch)

        def main(config):
            Trainer([Printer(), Saver(config["every"])]).fit()
    """),  # noqa: E501
    "decorators": program("""
        def logged(function):
            @functools.wraps(function)
            def run(*args, **kwargs):
                return function(*args, **kwargs)
            return run

        def bare(function):
            def run(*args):
                return function(*args)
            return run

        @logged
        def save(model, optimizer, epoch):
            with tempfile.TemporaryDirectory() as folder:
                train.report({}, checkpoint=write(folder, model, optimizer, epoch=epoch))

        @bare
        def maybe(model, optimizer, epoch, every):
            if epoch % every != 999:
                return
            save(model, optimizer, epoch)

        @logged
        def main(config):
            model, optimizer = make()
            for epoch in range(begin(model, optimizer).get("epoch", -1) + 1, EPOCHS):
                for index, batch in enumerate(LOADER):
                    learn(model, optimizer, batch)
                    seen((epoch, index))
                maybe(model, optimizer, epoch, config["every"])
    """),
    "dataclass": program("""
        @dataclasses.dataclass
        class Progress:
            epoch: int = 0
            step: int = 0

        def main(config):
            model, optimizer = make()
            progress = Progress(**begin(model, optimizer).get("progress", {}))
            while progress.epoch < EPOCHS:
                for index, batch in enumerate(LOADER):
                    learn(model, optimizer, batch)
                    seen((progress.epoch, index))
                    progress.step += 1
                progress.epoch += 1
                if progress.epoch % config["every"] == 0:
                    with tempfile.TemporaryDirectory() as folder:
                        train.report({}, checkpoint=write(folder, model, optimizer, progress=dataclasses.asdict(progress)))
    """),  # noqa: E501
    "dict of counts": program("""
        def main(config):
            model, optimizer = make()
            counts = begin(model, optimizer).get("counts", {"epoch": 0})
            while counts["epoch"] < EPOCHS:
                for index, batch in enumerate(LOADER):
                    learn(model, optimizer, batch)
                    seen((counts["epoch"], index))
                counts["epoch"] += 1
                if counts["epoch"] % config["every"] == 0:
                    with tempfile.TemporaryDirectory() as folder:
                        train.report({}, checkpoint=write(folder, model, optimizer, counts=counts))
    """),
    "dict that counts behind the save": program("""
        def main(config):
            model, optimizer = make()
            counts = begin(model, optimizer).get("counts", {"epoch": -1})
            counts["epoch"] += 1
            while counts["epoch"] < EPOCHS:
                for index, batch in enumerate(LOADER):
                    learn(model, optimizer, batch)
                    seen((counts["epoch"], index))
                if counts["epoch"] % config["every"] == 999:
                    with tempfile.TemporaryDirectory() as folder:
                        train.report({}, checkpoint=write(folder, model, optimizer, counts=counts))
                counts["epoch"] += 1
    """),
    "save at the start of the epoch": program("""
        def main(config):
            model, optimizer = make()
            for epoch in range(begin(model, optimizer).get("epoch", 0), EPOCHS):
                if epoch and epoch % config["every"] == 0:
                    with tempfile.TemporaryDirectory() as folder:
                        train.report({}, checkpoint=write(folder, model, optimizer, epoch=epoch))
                for index, batch in enumerate(LOADER):
                    learn(model, optimizer, batch)
                    seen((epoch, index))
            train.report({})
    """),
    "all in a with": program("""
        def main(config):
            model, optimizer = make()
            for epoch in range(begin(model, optimizer).get("epoch", -1) + 1, EPOCHS):
                with contextlib.nullcontext() as profile:
                    for index, batch in enumerate(LOADER):
                        learn(model, optimizer, batch)
                        seen((epoch, index))
                    if epoch % config["every"] == 999:
                        with tempfile.TemporaryDirectory() as folder:
                            train.report({}, checkpoint=write(folder, model, optimizer, epoch=epoch))
                done = epoch
    """),
    "evaluation and scheduler": program("""
        def evaluate(model):
            with torch.no_grad():
                return sum(model(batch).pow(2).mean().item() for batch in LOADER)

        def main(config):
            model, optimizer = make()
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            state = begin(model, optimizer)
            if state:
                scheduler.load_state_dict(state["scheduler"])
            for epoch in range(state.get("epoch", -1) + 1, EPOCHS):
                for index, batch in enumerate(LOADER):
                    learn(model, optimizer, batch)
                    seen((epoch, index))
                scheduler.step()
                accuracy = evaluate(model)
                metrics = {"accuracy": accuracy, "epoch": epoch}
                if epoch % config["every"] == 999:
                    print(f"epoch {epoch}: {accuracy:.3f}")
                    with tempfile.TemporaryDirectory() as folder:
                        train.report(metrics, checkpoint=write(folder, model, optimizer, scheduler=scheduler.state_dict(), epoch=epoch))
                else:
                    train.report(metrics)
    """),  # noqa: E501
    "save function as an argument": program("""
        def fit(model, optimizer, start, after_epoch):
            for epoch in range(start, EPOCHS):
                for index, batch in enumerate(LOADER):
                    learn(model, optimizer, batch)
                    seen((epoch, index))
                after_epoch(epoch)

        def main(config):
            model, optimizer = make()

            def after_epoch(number):
                if number % config["every"] == 999:
                    with tempfile.TemporaryDirectory() as folder:
                        train.report({}, checkpoint=write(folder, model, optimizer, epoch=number))

            fit(model, optimizer, begin(model, optimizer).get("epoch", -1) + 1, after_epoch)
    """),
    "checkpoint among the arguments": program("""
        def main(config):
            model, optimizer = make()
            for epoch in range(begin(model, optimizer).get("epoch", -1) + 1, EPOCHS):
                for index, batch in enumerate(LOADER):
                    learn(model, optimizer, batch)
                    seen((epoch, index))
                due = epoch % config["every"] == 999
                extra = {"checkpoint": write(tempfile.mkdtemp(), model, optimizer, epoch=epoch)} if due else {}
                train.report({"epoch": epoch}, **extra)
    """),  # noqa: E501
    "choice and then a condition": program("""
        def main(config):
            model, optimizer = make()
            for epoch in range(begin(model, optimizer).get("epoch", -1) + 1, EPOCHS):
                for index, batch in enumerate(LOADER):
                    learn(model, optimizer, batch)
                    seen((epoch, index))
                due = epoch % config["every"] == 999
                folder = tempfile.mkdtemp() if due else None
                checkpoint = write(folder, model, optimizer, epoch=epoch) if due else None
                if checkpoint is not None and due:
                    train.report({"epoch": epoch}, checkpoint=checkpoint)
    """),
    "private methods and super": program("""
        class Base:
            def _write(self, folder):
                return write(folder, self.model, self.optimizer, epoch=self.epoch)

        class Trainer(Base):
            def __init__(self, config):
                self.model, self.optimizer = make()
                self.__every, self.__start = config["every"], begin(self.model, self.optimizer).get("epoch", -1) + 1

            def fit(self):
                for self.epoch in range(self.__start, EPOCHS):
                    self.__train()
                    if self.epoch % self.__every == 999:
                        with tempfile.TemporaryDirectory() as folder:
                            train.report({}, checkpoint=super()._write(folder))

            def __train(self):
                for index, batch in enumerate(LOADER):
                    learn(self.model, self.optimizer, batch)
                    seen((self.epoch, index))

        def main(config):
            Trainer(config).fit()
    """),  # noqa: E501
    "timer": program("""
        class Timer:
            def __init__(self, seconds):
                self.seconds, self.last = seconds, time.monotonic()

            def expired(self):
                return time.monotonic() - self.last > self.seconds

            def reset(self):
                self.last = time.monotonic()

        def main(config):
            model, optimizer = make()
            timer = Timer(600)
            for epoch in range(begin(model, optimizer).get("epoch", -1) + 1, EPOCHS):
                for index, batch in enumerate(LOADER):
                    learn(model, optimizer, batch)
                    seen((epoch, index))
                if timer.expired():
                    timer.reset()
                    with tempfile.TemporaryDirectory() as folder:
                        train.report({}, checkpoint=write(folder, model, optimizer, epoch=epoch))
    """),
    "lists of epochs": program("""
        def main(config):
            model, optimizer = make()
            save_at, metrics = [100, 200], {}
            for number, epoch in enumerate(range(begin(model, optimizer).get("epoch", -1) + 1, EPOCHS)):
                for index, batch in enumerate(LOADER):
                    learn(model, optimizer, batch)
                    seen((epoch, index))
                metrics["epoch"] = epoch
                if epoch in save_at or epoch == 300:
                    with tempfile.TemporaryDirectory() as folder:
                        train.report(metrics, checkpoint=write(folder, model, optimizer, epoch=epoch))
    """),
}
