"""Where checkpoints go: `output_dir` as people write it, and what it comes to on a cluster and on this machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MOUNT = "/mnt/kubeflow-checkpoints"
VOLUME = "checkpoint-storage"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")  # of an object in Kubernetes
_LONGEST_NAME = 253


@dataclass(frozen=True)
class Place:
    """A folder; of a claim, if there is one, else as it is."""

    path: str
    claim: str | None = None

    def in_pod(self) -> str:
        return str(PurePosixPath(MOUNT, self.path)) if self.claim is not None else self.path

    def here(self) -> str:
        """On this machine a claim is the folder of its name in the home directory: where a workbench of OpenShift AI mounts it."""
        if self.claim is None:
            return self.path
        folder = Path.home() / self.claim
        if not folder.is_dir():
            raise ValueError(
                f"output_dir='pvc://{self.claim}/{self.path}': without a cluster the claim {self.claim!r} is the folder {folder}, "
                f"which is not there. Make it: mkdir -p {folder}; or give a path as output_dir"
            )
        return str(folder / self.path)


def parse(output_dir: str) -> Place:
    match = _SCHEME.fullmatch(output_dir)
    if match is None:
        if not output_dir.startswith("/"):  # it would be in the folder that the processes start in, and go with it
            raise ValueError(
                f"output_dir={output_dir!r} is not an absolute path. Give one, or a claim: output_dir='pvc://shared/checkpoints/exp1'"
            )
        return Place(output_dir)
    scheme, rest = match[1].lower(), match[2]
    if scheme != "pvc":
        raise ValueError(
            f"output_dir={output_dir!r}: lastcall saves to file systems, and {scheme}:// is none. Give a claim, "
            "output_dir='pvc://shared/checkpoints/exp1', or the path of a volume that is mounted in the pods"
        )
    claim, _, path = rest.partition("/")
    if not _NAME.fullmatch(claim) or len(claim) > _LONGEST_NAME:
        raise ValueError(f"output_dir={output_dir!r}: {claim!r} is not the name of a claim. Write it as pvc://NAME/PATH")
    if ".." in PurePosixPath(path).parts or "\0" in path:
        raise ValueError(f"output_dir={output_dir!r}: the path leads out of the claim. Write it as pvc://NAME/PATH")
    return Place(path.strip("/"), claim)
