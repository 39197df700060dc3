from __future__ import annotations

import json

import pytest

from lastcall.core.process import job_identity

RAY = json.dumps({"metadata": {"job_submission_id": "raysubmit_17"}})
IN_CLUSTER = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, ""),
        ({"SLURM_JOB_ID": "4711"}, "slurm:4711"),
        ({"SLURM_JOB_ID": "4713", "SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "2"}, "slurm:4711_2"),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": RAY}, "ray:raysubmit_17"),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{"}, ""),
        ({**IN_CLUSTER, "HOSTNAME": "exp1-0"}, "kubernetes:exp1-0"),
        # the pod of a job, whose next pod ends otherwise
        ({**IN_CLUSTER, "HOSTNAME": "exp1-x7k2p"}, "kubernetes:exp1"),
        ({**IN_CLUSTER, "HOSTNAME": "exp1-train"}, "kubernetes:exp1-train"),
        ({"HOSTNAME": "laptop"}, ""),
        ({"TORCHELASTIC_RUN_ID": "none"}, ""),
        ({"TORCHELASTIC_RUN_ID": "job7"}, "torchrun:job7"),
        ({"LASTCALL_REGISTRY": "/tmp/lastcall-run-abc"}, "lastcall run:lastcall-run-abc"),
        ({"SLURM_JOB_ID": "4711", "TORCHELASTIC_RUN_ID": "job7"}, "slurm:4711"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_job_has_the_name_that_its_platform_gives_it(environ: dict[str, str], name: str) -> None:
    assert job_identity.identity(environ) == name
