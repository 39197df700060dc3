"""What was persisted and never committed: a checkpoint in the run's folder that is not registered with Ray.

Ray registers a checkpoint when its controller has polled the report of every rank. A process that dies
between the upload and that poll leaves a whole checkpoint that no restart would find. So a small file beside
it names it until it is registered; in the next incarnation the script gets it, if nothing newer has been
registered since.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow.fs

from lastcall.adapters.ray import internals
from lastcall.core.engine import digest

log = logging.getLogger("lastcall")
FOLDER = ".lastcall"
STATES = "state-"  # how the names of the folders of states begin
_MARKER = "uncommitted.json"


def leave(storage: Any, checkpoint: Any, before: Sequence[str | None], facts: Mapping[str, Any]) -> None:
    """`before`: the names of the checkpoints that were reported by then: the newest that Ray has registered
    is one of them."""
    name = internals.name_of(storage, checkpoint)
    write(storage, _MARKER, {"name": name, "before": list(before), "time": time.time(), **facts})


def leave_state(
    storage: Any,
    folder: str,
    before: Sequence[str | None],
    facts: Mapping[str, Any],
    given: Mapping[str, str] | None = None,
) -> None:
    """Of a script without a save of its own: not a checkpoint that it could read. `given`: the script's
    arguments (`arguments`)."""
    write(
        storage,
        _MARKER,
        {"state": folder, "before": list(before), "time": time.time(), "given": dict(given or {}), **facts},
    )


def find_state(
    storage: Any, known: Any, given: Mapping[str, str] | None = None
) -> tuple[str | None, dict[str, Any]]:
    """The folder of such a state, if nothing newer has been committed since, and the script's arguments are
    the same."""
    body = _read(storage, _MARKER)
    folder = body.get("state")
    if not isinstance(folder, str) or internals.name_of(storage, known) not in body.get("before", []):
        return None, body
    before = body.get("given")
    others = (
        sorted(key for key in {**before, **given} if before.get(key) != given.get(key))
        if given and before
        else []
    )
    if others:
        log.warning(
            "The model and optimizer that the last job of this name saved after %s are not restored: "
            "train_loop_config has changed (%s). To resume from there, start it with the former values; "
            "otherwise give this run another name: RunConfig(name=...)",
            body.get("reason", "a notice"),
            ", ".join(f"`{key}`" for key in others),
        )
    return None if others else folder, body


def forget_state(storage: Any) -> None:
    """The run has ended well: the next one of this name is another run."""
    body = _read(storage, _MARKER)
    if isinstance(body.get("state"), str):
        forget(storage)
        clean(storage, STATES, "")


def arguments(config: Any) -> dict[str, str]:
    """Tells one run of a name from another: a digest of each value of its train_loop_config, which may hold
    secrets."""
    values = config if isinstance(config, Mapping) else {}
    return {
        str(key): digest.of(json.dumps(value, sort_keys=True, default=_kind).encode())
        for key, value in values.items()
    }


def forget(storage: Any) -> None:
    path = _path(storage, _MARKER)
    if storage.storage_filesystem.get_file_info(path).type.name == "File":
        storage.storage_filesystem.delete_file(path)


def find(storage: Any, known: Any) -> tuple[Any, dict[str, Any]]:
    """The checkpoint that was left, if it is newer than the one that Ray has registered; and its facts."""
    body = _read(storage, _MARKER)
    name = body.get("name")
    if not isinstance(name, str) or internals.name_of(storage, known) not in body.get("before", []):
        return None, body
    return internals.checkpoint_at(storage, name), body


def clean(storage: Any, prefix: str, keep: str) -> None:
    """Remove the folders that were left before this one."""
    filesystem, home = storage.storage_filesystem, f"{storage.experiment_fs_path}/{FOLDER}"
    for entry in filesystem.get_file_info(pyarrow.fs.FileSelector(home)):
        if entry.base_name.startswith(prefix) and not (keep and keep.endswith(entry.base_name)):
            filesystem.delete_dir(entry.path)


def inject(context: Any) -> None:
    """In a train worker, before the script asks for its checkpoint. Every rank finds the same one, so the
    file is not removed here."""
    checkpoint, body = find(context.storage_context, context.checkpoint)
    if checkpoint is None:
        return
    context.checkpoint = checkpoint
    log.info(
        "Resuming from %s, which the last incarnation saved after %s and could not commit with the "
        "controller",
        body["name"],
        body.get("reason", "a notice"),
    )


def record(storage: Any, checkpoint: Any, facts: Mapping[str, Any]) -> None:
    """The commit record is beside the checkpoint, not in it: the checkpoint holds the script's own files
    only."""
    name = internals.name_of(storage, checkpoint)
    write(
        storage,
        f"{str(name).replace('/', '_')}.json",
        {"name": name, "kind": "jit", "time": time.time(), **facts},
    )


def write(storage: Any, name: str, body: Mapping[str, Any]) -> None:
    storage.storage_filesystem.create_dir(f"{storage.experiment_fs_path}/{FOLDER}", recursive=True)
    with storage.storage_filesystem.open_output_stream(_path(storage, name)) as file:
        file.write(json.dumps(body, default=str).encode())


def _read(storage: Any, name: str) -> dict[str, Any]:
    """Empty if it does not exist, or was cut off."""
    try:
        with storage.storage_filesystem.open_input_stream(_path(storage, name)) as file:
            body = json.loads(file.read())
    except (OSError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}


def _kind(value: object) -> str:
    """Replaces a value that JSON cannot hold."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _path(storage: Any, name: str) -> str:
    return f"{storage.experiment_fs_path}/{FOLDER}/{name}"
