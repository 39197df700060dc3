"""The platform's name for the job that this process belongs to: the same before and after a restart, whatever
else has changed.

A table of variables. Not the name of a machine, a path or a time: those change when a job comes back.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping

# the letters that Kubernetes makes random names of
_SUFFIX = re.compile(r"-[bcdfghjklmnpqrstvwxz2456789]{5}")
_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # in the driver of a submitted job
_UNNAMED = ("", "none")  # torchrun's rendezvous id where none was given


def identity(environ: Mapping[str, str] | None = None) -> str:
    """Such as `slurm:4711`; empty where no platform says."""
    found = os.environ if environ is None else environ
    for platform, name in _PLATFORMS:
        if said := name(found):
            return f"{platform}:{said}"
    return ""


def _slurm(environ: Mapping[str, str]) -> str:
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID", "")


def _ray(environ: Mapping[str, str]) -> str:
    try:
        found = json.loads(environ.get(_RAY_JOB, ""))["metadata"]["job_submission_id"]
    except (ValueError, KeyError, TypeError):
        return ""
    return found if isinstance(found, str) else ""


def _kubernetes(environ: Mapping[str, str]) -> str:
    """The pod's name, which is that of its job where the job gives its pods stable ones; a random end belongs
    to the pod alone."""
    pod = environ.get("HOSTNAME", "") if environ.get("KUBERNETES_SERVICE_HOST") else ""
    return pod[:-6] if len(pod) > 6 and _SUFFIX.fullmatch(pod[-6:]) else pod


def _torchrun(environ: Mapping[str, str]) -> str:
    found = environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if found in _UNNAMED else found


def _launcher(environ: Mapping[str, str]) -> str:
    """`lastcall run`: its registry lives as long as it does, through all restarts in place."""
    return os.path.basename(environ.get("LASTCALL_REGISTRY", ""))


_PLATFORMS: tuple[tuple[str, Callable[[Mapping[str, str]], str]], ...] = (
    ("slurm", _slurm),
    ("ray", _ray),
    ("kubernetes", _kubernetes),
    ("torchrun", _torchrun),
    ("lastcall run", _launcher),
)
