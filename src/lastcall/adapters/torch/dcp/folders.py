"""Whose folder it is: torch's own reader and ours each find the other's folders, and say which reader is
meant.

Discarded: a `.metadata` of torch's kind beside our files, so that its FileSystemReader reads them. That file
is a pickle, and the reader wants each tensor as a stream of torch.save(), for which safetensors files have no
room: each tensor would be written twice.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import filesystem

from lastcall import errors
from lastcall.core.checkpoint import catalog
from lastcall.core.checkpoint import record as records
from lastcall.core.process import patching

_METADATA = (".metadata", "__0.metadata")  # the second where each rank has its own (use_collectives=False)


def check(path: Path) -> None:
    """Say what a folder is that holds no checkpoint of lastcall."""
    if os.path.lexists(path / records.NAME):
        return
    if not path.is_dir():
        raise errors.CheckpointError(
            f"{path} is {'a file, not the folder of a checkpoint' if path.exists() else 'not there'}."
        )
    if any((path / name).exists() for name in _METADATA):
        raise errors.CheckpointError(
            f"{path} was written by torch's own FileSystemWriter. Its metadata is a pickle, which can run "
            "code when it is loaded, so "
            "lastcall does not read it. Read it with: "
            f"storage_reader=torch.distributed.checkpoint.FileSystemReader({str(path)!r})"
        )
    if (path / catalog.PRIVATE).is_dir():
        raise errors.CheckpointError(
            f"{path} is the directory of a run, not a checkpoint. Name one of its checkpoints: lastcall ls "
            f"{path}"
        )
    raise errors.CheckpointError(f"{path} is no checkpoint of lastcall: {records.NAME} is missing.")


def teach() -> None:
    """Let torch's FileSystemReader (`dcp.load(checkpoint_id=...)`, dcp_to_torch_save()) say which reader a
    folder of ours needs. Without it the error is that a file called `.metadata` is missing."""
    patching.wrap(filesystem.FileSystemReader, "read_metadata", _explained)


def _explained(original: Any) -> Any:
    def read_metadata(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except FileNotFoundError as error:
            if not os.path.lexists(os.path.join(self.path, records.NAME)):
                raise
            raise errors.CheckpointError(_ours(str(self.path))) from error

    return read_metadata


def _ours(path: str) -> str:
    return (
        f"{path} was written by lastcall, in its own format. "
        f"Read it with: dcp.load(state_dict, storage_reader=lastcall.dcp.Reader({path!r})); "
        f"for one file that torch.load() reads: lastcall.dcp.to_torch_save({path!r}, 'checkpoint.pt')"
    )
