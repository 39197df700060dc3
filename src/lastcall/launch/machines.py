"""Whether a command may have ranks on other machines: only then does the launcher's store listen to more than
this one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_OPTION = re.compile(r"--?(?:nnodes|nnode|num[-_]machines|num[-_]nodes|hostfile|nodes)(?:=(.*))?")
# these start processes on other machines
_ELSEWHERE = ("srun", "mpirun", "mpiexec", "deepspeed", "pdsh", "ssh")
_COUNTS = ("PET_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "NNODES", "NUM_NODES")


def several(command: Sequence[str], environ: Mapping[str, str]) -> bool:
    """True where anything indicates it: a script may start torchrun itself, so the platform's variables count
    as well."""
    for word, after in zip(command, [*command[1:], ""], strict=True):
        found = _OPTION.fullmatch(word)
        if found and (found[1] if found[1] is not None else after).strip() != "1":
            return True
    if any(word.rpartition("/")[2] in _ELSEWHERE for word in command[:1]):
        return True
    if any(environ.get(name, "1").strip() not in ("", "1") for name in _COUNTS):
        return True
    address = environ.get("MASTER_ADDR", environ.get("PET_MASTER_ADDR", "")).strip()
    return address not in ("", "localhost", "127.0.0.1", "::1")
