"""Training scripts as people write them. Each trains EPOCHS times over LOADER (or as many steps), says what
it has `seen`, resumes from train.get_checkpoint(), and saves far more seldom than it is told to stop."""

from __future__ import annotations

import textwrap

LEARNING = """
def learn(model, optimizer, batch):
    optimizer.zero_grad()
    loss = model(batch).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def begin(model, optimizer):
    checkpoint = train.get_checkpoint()
    if not checkpoint:
        return {}
    with checkpoint.as_directory() as folder:
        state = torch.load(os.path.join(folder, "state.pt"))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state
"""
_STATE = '{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}'
_STEP_STATE = '{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}'


def _epochs(
    body: str,
    helpers: str = "",
    before: str = "",
    after: str = "",
    head: str = "for epoch in range(start, EPOCHS):",
) -> str:
    lines = f"""
def main(config):
    model, optimizer = make()
    start = begin(model, optimizer).get("epoch", -1) + 1
    every, rank = config["every"], train.get_context().get_world_rank()
{textwrap.indent(textwrap.dedent(before), "    ")}
    {head}
        for index, batch in enumerate(LOADER):
            loss = learn(model, optimizer, batch)
            seen((epoch, index))
{textwrap.indent(textwrap.dedent(body).strip(chr(10)), "        ")}
{textwrap.indent(textwrap.dedent(after), "    ")}
"""
    return LEARNING + textwrap.dedent(helpers) + lines.replace("STATE", _STATE)


def _steps(
    body: str,
    helpers: str = "",
    before: str = "",
    head: str = "for step in range(start, EPOCHS * len(LOADER)):",
) -> str:
    lines = f"""
def main(config):
    model, optimizer = make()
    start = begin(model, optimizer).get("step", -1) + 1
    every, rank = config["every"], train.get_context().get_world_rank()
{textwrap.indent(textwrap.dedent(before), "    ")}
    {head}
        loss = learn(model, optimizer, LOADER[step % len(LOADER)])
        seen(step)
{textwrap.indent(textwrap.dedent(body).strip(chr(10)), "        ")}
"""
    return (
        LEARNING
        + textwrap.dedent(helpers).replace("STATE", _STEP_STATE)
        + lines.replace("STATE", _STEP_STATE)
    )


_LOOP = """        for index, batch in enumerate(LOADER):
            loss = learn(model, optimizer, batch)
            seen((epoch, index))
"""
_COMPREHENSION = """        losses = [one(model, optimizer, epoch, *pair) for pair in enumerate(LOADER)]
"""
_ONE = """
def one(model, optimizer, epoch, index, batch):
    loss = learn(model, optimizer, batch)
    seen((epoch, index))
    return loss
"""

SAVE = """
with tempfile.TemporaryDirectory() as folder:
    torch.save(STATE, f"{folder}/state.pt")
    train.report({"loss": loss}, checkpoint=Checkpoint.from_directory(folder))
"""


def _under(condition: str, body: str = SAVE) -> str:
    return f"{condition}\n{textwrap.indent(body.strip(chr(10)), '    ')}\n"


HELPER = """
def save(model, optimizer, epoch, metrics):
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, os.path.join(folder, "state.pt"))
        train.report(metrics, checkpoint=Checkpoint.from_directory(folder))
"""  # noqa: E501

EPOCH_SHAPES = {
    "seed": _epochs(
        _under("if epoch % 10 == 9:") + 'else:\n    train.report({"epoch": epoch, "loss": loss})\n'
    ),
    "comprehension": _epochs(_under("if epoch % 10 == 9:"), _ONE, before="loss = 0.0").replace(
        _LOOP, _COMPREHENSION
    ),
    "no other report": _epochs(_under("if epoch > 0 and epoch % every == 0:")),
    "variable": _epochs("""
        should = epoch % every == every - 1
        checkpoint = None
        with tempfile.TemporaryDirectory() as folder:
            if should and rank == 0:
                torch.save(STATE, f"{folder}/state.pt")
                checkpoint = Checkpoint.from_directory(folder)
            train.report({"loss": loss}, checkpoint=checkpoint)
    """),
    "helper in the branch": _epochs(
        "if (epoch + 1) % every == 0:\n    save(model, optimizer, epoch, {'loss': loss})", HELPER
    ),
    "helper at every pass": _epochs(
        "save(model, optimizer, epoch, {'loss': loss}, every)",
        HELPER.replace(
            "metrics):",
            "metrics, every):\n    if epoch % every != every - 1:\n        "
            "train.report(metrics)\n        return",
        ),
    ),
    "prebuilt state": _epochs(
        "state = STATE\nmetrics = dict(loss=loss)\n"
        + _under(
            "if epoch % every == every - 1:",
            SAVE.replace("STATE", "state").replace('{"loss": loss}', "metrics"),
        )
    ),
    "last epoch too": _epochs(_under("if (epoch + 1) % every == 0 or epoch == EPOCHS + 5:")),
    "inverted": _epochs('if (epoch + 1) % every:\n    train.report({"loss": loss})\n    continue\n' + SAVE),
    "inverted with else": _epochs(
        _under('if (epoch + 1) % every != 0:\n    train.report({"loss": loss})\nelse:')
    ),
    "rank outside": _epochs(
        """
        if epoch % every == every - 1:
            with tempfile.TemporaryDirectory() as folder:
                if rank == 0:
                    torch.save(STATE, f"{folder}/state.pt")
                    train.report({}, checkpoint=Checkpoint.from_directory(folder))
                else:
                    train.report({}, checkpoint=None)
        """
    ),
    "one line": _epochs("if (epoch + 1) % every == 0: save(model, optimizer, epoch, {'loss': loss})", HELPER),
    "choice": _epochs(
        "checkpoint = build(model, optimizer, epoch) if (epoch + 1) % every == 0 else None\ntrain.report({}, "
        "checkpoint=checkpoint)",
        """
        def build(model, optimizer, epoch):
            folder = tempfile.mkdtemp()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, f"{folder}/state.pt")
            return Checkpoint.from_directory(folder)
        """,  # noqa: E501
    ),
    "choice in the call": _epochs(
        "train.report({}, checkpoint=build(model, optimizer, epoch) if (epoch + 1) % every == 0 else None)",
        """
        def build(model, optimizer, epoch):
            folder = tempfile.mkdtemp()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, f"{folder}/state.pt")
            return Checkpoint.from_directory(folder)
        """,  # noqa: E501
    ),
    "built elsewhere": _epochs(
        "train.report({'loss': loss}, checkpoint=build(model, optimizer, epoch, every))",
        """
        def build(model, optimizer, epoch, every):
            if (epoch + 1) % every != 0:
                return None
            folder = tempfile.mkdtemp()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, f"{folder}/state.pt")
            return Checkpoint.from_directory(folder)
        """,  # noqa: E501
    ),
    "every epoch": _epochs(SAVE),
    "best": _epochs(_under("if loss < best:", "best = loss\n" + SAVE), before="best = -1.0"),
    "time": _epochs(
        _under("if time.monotonic() - last > 600:", "last = time.monotonic()\n" + SAVE),
        before="last = time.monotonic()",
    ),
    "counter": _epochs(
        "since += 1\n" + _under("if since >= every:", "since = 0\n" + SAVE), before="since = 0"
    ),
    "match": _epochs(
        "match epoch % every:\n    case 999:\n" + textwrap.indent(SAVE, " " * 8) + "    case _:\n        "
        "train.report({})\n"
    ),
    "try": _epochs(
        "try:\n" + textwrap.indent(_under("if epoch % every == 999:"), "    ") + "finally:\n    pass\n"
    ),
    "while": _epochs(
        "epoch += 1\n"
        + _under("if epoch % every == 0:", SAVE.replace("STATE", _STATE.replace("epoch}", "epoch - 1}"))),
        before="epoch = start",
        head="while epoch < EPOCHS:",
    ),
    "files": _epochs(
        """
        if epoch % every == 999:
            with tempfile.TemporaryDirectory() as folder:
                torch.save(STATE, f"{folder}/state.pt")
                with open(f"{folder}/meta.json", "w") as file:
                    json.dump({"epoch": epoch, "names": [name for name in model.state_dict() if epoch >= -1]}, file)
                train.report({}, checkpoint=Checkpoint.from_directory(folder))
        """  # noqa: E501
    ),
}

STEP_SHAPES = {
    "plain": _steps(_under("if step % every == 999:")),
    "rank": _steps(
        """
        checkpoint = None
        if rank == 0 and step % every == 999:
            folder = tempfile.mkdtemp()
            torch.save(STATE, f"{folder}/state.pt")
            checkpoint = Checkpoint.from_directory(folder)
        if step % every == 999:
            train.report({"loss": loss}, checkpoint=checkpoint)
        """
    ),
    "rank 0 alone": _steps(_under("if rank == 0 and step % every == 999:")),
    "continue": _steps("if step % every != 999:\n    continue\n" + SAVE),
    "continue on one line": _steps("if step % every != 999: continue\n" + SAVE),
    "while": _steps(
        "step += 1\n"
        + _under("if step % every == 0:", SAVE.replace("STATE", _STEP_STATE.replace("step}", "step - 1}"))),
        before="step = start",
        head="while step < EPOCHS * len(LOADER):",
    ),
    "closure": _steps(
        "save()\n",
        before="""
        def save():
            if step % every != 999:
                return
            with tempfile.TemporaryDirectory() as folder:
                torch.save(STATE, f"{folder}/state.pt")
                train.report({}, checkpoint=Checkpoint.from_directory(folder))
        """,
    ),
    "trigger": _steps(
        _under("if due(step, config):"),
        "def due(step, config):\n    if step == 0:\n        return False\n    return step % config['every'] "
        "== 0\n",
    ),
    "best": _steps(_under("if loss < best:", "best = loss\n" + SAVE), before="best = -1.0"),
    "inside the branch and out": _steps(
        "due = step % every == 999\n" + _under("if due:", _under("if rank >= 0:"))
    ),
    "accumulation": _steps(_under("if step % every == 999:")).replace(
        "        loss = learn(", "        if step % 1 != 0:\n            continue\n        loss = learn("
    ),
}
