"""Every private name of Ray that is used, in one place: what a new version of Ray may break."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from typing import Any

import pyarrow.fs
import ray
from ray.train import Checkpoint
from ray.train.v2._internal.execution.context import get_train_context

try:
    from ray.train.v2._internal.execution import train_fn_utils
except ImportError:  # older versions
    train_fn_utils = None

POLL_VARIABLE = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"
POLL_SECONDS = 2.0
_LOST = {
    "DistError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "ConnectionError",
    "SynchronizationBarrierResetError",
}
_LOST_WORDS = ("connection closed by peer", "connection reset by peer", "broken pipe", "nccl", "gloo")
# behind the functions that a script calls
TrainFnUtils: Any = getattr(train_fn_utils, "DistributedTrainFnUtils", object)
DRAIN_VARIABLE = "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S"


def train_context() -> Any:
    """Of this train worker; RuntimeError outside of one."""
    return get_train_context()


def node_id() -> str:
    return str(ray.get_runtime_context().get_node_id())


def address() -> str:
    """Where the other nodes reach this one."""
    return str(ray.util.get_node_ip_address())


def trial() -> str:
    """The name of the Ray Tune trial in which this process starts a run; empty outside of one."""
    if "ray.tune" not in sys.modules:
        return ""
    try:
        from ray.tune import get_context

        return str(get_context().get_trial_id() or "")
    except Exception:  # older versions have another context, and none outside of a trial
        return ""


def poll_seconds() -> float:
    """Between two polls of the controller; it passes the variable on to its workers."""
    try:
        return float(os.environ.get(POLL_VARIABLE, POLL_SECONDS))
    except ValueError:
        return POLL_SECONDS


def trains_with_torch(context: Any) -> bool:
    """Whether torch will be imported in this worker anyway."""
    backend = type(context.train_run_context.backend_config)
    return any("torch" in kind.__module__.lower() for kind in backend.__mro__)


def checkpoint_at(storage: Any, name: str) -> Any:
    """The checkpoint of this name in the run's folder; None if there is none."""
    path = storage.build_checkpoint_path_from_name(name)
    found = storage.storage_filesystem.get_file_info(path)
    return (
        Checkpoint(path=path, filesystem=storage.storage_filesystem)
        if found.type.name == "Directory"
        else None
    )


def name_of(storage: Any, checkpoint: Any) -> str | None:
    return None if checkpoint is None else str(storage.extract_checkpoint_dir_name_from_path(checkpoint.path))


def release_barrier(context: Any) -> None:
    """Ray's report() on this rank returns without having reported anything. Newer versions of Ray only."""
    reset = getattr(context.get_synchronization_actor(), "reset", None)
    if reset is not None:
        reset.remote()


def new_name(storage: Any) -> str:
    return str(storage.make_default_checkpoint_dir_name())


def files_of(checkpoint: Any) -> list[str]:
    """The names of its files, below its folder."""
    if checkpoint is None:
        return []
    found = checkpoint.filesystem.get_file_info(pyarrow.fs.FileSelector(checkpoint.path, recursive=True))
    return sorted(
        entry.path.removeprefix(checkpoint.path).lstrip("/") for entry in found if entry.type.name == "File"
    )


def remove_local(checkpoint: Any, storage: Any) -> None:
    """The script's temporary folder: its `with` statement will not get to remove it. A folder elsewhere is
    the script's own affair."""
    path, home = os.path.realpath(checkpoint.path), os.path.realpath(tempfile.gettempdir())
    if (
        checkpoint.filesystem.type_name == "local"
        and path.startswith(home + os.sep)
        and storage.experiment_fs_path not in path
    ):
        shutil.rmtree(path, ignore_errors=True)


def lost_peer(error: Any) -> bool:
    """Whether a rank fails with this when another one is gone: a collective without its peer."""
    inner = getattr(error, "_base_exc", error)
    kinds = {kind.__name__ for kind in type(inner).__mro__}
    return bool(kinds & _LOST) or any(words in str(inner).lower() for words in _LOST_WORDS)


def actor_death(error: Any) -> Any:
    """The RayActorError of a worker whose process is gone; None for other errors, such as those of the
    script."""
    inner = getattr(error, "health_check_failure", error)
    return inner if isinstance(inner, ray.exceptions.RayActorError) else None
