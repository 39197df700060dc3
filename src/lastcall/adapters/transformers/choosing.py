"""Which checkpoint a train() call resumes from, and which run it is."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from lastcall import errors, settings
from lastcall.adapters.transformers.calls import Call, Calls, Traits, next_call, parameters, script
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.record import Entry, Record
from lastcall.core.engine import digest
from lastcall.formats import safetensors

log = logging.getLogger("lastcall")
_WEIGHTS = (
    "model.safetensors",
    "adapter_model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "adapter_model.bin",
)
_STATE = "trainer_state.json"
_SHORT = 8  # letters of a run's name that are enough to call it by


def identity(trainer: Any, given: str | None = None, call: int = 1) -> str:
    """The name of a run: the same for every incarnation of a script, another where what it trains, or how, is
    another. `given`: what the user calls it; `call`: a script may train several times into one folder (folds,
    stages), always in the same order."""
    if given:
        return digest.of(f"{given}/{call}".encode() if call > 1 else given.encode())
    traits = Traits.of(trainer)
    # "None" stands where a fingerprint of the data was, which told paths and times: checkpoints of then are
    # still this run's.
    return digest.of(
        json.dumps([traits.said, parameters(trainer), traits.length, "None", call], sort_keys=True).encode()
    )


class Start:
    """One train() call about to begin: which run it is, and what the directory knows of those before it."""

    def __init__(self, trainer: Any, given: str | None, root: Path) -> None:
        self.number = next_call(root)
        self.calls = Calls(root)
        self.traits = Traits.of(trainer)
        self.given = given
        self.root = root
        # raises CheckpointError where a byte of it is not as it was
        self.check: Callable[[Entry], None] = lambda entry: None
        self.before = self.calls.before(self.number)
        self.run = self._run(trainer)

    def _run(self, trainer: Any) -> str:
        """An explicit name; then the platform's own identity of the job; then what is trained, and how."""
        if self.given:
            return self._called(self.given) or identity(trainer, self.given, self.number)
        before, own = self.before, identity(trainer, None, self.number)
        if before is None or before.run == own:
            return own
        if before.traits == self.traits:
            return before.run  # it has gone by that name since its job was restarted with other arguments
        if before.restarted_as(self.calls.job) and before.traits.model == self.traits.model:
            log.warning(
                "This is job %s again, so it is the same run as before, although %s. For a new run, give it "
                "another output_dir, or: "
                "export LASTCALL_RUN_ID=NAME",
                self.calls.job,
                " and ".join(self.traits.against(before.traits)),
            )
            return before.run
        return own

    def _called(self, given: str) -> str:
        """The run in this directory that is called so in the log: by its own name, or the beginning of it."""
        if len(given) < _SHORT:
            return ""
        found = {record.run for _, record in recorded(self.root) if record.run.startswith(given)}
        return found.pop() if len(found) == 1 else ""

    def note(self, ended: str = "") -> None:
        self.calls.note(
            self.number, Call(self.run, self.calls.job, self.traits, ended, time.time(), script())
        )

    def differences(self, record: Record) -> str:
        before = self.before
        told = self.traits.against(before.traits) if before is not None and before.run == record.run else []
        return f" ({'; '.join(told)})" if told else ""

    def refuse_to_start_over(self) -> None:
        """A restart of what was saved resumes from it, or not at all: no user reads the log of a job that
        restarts automatically."""
        before = self.before
        if self.given or before is None or before.run == self.run:
            return
        again = before.restarted_as(self.calls.job)
        if not again and not before.just_left(self.calls.job, time.time()):
            return
        lost = [
            (path, record)
            for path, record in recorded(self.root)
            if record.run == before.run and record.file(_STATE)
        ]
        if not lost:
            return
        path, record = max(lost, key=lambda found: found[1].recency)
        why = (
            f"this is job {self.calls.job} again"
            if again
            else f"the run was stopped and saved {time.time() - before.at:.0f} s ago"
        )
        settings.fail(
            f"{path} (step {record.step}) would not be resumed from: {why}, but this start is of another "
            "training"
            f"{self.differences(record)}. It would begin at step 0. To resume from the checkpoint: export "
            f"LASTCALL_RUN_ID={record.run[:_SHORT]}, or pass resume_from_checkpoint=True. To start over: "
            "give it another output_dir, "
            "or export LASTCALL_RUN_ID=NAME"
        )


def recorded(root: Path) -> list[tuple[Path, Record]]:
    """The checkpoints in a directory with a commit record that can be read, of whatever run."""
    found = []
    for _, path in _numbered(root):
        with contextlib.suppress(errors.CheckpointError):
            found.append((path, records.read(path)))
    return found


def _numbered(root: Path) -> list[tuple[int, Path]]:
    """Those that Transformers would look at, the latest step first."""
    found = []
    for path in root.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        number = path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        if number.isdecimal() and path.is_dir():
            found.append((int(number), path))
    return sorted(found, reverse=True)


@dataclass(frozen=True)
class Chosen:
    path: str | None
    ours: bool = False
    origin: str = ""  # what the user named


def choose(
    trainer: Any,
    entry: Entry | None,
    ledger: dict[str, Any] | None,
    wanted: str | bool | None,
    start: Start | None = None,
) -> Chosen:
    """`entry`: the newest valid checkpoint of this run; `wanted`: what the script has passed. True is what
    Transformers says: the last checkpoint in the folder, no matter what has written it."""
    named = str(wanted) if isinstance(wanted, str | os.PathLike) else ""
    root = Path(trainer._get_output_dir(None))
    if entry is not None and (
        not named or (ledger or {}).get("origin") == named or Path(named).resolve() == entry.path.resolve()
    ):
        later = None if named else _of_others(root, start, entry.record.step, asked=wanted is True)
        if later is None or wanted is not True:
            if later is not None:
                log.warning(
                    "%s is of a later step, but was not written by lastcall: it is not resumed from. "
                    "Pass resume_from_checkpoint=True to resume from it",
                    later.name,
                )
            return Chosen(str(entry.path), True, named or str((ledger or {}).get("origin", "")))
        log.info(
            "Resuming from %s, as resume_from_checkpoint=True asks: it is of a later step, and is complete",
            later.name,
        )
        return Chosen(str(later))
    if named:
        log.info("Resuming from %s, as the script asks", named)
        return Chosen(named, False, named)
    if wanted is not True and start is not None:
        start.refuse_to_start_over()
    found = _of_others(root, start, asked=wanted is True)
    if found is None:
        return Chosen(None)
    if wanted is True:
        log.info("Resuming from %s, %s: it is complete", found.name, _whose(found))
        return Chosen(str(found))
    _say_what_is_left(found, start)
    return Chosen(None)


def _whose(path: Path) -> str:
    return (
        "which another training has saved"
        if (path / records.NAME).exists()
        else "which was not written by lastcall"
    )


def _say_what_is_left(found: Path, start: Start | None) -> None:
    """One line, before the first step of a run that begins beside saved work."""
    if not (found / records.NAME).exists():
        log.warning(
            "%s was not written by lastcall, and it is unknown whether it belongs to this run: it is not "
            "resumed from. "
            "Pass resume_from_checkpoint=True to resume from it",
            found.name,
        )
        return
    record = records.read(found)
    log.warning(
        "%s (step %d) is of another training%s: it is NOT resumed from, and this run begins at step 0. To "
        "resume from it: export "
        "LASTCALL_RUN_ID=%s, or pass resume_from_checkpoint=True",
        found,
        record.step,
        start.differences(record) if start is not None else "",
        record.run[:_SHORT],
    )


def _of_others(root: Path, start: Start | None, after: int = -1, *, asked: bool) -> Path | None:
    """The latest checkpoint that is not of this run and has what it needs to load, of a step after this one.
    `asked`: it will be loaded, so every byte with a digest is read. Otherwise those of this script's other
    train() calls are no business of this one, and beside checkpoints of its own only those count that were
    not written by lastcall."""
    for step, path in _numbered(root):
        if step <= after:
            break
        entry = None
        if (path / records.NAME).exists():
            entry = _readable(path)
            if entry is None or not _of_another_trainer(entry, start, asked or after < 0, asked):
                continue
        if why := _unfit(path, entry, start if asked else None):
            log.warning("Skipping %s: %s", path.name, why)
        else:
            return path
    return None


def _of_another_trainer(entry: Entry, start: Start | None, wanted: bool, asked: bool) -> bool:
    record = entry.record
    if not wanted or record.file(_STATE) is None:
        return False
    return start is None or (
        record.run != start.run and (asked or record.run not in start.calls.runs(start.number))
    )


def _readable(path: Path) -> Entry | None:
    try:
        return Entry(path, records.read(path))
    except errors.CheckpointError:
        return None


def _unfit(path: Path, entry: Entry | None, start: Start | None) -> str:
    """Why HF could not load it; empty if it could, as far as a look tells."""
    if (path / records.SENTINEL).exists():
        return "it was never completed"
    try:
        json.loads((path / "trainer_state.json").read_bytes())
    except (OSError, ValueError) as error:
        return f"trainer_state.json cannot be read ({error})"
    if entry is not None:
        return _damaged(entry, start)
    weights = next((path / name for name in _WEIGHTS if (path / name).is_file()), None)
    if weights is None:
        return "it has no weights"
    try:
        if weights.suffix == ".safetensors":
            safetensors.parse(safetensors.read_header(weights), weights.stat().st_size)
        if weights.suffix == ".json":
            for shard in set(json.loads(weights.read_bytes())["weight_map"].values()):
                safetensors.parse(safetensors.read_header(path / shard), (path / shard).stat().st_size)
        for archive in path.glob("*.pt"):
            with zipfile.ZipFile(archive) as opened:
                opened.infolist()
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        zipfile.BadZipFile,
        errors.LastcallError,
    ) as error:
        return f"a file is damaged ({error})"
    return ""


def _damaged(entry: Entry, start: Start | None) -> str:
    if not entry.record.complete:
        return "there was no time to write all of it"
    try:
        if start is not None:
            start.check(entry)
    except errors.CheckpointError as error:
        return f"a file is damaged ({error})"
    return ""
