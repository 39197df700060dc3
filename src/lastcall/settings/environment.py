"""What the environment says of a run besides its settings: what stands above this process, where it runs, and
which variables nothing reads."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lastcall.settings import table

PREFIX = "LASTCALL_"
# Set by `lastcall run`, in torchrun, and by `lastcall drill --prove`, for the processes below.
INTERNAL = (
    "LASTCALL_REGISTRY",
    "LASTCALL_STORE",
    "LASTCALL_ATTEMPT",
    "LASTCALL_PROOF",
    "LASTCALL_HANDS_OVER",
    "LASTCALL_TERMINATION_LOG",  # by the webhook, in a container whose message is elsewhere
)
LAUNCH = (  # read by `lastcall run`: notices/ and launch/platforms.py
    "LASTCALL_AWS_REBALANCE",
    "LASTCALL_AZURE_LEAD_SECONDS",
    "LASTCALL_AZURE_METADATA_ENDPOINT",
    "LASTCALL_REQUEUE_FILE",
    "LASTCALL_SLURM_LEAD_SECONDS",
)
TERMINATION_LOG = "/dev/termination-log"  # of a container, unless its terminationMessagePath says otherwise
S3_NAMES = (  # boto3's, and AWS_S3_ENDPOINT, which is that of OpenShift AI's data connections
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_DEFAULT_REGION",
    "AWS_S3_ENDPOINT",
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL",
)


def registry_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """The registry of training processes of the `lastcall run` above this process, if there is one."""
    folder = (os.environ if environ is None else environ).get("LASTCALL_REGISTRY")
    return Path(folder) if folder and os.path.isdir(folder) else None


def proof_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """The folder of the `lastcall drill --prove` that this process is part of."""
    folder = (os.environ if environ is None else environ).get("LASTCALL_PROOF")
    return Path(folder) if folder and os.path.isdir(folder) else None


def hands_over(environ: Mapping[str, str] | None = None) -> bool:
    """Whether `lastcall run --resume-args` above this process gives a restart the path of what was saved."""
    return (os.environ if environ is None else environ).get("LASTCALL_HANDS_OVER") == "1"


def stop_file(environ: Mapping[str, str] | None = None) -> str | None:
    """The stop file that the environment names: that of this container, whatever another container's settings
    are."""
    return (os.environ if environ is None else environ).get("LASTCALL_STOP_FILE", "").strip() or None


def termination_log(environ: Mapping[str, str] | None = None) -> str | None:
    """The file of the container's termination message, which exists in a pod only. None for the ranks beside
    the first one of a machine: a message is one rank's."""
    environ = os.environ if environ is None else environ
    if environ.get("LOCAL_RANK", "0") != "0":
        return None
    return environ.get("LASTCALL_TERMINATION_LOG", "").strip() or TERMINATION_LOG


def s3_connection(keys: str | None, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The settings of the object store: from the environment, or from a folder where a secret is mounted."""
    environ = os.environ if environ is None else environ
    found = {}
    for name in S3_NAMES:
        try:
            said = environ.get(name) or (Path(keys, name).read_text().strip() if keys else "")
        except (OSError, ValueError):
            said = ""
        if said:
            found[name] = said
    return found


def launcher_store(environ: Mapping[str, str] | None = None) -> str | None:
    """The port and the secret of the store that the `lastcall run` above this process, if there is one, runs
    for the ranks."""
    return (os.environ if environ is None else environ).get("LASTCALL_STORE", "").strip() or None


def of_torchrun(environ: Mapping[str, str] | None = None) -> dict[str, str] | None:
    """The variables that torchrun sets for its workers; None if it is not above this process, or has no store
    of its own."""
    environ = os.environ if environ is None else environ
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    if not all(environ.get(name) for name in names) or environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return {name: environ[name] for name in names}


@dataclass(frozen=True)
class Attempt:
    """The number of torchrun's attempt. `agreed`: all machines use the same number; otherwise each has
    counted on its own."""

    name: str = "0"
    agreed: bool = True


def attempt(environ: Mapping[str, str] | None = None) -> Attempt:
    """The first attempt, if the ranks are never restarted. If torchrun is not patched (auto/attempts.py), its
    own count."""
    environ = os.environ if environ is None else environ
    if told := environ.get("LASTCALL_ATTEMPT"):
        return Attempt(told)
    counted = environ.get("TORCHELASTIC_RESTART_COUNT") or "0"
    return Attempt(counted, environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE"))


def torchrun_id(environ: Mapping[str, str] | None = None) -> str | None:
    """torchrun's ID of the run of this worker; None if torchrun is not above it."""
    return (os.environ if environ is None else environ).get("TORCHELASTIC_RUN_ID") or None


def host_of_rank_0(size: int, environ: Mapping[str, str] | None = None) -> str:
    """The address of rank 0 for a run with this many ranks."""
    environ = os.environ if environ is None else environ
    if environ.get("LOCAL_WORLD_SIZE") == str(size):  # all of them are on one machine
        return "127.0.0.1"
    return environ.get("MASTER_ADDR") or os.uname().nodename


@dataclass(frozen=True)
class StatusServer:
    """Where to report a TrainJob's progress to Kubeflow Trainer, as its controller sets it in the pod
    (KEP-2779)."""

    url: str
    ca_file: str | None
    token_file: str


def status_server(environ: Mapping[str, str] | None = None) -> StatusServer | None:
    """None outside of a TrainJob, or if the controller's feature gate is off."""
    environ = os.environ if environ is None else environ
    url, token = environ.get("KUBEFLOW_TRAINER_SERVER_URL"), environ.get("KUBEFLOW_TRAINER_SERVER_TOKEN")
    return (
        StatusServer(url, environ.get("KUBEFLOW_TRAINER_SERVER_CA_CERT") or None, token)
        if url and token
        else None
    )


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """A message for each LASTCALL_* variable that nothing reads. The values are left out: they may be
    secret."""
    known = [setting.variable for setting in table.JIT + table.PERIODIC]
    known += INTERNAL + LAUNCH

    def nearest(name: str) -> str:
        # LASTCALL_GRACE: the unit was forgotten
        if longer := [other for other in known if other.startswith(name)]:
            return min(longer, key=len)
        return max(known, key=lambda other: difflib.SequenceMatcher(None, name, other).ratio())

    return [
        f"{name} is not a setting of lastcall and is ignored. Did you mean {nearest(name)}?"
        for name in sorted(os.environ if environ is None else environ)
        if name.startswith(PREFIX) and name not in known
    ]
