"""Kubernetes 1.20.2, built once from Debian's own source package, with the servers that it needs, in a cache
outside the repository.

    python tests/helpers/kube/build.py

Debian 12 carries the whole source of this version, its vendor tree included; later packages of Debian are
stripped to kubectl. It takes some eleven minutes of one core; what is there is kept in $LASTCALL_KUBE_CACHE
(~/.cache/lastcall/kube-1.20.2). A build that was broken off goes on.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # as pytest does
from helpers.kube.debian import Debian, Missing, run

VERSION = "1.20.2"
PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl")
_SERVERS = ("etcd-server", "containerd", "runc", "containernetworking-plugins")
_REFLECT = "golang-github-modern-go-reflect2-dev"
_GO = ("golang-1.19-go", "golang-1.19-src", _REFLECT)
_IMAGE = (
    "busybox-static",
    "python3.11",
    "python3.11-minimal",
    "libpython3.11-minimal",
    "libpython3.11-stdlib",
    "libc6",
    "libgcc-s1",
    "zlib1g",
    "libexpat1",
    "libssl3",
    "libffi8",
    "libbz2-1.0",
    "liblzma5",
    "libuuid1",
    "libcrypt1",
)
_PACKAGE = "k8s.io/kubernetes"
_OPENAPI = "pkg/generated/openapi"
# the clouds' own volumes and load balancers, and Docker: half of what would be compiled
_WITHOUT = "providerless,dockerless"


@dataclass(frozen=True)
class Tools:
    """What a cluster is made of."""

    programs: Path  # Kubernetes' own
    servers: Path  # etcd, containerd, runc and the network plugins, below the root of a file system
    image: Path  # Debian's Python with what it needs, and a busybox, below the root of a file system

    def path(self) -> str:
        return f"{self.programs}:{self.servers}/usr/bin:{self.servers}/usr/sbin:{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"  # noqa: E501


def ensure() -> Tools:
    """The tools, which are built if they are not there. Two that ask at once build once."""
    cache = Path(
        os.environ.get("LASTCALL_KUBE_CACHE") or Path.home() / ".cache" / "lastcall" / f"kube-{VERSION}"
    )
    tools = Tools(cache / "bin", cache / "servers", cache / "image")
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not all(folder.is_dir() for folder in (tools.programs, tools.servers, tools.image)):
            _build(cache, tools)
    return tools


def _build(cache: Path, tools: Tools) -> None:
    if os.geteuid() != 0:
        raise Missing("a cluster needs root: containers, network namespaces and mounts")
    work = cache / "build"
    debian = Debian(work / "apt")
    with _step("apt: package lists"):
        debian.update()
    for target, names in ((tools.servers, _SERVERS), (tools.image, _IMAGE), (work / "go", _GO)):
        if not target.is_dir():
            with _step(f"apt: {' '.join(names)}"), _whole(target) as partial:
                debian.unpack(partial, *names)
    if not tools.programs.is_dir():
        source = _source(debian, work)
        _generate(work, source)
        with _whole(tools.programs) as partial:
            _compile(work, source, partial)
    shutil.rmtree(work)


def _source(debian: Debian, work: Path) -> Path:
    source = work / "path" / "src" / _PACKAGE
    if not source.is_dir():
        with _step(f"apt: the source of Kubernetes {VERSION}"):
            archive = debian.source("kubernetes", VERSION, work / "source")
        with _step("unpack"), _whole(source) as partial:
            partial.mkdir(parents=True)
            run(["tar", "-xf", str(archive), "-C", str(partial), "--strip-components=1"])
            _repair(work, partial)
    return source


def _repair(work: Path, source: Path) -> None:
    """Its own reflect2 reaches into maps as Go had them before 1.18: an API server with it dies of the first
    custom resource."""
    path = "github.com/modern-go/reflect2"
    shutil.rmtree(source / "vendor" / path)
    shutil.copytree(work / "go" / "usr" / "share" / "gocode" / "src" / path, source / "vendor" / path)


def _generate(work: Path, source: Path) -> None:
    """kube-apiserver's OpenAPI, which is generated and in no archive."""
    target = source / _OPENAPI / "zz_generated.openapi.go"
    if target.exists():
        return
    generator = work / "openapi-gen"
    with _step("go build openapi-gen"):
        _go(work, source, "build", "-o", str(generator), "./vendor/k8s.io/kube-openapi/cmd/openapi-gen")
    with _step("openapi-gen"):
        packages = ",".join(_described(source))
        words = [
            "-O",
            "zz_generated.openapi",
            "-h",
            "hack/boilerplate/boilerplate.generatego.txt",
            "-r",
            str(work / "violations"),
        ]
        _shell(work, source, str(generator), "-i", packages, "-p", f"{_PACKAGE}/{_OPENAPI}", *words)


def _described(source: Path) -> list[str]:
    """The packages that are in the OpenAPI. Those of staging are imported from vendor, where links to them
    are."""
    found = run(
        ["grep", "-rl", "--include=*.go", r"+k8s:openapi-gen=", "cmd", "pkg", "plugin", "staging/src"], source
    )
    others = re.compile(r"/_|/testdata/|/examples/|_test\.go$|/sample-|/code-generator/")
    folders = {os.path.dirname(path) for path in found.split() if not others.search(path)}
    return [f"{_PACKAGE}/{folder.replace('staging/src/', 'vendor/', 1)}" for folder in sorted(folders)]


def _compile(work: Path, source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    values = {"gitVersion": f"v{VERSION}", "gitMajor": "1", "gitMinor": "20", "gitTreeState": "clean"}
    places = [
        f"{_PACKAGE}/vendor/k8s.io/{name}" for name in ("component-base/version", "client-go/pkg/version")
    ]
    said = [f"-X {place}.{name}={value}" for place in places for name, value in values.items()]
    for name in PROGRAMS:
        with _step(f"go build {name}"):
            _go(
                work,
                source,
                "build",
                "-tags",
                _WITHOUT,
                "-ldflags",
                " ".join(["-s", "-w", *said]),
                "-o",
                f"{target}/",
                f"./cmd/{name}",
            )


def _go(work: Path, source: Path, *words: str) -> None:
    _shell(work, source, str(work / "go" / "usr" / "lib" / "go-1.19" / "bin" / "go"), *words)


def _shell(work: Path, source: Path, *words: str) -> None:
    go = work / "go" / "usr" / "lib" / "go-1.19"
    settings = {
        "GOROOT": str(go),
        "GOPATH": str(work / "path"),
        "GOCACHE": str(work / "objects"),
        "GOFLAGS": "",
    }
    settings |= {"GO111MODULE": "off", "CGO_ENABLED": "0", "PATH": f"{go / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        words, cwd=source, env=os.environ | settings, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Missing(
            f"{Path(words[0]).name} {words[1]} ended with "
            f"{done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
        )


@contextlib.contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """A folder that appears under its name when it is whole."""
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    yield partial
    partial.rename(target)


@contextlib.contextmanager
def _step(what: str) -> Iterator[None]:
    began = time.monotonic()
    print(f"kubernetes: {what} ...", file=sys.stderr, flush=True)
    yield
    print(f"kubernetes: {what}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        ensure()
    except Missing as error:
        sys.exit(f"kubernetes: {error}")
