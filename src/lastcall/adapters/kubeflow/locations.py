"""Where checkpoints go: `output_dir` as users write it, and what it means on a cluster and on this
machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lastcall import parsing

MOUNT = "/mnt/kubeflow-checkpoints"
VOLUME = "checkpoint-storage"
KEYS = "/mnt/kubeflow-connection"
KEYS_VOLUME = "checkpoint-connection"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


@dataclass(frozen=True)
class Location:
    """A folder, in a claim if there is one. Or a bucket: the checkpoints are uploaded there, and the folder
    that they are first saved in may be lost with the pod."""

    path: str
    claim: str | None = None
    mirror: str | None = None

    def in_pod(self) -> str:
        if self.mirror is not None:
            return MOUNT
        return str(PurePosixPath(MOUNT, self.path)) if self.claim is not None else self.path

    def here(self) -> str:
        """On this machine a claim is the folder of its name in the home directory: where a workbench of
        OpenShift AI mounts it."""
        if self.mirror is not None:
            return str(Path.home() / ".cache" / "lastcall" / "mirrored" / self.path)
        if self.claim is None:
            return self.path
        folder = Path.home() / self.claim
        if not folder.is_dir():
            raise ValueError(
                f"output_dir='pvc://{self.claim}/{self.path}': without a cluster the claim {self.claim!r} is "
                "the "
                f"folder {folder}, which does not exist. Create it: mkdir -p {folder}; or use a path as "
                "output_dir"
            )
        return str(folder / self.path)


def parse(output_dir: str) -> Location:
    match = _SCHEME.fullmatch(output_dir)
    if match is None:
        # it would be in the working directory of the processes, and lost with it
        if not output_dir.startswith("/"):
            raise ValueError(
                f"output_dir={output_dir!r} is not an absolute path. Use one, or a claim: "
                "output_dir='pvc://shared/checkpoints/exp1'"
            )
        if "\0" in output_dir or not output_dir.strip("/"):
            raise ValueError(
                f"output_dir={output_dir!r} is not the path of a folder for checkpoints. For "
                "example: '/mnt/data/exp1'"
            )
        return Location(output_dir)
    scheme, rest = match[1].lower(), match[2]
    if scheme == "s3":
        return _bucket(output_dir, rest)
    if scheme != "pvc":
        raise ValueError(
            f"output_dir={output_dir!r}: lastcall does not save to {scheme}://. Use a claim, "
            "output_dir='pvc://shared/checkpoints/exp1', a bucket, output_dir='s3://bucket/exp1', or the "
            "path of a volume "
            "that is mounted in the pods"
        )
    claim, _, path = rest.partition("/")
    if not parsing.is_object_name(claim):
        raise ValueError(
            f"output_dir={output_dir!r}: {claim!r} is not the name of a claim. Write it as pvc://NAME/PATH"
        )
    if ".." in PurePosixPath(path).parts or "\0" in path:
        raise ValueError(
            f"output_dir={output_dir!r}: the path points outside the claim. Write it as pvc://NAME/PATH"
        )
    return Location(path.strip("/"), claim)


def _bucket(output_dir: str, rest: str) -> Location:
    try:
        mirror = parsing.place(f"s3://{rest}")
    except ValueError as error:
        raise ValueError(f"output_dir={output_dir!r} {error}. Write it as s3://BUCKET/PREFIX") from None
    return Location(rest.strip("/"), mirror=mirror)
