"""The main thread does not come back in time: the last completed step is saved from a side thread, or it is
logged why not.

Every script gets stuck in its first life only: `stuck` is a file that its second life finds, and so does the
reference run.
"""

from __future__ import annotations

import signal
import textwrap
from pathlib import Path

import pytest

from helpers.processes import interruption_chain as chain
from helpers.processes.forkserver import Child, Nursery, until
from lastcall import testing

NOW = {"LASTCALL_KILL_WAIT_SECONDS": "0"}

STEPS = """
    import hashlib
    from pathlib import Path
    import torch
    import lastcall
    from helpers.models import training

    def stuck(action):
        if not Path("stuck").exists():
            Path("stuck").touch()
            action()

    def compute():
        print("computing", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 60_000_000)

    model, optimizer = training.parts()
    ema = {name: value.detach().clone() for name, value in model.named_parameters()}
    with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer, ema=ema) as run:
        for step in run.steps(12):
            training.say(step)
            tokens = training.batch()
            if step == 5:
                BEFORE
            optimizer.zero_grad()
            model.loss(tokens).backward()
            optimizer.step()
            if step == 5:
                AFTER
            training.average(ema, model)
    training.finish(model=model, optimizer=optimizer, ema=ema)
"""


def steps(before: str = "pass", after: str = "pass") -> str:
    return STEPS.replace("BEFORE", before).replace("AFTER", after)


class Case:
    """One script, its first life, and what a life without interruptions would have led to."""

    def __init__(self, nursery: Nursery, folder: Path, source: str) -> None:
        self._nursery = nursery
        self._folder = folder
        self._script = nursery.write(folder, source)
        self.run = folder / "run"

    def start(self, **env: str) -> Child:
        return self._nursery.start(
            self._folder, self._script, self.run, self._folder / "result", **{**NOW, **env}
        )

    def committed(self) -> list[dict[str, object]]:
        return chain.records(self.run) if self.run.exists() else []

    def go_on(self, name: str) -> None:
        (self._folder / name).touch()

    def assert_resumes_bit_identical(self) -> None:
        again = self.start()
        assert again.wait() == 0, again.log()
        reference = self._folder / "reference"
        unused = self._folder / "unused"
        plain = self._nursery.run(self._folder, self._script, unused, reference, LASTCALL_ENABLED="0")
        assert plain.code == 0, plain.log()
        assert (self._folder / "result").read_text() == reference.read_text(), again.log()


@pytest.mark.parametrize(("action", "said"), [("compute", "computing"), ("training.hang", "hanging")])
def test_a_long_c_call_is_overtaken_by_an_exact_checkpoint_and_an_exit(
    nursery: Nursery, tmp_path: Path, action: str, said: str
) -> None:
    case = Case(nursery, tmp_path, steps(before=f"stuck({action})"))
    child = case.start()
    child.expect(said)
    child.send(signal.SIGTERM)
    until(lambda: bool(case.committed()), f"a checkpoint\n{child.log()}")
    assert child.poll() is None  # the call is still running
    entry = testing.assert_resumable(case.run, 5, exact=True)
    assert entry.record.kind.value == "rescue"
    assert child.wait() == 75  # one of the two calls never ends
    assert "JIT checkpoint completed in " in child.log()
    case.assert_resumes_bit_identical()


def test_after_the_optimizer_has_stepped_a_rescue_is_not_exact_and_says_so(
    nursery: Nursery, tmp_path: Path
) -> None:
    case = Case(nursery, tmp_path, steps(after="stuck(training.hang)"))
    child = case.start(LASTCALL_GRACE_SECONDS="4")
    child.expect("hanging")
    child.send(signal.SIGTERM)
    until(lambda: bool(case.committed()), f"a checkpoint\n{child.log()}")
    entry = testing.assert_resumable(case.run, 6, exact=False)
    assert "the optimizer has stepped since the last boundary" in entry.record.because
    assert child.wait() == 75
    assert "not exact: the optimizer has stepped" in child.log()
    again = case.start()
    assert again.wait() == 0
    assert "not exact: the optimizer has stepped" in again.log()
    assert [line for line in again.lines() if line.startswith("at ")] == [
        f"at {step}" for step in range(6, 12)
    ]


def test_a_better_checkpoint_replaces_a_rescue_that_is_not_exact(nursery: Nursery, tmp_path: Path) -> None:
    case = Case(nursery, tmp_path, steps(after="stuck(lambda: training.wait_for('call'))"))
    child = case.start()
    child.expect("waiting for call")
    child.send(signal.SIGTERM)
    until(lambda: bool(case.committed()), f"a checkpoint\n{child.log()}")
    testing.assert_resumable(case.run, 6, exact=False)
    case.go_on("call")
    assert child.wait() == 75
    assert testing.assert_resumable(case.run, 6, exact=True).record.kind.value == "jit"
    case.assert_resumes_bit_identical()


EPOCHS = """
    from pathlib import Path
    from torch.utils.data import DataLoader
    import lastcall
    from helpers.models import training

    def stuck():
        if not Path("stuck").exists():
            Path("stuck").touch()
            training.wait_for("call")

    model, optimizer = training.parts()
    loader = DataLoader(training.Sentences(40), batch_size=4, shuffle=True)
    counter = {"batches": 0}
    with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer, data=loader, counter=counter) as run:
        for epoch in run.epochs(3):
            for tokens in run.batches(loader):
                counter["batches"] += 1
                training.say(counter["batches"])
                (model.loss(tokens) / WINDOW).backward()
                if counter["batches"] == STUCK_IN_BATCH:
                    stuck()
                if counter["batches"] % WINDOW == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            if epoch == STUCK_AFTER_EPOCH:
                stuck()
    training.finish(model=model, optimizer=optimizer, counter=counter)
"""  # noqa: E501


def epochs(window: int, batch: int = -1, epoch: int = -1) -> str:
    return f"WINDOW, STUCK_IN_BATCH, STUCK_AFTER_EPOCH = {window}, {batch}, {epoch}\n" + textwrap.dedent(
        EPOCHS
    )


def test_a_long_evaluation_is_overtaken(nursery: Nursery, tmp_path: Path) -> None:
    case = Case(nursery, tmp_path, epochs(window=1, epoch=1))
    child = case.start()
    child.expect("waiting for call")
    child.send(signal.SIGTERM)
    until(lambda: bool(case.committed()), f"a checkpoint\n{child.log()}")
    assert testing.assert_resumable(case.run, 20, exact=True).record.kind.value == "rescue"
    case.go_on("call")
    assert child.wait() == 75
    case.assert_resumes_bit_identical()


def test_a_rescue_inside_an_accumulation_goes_back_to_its_start(nursery: Nursery, tmp_path: Path) -> None:
    # the third of its window, the fifth of its epoch
    case = Case(nursery, tmp_path, epochs(window=4, batch=15))
    child = case.start()
    child.expect("waiting for call")
    child.send(signal.SIGTERM)
    until(lambda: bool(case.committed()), f"a checkpoint\n{child.log()}")
    assert testing.assert_resumable(case.run, 3, exact=True).record.kind.value == "rescue"
    case.go_on("call")
    assert child.wait() == 75
    case.assert_resumes_bit_identical()


def test_a_window_across_the_end_of_an_epoch_is_not_lost_by_a_rescue(
    nursery: Nursery, tmp_path: Path
) -> None:
    # the third of its window, the first of its epoch
    case = Case(nursery, tmp_path, epochs(window=4, batch=11))
    child = case.start()
    child.expect("waiting for call")
    child.send(signal.SIGTERM)
    until(lambda: bool(case.committed()), f"a checkpoint\n{child.log()}")
    case.go_on("call")
    assert child.wait() == 75
    testing.assert_resumable(case.run, 3, exact=True)
    case.assert_resumes_bit_identical()


def test_weights_swapped_for_an_evaluation_are_not_taken_for_the_models(
    nursery: Nursery, tmp_path: Path
) -> None:
    swap = "stuck(lambda: swapped(model, ema))"
    function = """
    def swapped(model, ema):
        kept = {name: value.detach().clone() for name, value in model.named_parameters()}
        for name, value in model.named_parameters():
            value.data.copy_(ema[name])
        training.wait_for("evaluation")
        for name, value in model.named_parameters():
            value.data.copy_(kept[name])

    def compute():"""
    case = Case(nursery, tmp_path, steps(before=swap).replace("    def compute():", function.lstrip("\n")))
    child = case.start()
    child.expect("waiting for evaluation")
    child.send(signal.SIGTERM)
    child.expect_log(
        "No boundary in time, and a rescue is not possible: the weights were changed outside optimizer.step()"
    )
    assert not case.committed()
    case.go_on("evaluation")
    assert child.wait() == 75
    assert testing.assert_resumable(case.run, 6, exact=True).record.kind.value == "jit"
    case.assert_resumes_bit_identical()


IN_BACKWARD = """
    from pathlib import Path
    import torch
    import lastcall
    from helpers.models import training

    def update(value):
        optimizers[value].step()
        optimizers[value].zero_grad()

    model, _ = training.parts()
    optimizers = {value: torch.optim.SGD([value], lr=0.01, momentum=0.9) for value in model.parameters()}
    for value in model.parameters():
        value.register_post_accumulate_grad_hook(update)
    with lastcall.protect(training.DIRECTORY, model=model, optimizers=list(optimizers.values())) as run:
        for step in run.steps(12):
            training.say(step)
            if step == 5 and not Path("stuck").exists():
                Path("stuck").touch()
                training.wait_for("call")
            model.loss(training.batch()).backward()
    training.finish(model=model, optimizers=[one.state_dict() for one in optimizers.values()])
"""


@pytest.mark.slow
def test_an_optimizer_inside_backward_is_said_to_be_unsupported_for_rescue(
    nursery: Nursery, tmp_path: Path
) -> None:
    case = Case(nursery, tmp_path, IN_BACKWARD)
    child = case.start()
    child.expect("waiting for call")
    child.send(signal.SIGTERM)
    child.expect_log("no rescue: an optimizer that updates inside backward()")
    assert not case.committed()
    case.go_on("call")
    assert child.wait() == 75
    testing.assert_resumable(case.run, 6, exact=True)
    case.assert_resumes_bit_identical()


@pytest.mark.slow
def test_with_rescue_switched_off_the_boundary_is_waited_for(nursery: Nursery, tmp_path: Path) -> None:
    case = Case(nursery, tmp_path, steps(before="stuck(lambda: training.wait_for('call'))"))
    child = case.start(LASTCALL_RESCUE="0")
    child.expect("waiting for call")
    child.send(signal.SIGTERM)
    child.expect_log("No boundary in time, and a rescue is not possible: rescue is switched off")
    case.go_on("call")
    assert child.wait() == 75
    assert testing.assert_resumable(case.run, 6, exact=True).record.kind.value == "jit"


def test_a_rescue_with_nothing_new_takes_the_checkpoint_that_is_there(
    nursery: Nursery, tmp_path: Path
) -> None:
    case = Case(nursery, tmp_path, steps(before="stuck(lambda: training.wait_for('call'))"))
    child = case.start(LASTCALL_SAVE_STEPS="5")
    child.expect("waiting for call")
    until(lambda: bool(case.committed()), "the periodic checkpoint")
    child.send(signal.SIGTERM)
    child.expect_log(": step 5 is already committed")
    case.go_on("call")
    assert child.wait() == 75
    assert [record["kind"] for record in case.committed()] == ["periodic"]
    case.assert_resumes_bit_identical()
