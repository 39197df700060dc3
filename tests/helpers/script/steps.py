"""Whole training scripts, as in programs.py, that pass their save point at every step."""

from __future__ import annotations

from helpers.script.programs import program

NEAR = {
    "generator": program("""
        def training(model, optimizer, start):
            step = start
            while step < EPOCHS * len(LOADER):
                learn(model, optimizer, LOADER[step % len(LOADER)])
                seen(step)
                yield step
                step += 1

        def main(config):
            model, optimizer = make()
            for step in training(model, optimizer, begin(model, optimizer).get("step", -1) + 1):
                if step % config["every"] == 999:
                    with tempfile.TemporaryDirectory() as folder:
                        train.report({}, checkpoint=write(folder, model, optimizer, step=step))
    """),
    "nested loops with a count of steps": program("""
        def main(config):
            model, optimizer = make()
            done = begin(model, optimizer).get("step", 0)
            step = 0
            for epoch in range(EPOCHS):
                for batch in LOADER:
                    if step < done:
                        step += 1
                        continue
                    learn(model, optimizer, batch)
                    seen(step)
                    step += 1
                    if step % config["every"] == 0:
                        with tempfile.TemporaryDirectory() as folder:
                            train.report({}, checkpoint=write(folder, model, optimizer, step=step))
                train.report({"epoch": epoch})
    """),
    "trainer that steps": program("""
        class Trainer:
            def __init__(self, config):
                self.model, self.optimizer = make()
                self.global_step, self.every = begin(self.model, self.optimizer).get("step", 0), config["every"]

            def step(self):
                learn(self.model, self.optimizer, LOADER[self.global_step % len(LOADER)])
                seen(self.global_step)
                self.global_step += 1

            def maybe_save(self):
                if self.global_step % self.every == 0:
                    with tempfile.TemporaryDirectory() as folder:
                        train.report({}, checkpoint=write(folder, self.model, self.optimizer, step=self.global_step))

        def main(config):
            trainer = Trainer(config)
            while trainer.global_step < EPOCHS * len(LOADER):
                trainer.step()
                trainer.maybe_save()
    """),  # noqa: E501
    "step and save in one method": program("""
        class Trainer:
            def __init__(self, config):
                self.model, self.optimizer = make()
                self.global_step, self.every = begin(self.model, self.optimizer).get("step", 0), config["every"]

            def advance(self):
                learn(self.model, self.optimizer, LOADER[self.global_step % len(LOADER)])
                seen(self.global_step)
                self.global_step += 1
                if not self.global_step % self.every:
                    with tempfile.TemporaryDirectory() as folder:
                        train.report({}, checkpoint=write(folder, self.model, self.optimizer, step=self.global_step))

        def main(config):
            trainer = Trainer(config)
            while trainer.global_step < EPOCHS * len(LOADER):
                trainer.advance()
    """),  # noqa: E501
    "partial and lambda": program("""
        def save(model, optimizer, step):
            with tempfile.TemporaryDirectory() as folder:
                train.report({}, checkpoint=write(folder, model, optimizer, step=step))

        def main(config):
            model, optimizer = make()
            save_now = functools.partial(save, model, optimizer)
            due = lambda step: step % config["every"] == 999
            for step in range(begin(model, optimizer).get("step", -1) + 1, EPOCHS * len(LOADER)):
                learn(model, optimizer, LOADER[step % len(LOADER)])
                seen(step)
                if due(step):
                    save_now(step)
    """),
    "distance from the last one": program("""
        def main(config):
            model, optimizer = make()
            last_saved = first = begin(model, optimizer).get("step", -1) + 1
            for step in range(first, EPOCHS * len(LOADER)):
                learn(model, optimizer, LOADER[step % len(LOADER)])
                seen(step)
                if step - last_saved >= config["every"]:
                    last_saved = step
                    with tempfile.TemporaryDirectory() as folder:
                        train.report({}, checkpoint=write(folder, model, optimizer, step=step))
    """),
    "context manager of its own": program("""
        @contextlib.contextmanager
        def staging():
            with tempfile.TemporaryDirectory() as folder:
                yield folder

        def main(config):
            model, optimizer = make()
            rank = train.get_context().get_world_rank()
            for step in range(begin(model, optimizer).get("step", -1) + 1, EPOCHS * len(LOADER)):
                learn(model, optimizer, LOADER[step % len(LOADER)])
                seen(step)
                with staging() as folder:
                    checkpoint = None
                    if rank == 0 and (step % config["every"] == 999 or step == 5000):
                        checkpoint = write(folder, model, optimizer, step=step)
                    if checkpoint is not None:
                        train.report({}, checkpoint=checkpoint)
                    else:
                        train.report({})
    """),
    "script without functions": program("""
        model, optimizer = make()
        for step in range(begin(model, optimizer).get("step", -1) + 1, EPOCHS * len(LOADER)):
            learn(model, optimizer, LOADER[step % len(LOADER)])
            seen(step)
            if step % 1000 == 999:
                with tempfile.TemporaryDirectory() as folder:
                    train.report({}, checkpoint=write(folder, model, optimizer, step=step))
    """),
    "accumulation": program("""
        def main(config):
            model, optimizer = make()
            step = begin(model, optimizer).get("step", 0)
            micro = 2 * step
            while step < EPOCHS * len(LOADER):
                model(LOADER[step % len(LOADER)]).pow(2).mean().backward()
                micro += 1
                if micro % 2 != 0:
                    continue
                optimizer.step()
                optimizer.zero_grad()
                seen(step)
                step += 1
                if step % config["every"] == 0:
                    with tempfile.TemporaryDirectory() as folder:
                        train.report({}, checkpoint=write(folder, model, optimizer, step=step))
    """),
    "flag for a helper": program("""
        def finish(model, optimizer, step, save=False):
            if not save:
                train.report({"step": step})
                return
            with tempfile.TemporaryDirectory() as folder:
                train.report({"step": step}, checkpoint=write(folder, model, optimizer, step=step))

        def main(config):
            model, optimizer = make()
            for step in range(begin(model, optimizer).get("step", -1) + 1, EPOCHS * len(LOADER)):
                learn(model, optimizer, LOADER[step % len(LOADER)])
                seen(step)
                finish(model, optimizer, step, save=(step + 1) % config["every"] == 0)
    """),
}
