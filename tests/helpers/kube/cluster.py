"""A whole Kubernetes on a machine within this one (see machine.py): etcd, API server, controller
manager, scheduler, containerd, kubelet.

The API server listens at the first address of the services' network, port 443, which is where pods look for
it: no kube-proxy is needed. It reaches webhooks that run in pods by the addresses of these pods. There is no
DNS.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helpers.kube import images as kube_images
from helpers.kube.api import Api
from helpers.kube.build import Tools
from helpers.kube.machine import Machine

NODE = "node"
_TOKEN = "administrator"  # of system:masters

_CONTAINERD = """
version = 2
root = "{folder}/containerd"
state = "/run/containerd"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true  # a machine that may not lower them: runc dies with "can't get final child's PID from pipe: EOF"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{servers}/usr/lib/cni"
    conf_dir = "{folder}/cni"
"""  # noqa: E501


class Cluster:
    """Leaving the block ends all of it, as does the end of the process that made it."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._machine = Machine(tools.path())
        self.folder = self._machine.folder
        self.outside = self._machine.outside  # the address of this machine, as the cluster sees it
        self.config, self.token_file = self.folder / "kubeconfig", self.folder / "token"
        self.authority = self.folder / "api" / "apiserver.crt"
        try:
            self._start()
        except BaseException:
            self._machine.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self._machine.close()

    def kubectl(self, *words: object, given: str | None = None) -> subprocess.CompletedProcess[str]:
        return self._typed([self._tools.programs / "kubectl", *words], given)

    def lastcall(self, *words: object) -> subprocess.CompletedProcess[str]:
        """`lastcall kube`."""
        return self._typed([sys.executable, "-m", "lastcall", "kube", *words])

    def _typed(self, words: Sequence[object], given: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*map(str, words)],
            input=given, capture_output=True, text=True, timeout=300, check=False, env=self.environment(),
        )  # fmt: skip

    def environment(self) -> dict[str, str]:
        """For programs that speak to the cluster as a person does."""
        return {**os.environ, "KUBECONFIG": str(self.config), "PATH": self._tools.path()}

    def log(self, name: str) -> str:
        return self._machine.log(name)

    def _start(self) -> None:
        self._start_etcd()
        self._start_api()
        self._start_controllers()
        self._start_node()
        self._machine.expect(self._node_ready, "a node that is ready")
        self._machine.expect(self._account_ready, "a service account, without which no pod is admitted")

    def _start_etcd(self) -> None:
        self._machine.start("etcd", f"--data-dir={self.folder}/etcd", "--logger=zap", "--log-level=error")

    def _start_api(self) -> None:
        address, key = f"{self._machine.network}.0.1", self.folder / "accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
        (self.folder / "tokens").write_text(f"{_TOKEN},administrator,1,system:masters\n")
        self.token_file.write_text(_TOKEN)
        self._machine.start(
            "kube-apiserver",
            "--etcd-servers=http://127.0.0.1:2379",
            f"--cert-dir={self.folder}/api",
            f"--bind-address={address}",
            f"--advertise-address={address}",
            "--secure-port=443",
            f"--service-cluster-ip-range={self._machine.network}.0.0/24",
            "--enable-aggregator-routing",
            f"--token-auth-file={self.folder}/tokens",
            "--authorization-mode=RBAC",
            "--anonymous-auth=false",
            "--allow-privileged",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--kubelet-preferred-address-types=InternalIP",
        )
        self._machine.expect(self.authority.exists, "the API server's certificate")
        self.url = f"https://{address}"
        self.api = self.as_user(_TOKEN)
        self._machine.expect(self.api.answers, "an answer of the API server")
        self._configure()

    def as_user(self, token: str) -> Api:
        return Api(self.url, self.authority, token)

    def _configure(self) -> None:
        cluster = {"server": self.url, "certificate-authority": str(self.authority)}
        _write(
            self.config,
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "it",
                "clusters": [{"name": "it", "cluster": cluster}],
                "users": [{"name": "it", "user": {"token": _TOKEN}}],
                "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
            },
        )

    def _start_controllers(self) -> None:
        common = [f"--kubeconfig={self.config}", "--leader-elect=false", "--port=0"]
        key = f"--service-account-private-key-file={self.folder}/accounts.key"
        self._machine.start("kube-controller-manager", *common, key, f"--root-ca-file={self.authority}")
        self._machine.start("kube-scheduler", *common)

    def _start_node(self) -> None:
        config = _CONTAINERD.format(folder=self.folder, servers=self._tools.servers, pause=kube_images.PAUSE)
        (self.folder / "containerd.toml").write_text(config)
        self._write_network()
        self._machine.start("containerd", f"--config={self.folder}/containerd.toml")
        self._machine.expect(self._runtime_answers, "an answer of containerd")
        for archive in kube_images.write(self.folder / "images", self._tools.image):
            self._machine.run("ctr", "--namespace=k8s.io", "images", "import", archive)
            archive.unlink()
        _write(self.folder / "kubelet.json", _kubelet(self.folder))
        self._machine.start(
            "kubelet",
            f"--config={self.folder}/kubelet.json",
            f"--kubeconfig={self.config}",
            f"--root-dir={self.folder}/kubelet",
            "--container-runtime=remote",
            "--container-runtime-endpoint=unix:///run/containerd/containerd.sock",
            f"--hostname-override={NODE}",
            f"--node-ip={self._machine.inside}",
            f"--cert-dir={self.folder}/kubelet-certificates",
        )

    def _write_network(self) -> None:
        (self.folder / "cni").mkdir()
        ranges = [[{"subnet": f"{self._machine.network}.1.0/24"}]]
        bridge = {"type": "bridge", "bridge": "pods", "isGateway": True}
        bridge["ipam"] = {"type": "host-local", "ranges": ranges, "routes": [{"dst": "0.0.0.0/0"}]}
        _write(
            self.folder / "cni" / "pods.conflist",
            {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge, {"type": "loopback"}]},
        )

    def _runtime_answers(self) -> bool:
        try:
            self._machine.run("ctr", "--connect-timeout=2s", "version")
        except AssertionError:
            return False
        return True

    def _account_ready(self) -> bool:
        return any(
            it.get("secrets")
            for it in self.api.ask("GET", "/api/v1/namespaces/default/serviceaccounts")["items"]
        )

    def _node_ready(self) -> bool:
        nodes = self.api.ask("GET", "/api/v1/nodes")["items"]
        return any(
            it["type"] == "Ready" and it["status"] == "True"
            for node in nodes
            for it in node["status"].get("conditions", [])
        )


def _kubelet(folder: Path) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        # nobody but this machine reaches it
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": False,
        "enforceNodeAllocatable": [],
        "failSwapOn": False,
        "evictionHard": {
            "memory.available": "50Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
            "nodefs.inodesFree": "1%",
        },
        "makeIPTablesUtilChains": False,
        "oomScoreAdj": 0,
        "volumePluginDir": str(folder / "plugins"),
        "imageGCHighThresholdPercent": 100,
    }


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))
