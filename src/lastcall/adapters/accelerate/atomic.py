"""save_state() of one process, made atomic: written beside where it belongs, made durable, and then renamed.

The scratch folder is not among the user's own: scripts that resume take the newest folder that they find there. Saves of many ranks
stay as they are: who takes part in them is known to the script only.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lastcall.core.record import SENTINEL
from lastcall.storage import files as storage


def save(original: Callable[..., Any], accelerator: Any, output_dir: Any, *args: Any, **kwargs: Any) -> Any:
    if output_dir is None or accelerator.num_processes > 1 or accelerator.project_configuration.automatic_checkpoint_naming:
        return original(accelerator, output_dir, *args, **kwargs)
    files = storage.Files()
    target = Path(os.path.abspath(os.path.expanduser(output_dir)))
    target.parent.mkdir(parents=True, exist_ok=True)
    above = target.parent.parent
    home = above if os.stat(above).st_dev == os.stat(target.parent).st_dev and os.access(above, os.W_OK) else target.parent
    staging = home / f".{target.parent.name}-lastcall-{os.getpid()}"
    _clear(files, staging)
    staging.mkdir()
    try:
        storage.write_small(files, staging / SENTINEL, b"being written\n")
        original(accelerator, str(staging), *args, **kwargs)
        for folder, _, names in os.walk(staging):
            for name in names:
                _make_durable(files, Path(folder, name))
            files.sync_directory(Path(folder))
        files.unlink(staging / SENTINEL)
        files.sync_directory(staging)
        _put(files, staging, target)
        files.sync_directory(target.parent)
    finally:
        _clear(files, staging)
    return Path(output_dir)


def _make_durable(files: storage.Files, path: Path) -> None:
    fd = files.open(path, os.O_RDONLY)
    try:
        files.fsync(fd)
    finally:
        files.close(fd)


def _put(files: storage.Files, staging: Path, target: Path) -> None:
    """Give the folder its name. What else the script has put into a folder of that name stays in it."""
    if not target.is_dir() or not any(target.iterdir()):
        files.rename(staging, target)
        return
    old = staging.with_name(f"{staging.name}-old")
    try:
        files.exchange(staging, target)
        files.rename(staging, old)
    except OSError:  # this file system cannot swap names
        files.rename(target, old)
        files.rename(staging, target)
    for path in list(old.iterdir()):
        if not (target / path.name).exists():
            files.rename(path, target / path.name)
    files.sync_directory(target)
    storage.remove_tree(files, old)


def _clear(files: storage.Files, path: Path) -> None:
    if path.exists():
        storage.remove_tree(files, path)
