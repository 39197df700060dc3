"""The webhook as a process of this machine, registered with a cluster: `lastcall kube webhook`, by URL."""

from __future__ import annotations

import subprocess
import sys

from helpers.kube import images as kube_images
from helpers.kube.api import Api, Refused, until
from helpers.kube.cluster import Cluster
from helpers.processes import forkserver as nursery
from helpers.servers.ports import free_port
from lastcall.kube.install import manifests
from lastcall.kube.webhook import certificates


class Webhook:
    """Leaving the block ends it. Its registration stays: without it, admission must go on."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._port = free_port()
        self._authority = certificates.authority()
        self._process: subprocess.Popen[bytes] | None = None
        (cluster.folder / "webhook.crt").write_bytes(self._authority.certificate)
        (cluster.folder / "webhook.key").write_bytes(self._authority.key)
        self.start()
        cluster.api.create(self.configuration())
        until(self._asked, lambda: f"the API server to ask the webhook\n{self.log()}")

    def __enter__(self) -> Webhook:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def configuration(self) -> dict[str, object]:
        installation = manifests.Installation(kube_images.LASTCALL, authority=self._authority)
        return manifests.configuration(installation, f"https://{self._cluster.outside}:{self._port}/mutate")

    def start(self) -> None:
        folder = self._cluster.folder
        words = [
            "--host",
            self._cluster.outside,
            "--port",
            self._port,
            "--name",
            self._cluster.outside,
            "--image",
            kube_images.LASTCALL,
            "--ca-cert",
            folder / "webhook.crt",
            "--ca-key",
            folder / "webhook.key",
            "--api-server",
            self._cluster.url,
            "--api-token",
            self._cluster.token_file,
            "--api-ca",
            self._cluster.authority,
        ]
        with (folder / "webhook.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lastcall", "kube", "webhook", *map(str, words)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=nursery.environment(),
            )  # fmt: skip
        until(self._ready, lambda: f"the webhook\n{self.log()}")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def log(self) -> str:
        return (self._cluster.folder / "webhook.log").read_text()

    def _ready(self) -> bool:
        assert self._process is not None and self._process.poll() is None, self.log()
        try:
            Api(
                f"https://{self._cluster.outside}:{self._port}", self._cluster.folder / "webhook.crt", ""
            ).ask("GET", "/readyz")
        except (OSError, Refused):
            return False
        return True

    def _asked(self) -> bool:
        """Some time after it was registered."""
        container = {"name": "it", "image": kube_images.PAUSE}
        metadata = {"name": "asked", "annotations": {"lastcall.dev/enabled": "true"}}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}
        return bool(self._cluster.api.create(pod, dry_run=True)["spec"].get("initContainers"))
