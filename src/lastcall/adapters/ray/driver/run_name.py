"""A name that the resubmitted run has too.

Ray finds the checkpoints of a run by RunConfig(name=...). Without one it makes a name from the date, and a
job that is submitted again (a RayJob whose cluster was taken away) starts from scratch. Where the job has a
name of its own, the run gets it.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
from collections.abc import Mapping
from typing import Any

log = logging.getLogger("lastcall")
_DATED = re.compile(r"ray_train_run-\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d")
# the letters of Kubernetes' random names
_SUFFIX = re.compile(r"-[bcdfghjklmnpqrstvwxz2456789]{5}")
_RANDOM = "raysubmit_"  # a random id of `ray job submit`
_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # in the driver of a submitted job
_KUBERAY = "RAY_USAGE_STATS_KUBERAY_IN_USE"  # in the pods of KubeRay

_runs = itertools.count(1)  # several fit() calls in one script are several runs, in the same order each time


def pin(
    run_config: Any, run_id: str | None, environ: Mapping[str, str] | None = None, trial: str = ""
) -> None:
    """Give a run without a name one that lasts, or warn what it costs to have none. `trial`: of Ray Tune,
    whose trials are runs of their own."""
    if not _DATED.fullmatch(run_config.name or "") or "storage_context" in vars(run_config):
        return
    number = next(_runs)
    name = run_id or of_job(os.environ if environ is None else environ)
    if name is None:
        log.warning(
            "The name of this run is %s, made from the date: if the job is submitted again, it starts from "
            "scratch. Give it a name that stays: RunConfig(name='exp1'), or: export LASTCALL_RUN_ID=exp1",
            run_config.name,
        )
        return
    name = f"{name}-{trial}" if trial else name
    run_config.name = name if number == 1 else f"{name}-{number}"
    log.info(
        "The name of this run is %s (RunConfig has none): submitted again, it resumes from its newest "
        "checkpoint",
        run_config.name,
    )


def of_job(environ: Mapping[str, str]) -> str | None:
    """The name of the job that this driver belongs to, without what changes when it is submitted again."""
    try:
        found = json.loads(environ.get(_JOB, ""))["metadata"]["job_submission_id"]
    except (ValueError, KeyError, TypeError):
        return None
    if not isinstance(found, str) or not found or found.startswith(_RANDOM):
        return None
    if environ.get(_KUBERAY) == "1" and (suffix := _SUFFIX.fullmatch(found[-6:])):
        found = found.removesuffix(suffix[0])
    return found or None
