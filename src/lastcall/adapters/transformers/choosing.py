"""Which checkpoint a train() call goes on from, and which run it is."""

from __future__ import annotations

import collections
import json
import logging
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from lastcall import errors
from lastcall.core import digest
from lastcall.core import record as records
from lastcall.core.catalog import Entry
from lastcall.formats import safetensors

log = logging.getLogger("lastcall")
_SAME = (
    "seed", "data_seed", "learning_rate", "optim", "lr_scheduler_type", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2",
    "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps",
)  # fmt: skip
_WEIGHTS = ("model.safetensors", "adapter_model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "adapter_model.bin")


def identity(trainer: Any, given: str | None = None, call: int = 1) -> str:
    """The name of a run: the same for every incarnation of a script, another where what it trains, or how, is another. `given`: what
    the user calls it; `call`: a script may train several times into one folder (folds, stages), always in the same order."""
    if given:
        return digest.of(f"{given}/{call}".encode() if call > 1 else given.encode())
    args = trainer.args
    said = {name: str(getattr(args, name, None)) for name in _SAME}
    model = [(name, list(value.shape), str(value.dtype)) for name, value in trainer.model.named_parameters()] if trainer.model else []
    try:
        length = len(trainer.train_dataset) if trainer.train_dataset is not None else None
    except TypeError:
        length = None
    data = getattr(trainer.train_dataset, "_fingerprint", None)  # of the `datasets` library
    return digest.of(json.dumps([said, model, length, str(data), call], sort_keys=True).encode())


_calls: collections.Counter[Path] = collections.Counter()


def next_call(root: Path) -> int:
    """The number of this train() call among those of this process that save into the same folder."""
    _calls[root.resolve()] += 1
    return _calls[root.resolve()]


@dataclass(frozen=True)
class Chosen:
    path: str | None
    ours: bool = False
    origin: str = ""  # what the user named


def choose(trainer: Any, entry: Entry | None, ledger: dict[str, Any] | None, wanted: str | bool | None) -> Chosen:
    """`entry`: the newest valid checkpoint of this run; `wanted`: what the script has passed."""
    named = str(wanted) if isinstance(wanted, str | os.PathLike) else ""
    if entry is not None and (not named or (ledger or {}).get("origin") == named or Path(named).resolve() == entry.path.resolve()):
        later = None if named else _of_others(Path(trainer._get_output_dir(None)), entry.record.step)
        if later is None or wanted is not True:
            if later is not None:
                log.warning(
                    "%s is of a later step, but was not written by lastcall: it is not resumed from. "
                    "Pass resume_from_checkpoint=True to go on from it",
                    later.name,
                )
            return Chosen(str(entry.path), True, named or str((ledger or {}).get("origin", "")))
        log.info("Resuming from %s: not written by lastcall, but of a later step, and it has all that it needs", later.name)
        return Chosen(str(later))
    if named:
        log.info("Resuming from %s, as the script says", named)
        return Chosen(named, False, named)
    found = _of_others(Path(trainer._get_output_dir(None)))
    if found is None:
        return Chosen(None)
    if wanted is True:
        log.info("Resuming from %s, which was not written by lastcall: it has all that it needs to load", found.name)
        return Chosen(str(found))
    log.warning(
        "%s was not written by lastcall, and nothing tells whether it belongs to this run: it is not resumed from. "
        "Pass resume_from_checkpoint=True to go on from it",
        found.name,
    )
    return Chosen(None)


def _of_others(root: Path, after: int = -1) -> Path | None:
    """The newest checkpoint without a commit record that has what it needs to load, of a step after this one."""
    found = []
    for path in root.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        number = path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        if number.isdecimal() and path.is_dir() and not (path / records.NAME).exists():
            found.append((int(number), path))
    for step, path in sorted(found, reverse=True):
        if step <= after:
            break
        if why := _unfit(path):
            log.warning("%s is passed over: %s", path.name, why)
        else:
            return path
    return None


def _unfit(path: Path) -> str:
    """Why HF could not load it; empty if it could, as far as a look tells."""
    if (path / records.SENTINEL).exists():
        return "it was never completed"
    try:
        json.loads((path / "trainer_state.json").read_bytes())
    except (OSError, ValueError) as error:
        return f"trainer_state.json cannot be read ({error})"
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
    except (OSError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile, errors.LastcallError) as error:
        return f"a file is damaged ({error})"
    return ""
