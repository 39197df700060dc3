"""A kubectl that is not one: it keeps a cluster in a folder, and does to it what a real one would have the
API server do."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from typing import Any

FAKE = """#!{python}
import json, os, sys, time
from pathlib import Path

home = Path({home!r})
words = [word for word in sys.argv[1:] if not word.startswith(("--context", "--namespace"))]
with open(home / "calls", "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + chr(10))


def fail(text):
    sys.stderr.write(text + chr(10))
    sys.exit(1)


def load(path):
    return json.loads(path.read_text())


def obj(resource, name):
    if (home / f"forbidden-{{resource}}").exists():
        fail(f'Error from server (Forbidden): {{resource}} "{{name}}" is forbidden: User "u" cannot get resource')
    if not (home / resource).is_dir():
        fail(f"error: the server doesn't have a resource type \\"{{resource}}\\"")
    path = home / resource / f"{{name}}.json"
    if name and not path.exists():
        fail(f'Error from server (NotFound): {{resource}} "{{name}}" not found')
    return path


def merge(body, change):
    for key, value in change.items():
        if value is None:
            body.pop(key, None)
        elif isinstance(value, dict):
            merge(body.setdefault(key, {{}}), value)
        else:
            body[key] = value


def ended():
    jobs = [load(path) for folder in home.iterdir() if folder.is_dir() and folder.name != "pods" for path in folder.glob("*.json")]
    return any(job["spec"].get("suspend") or job["spec"].get("parallelism") == 0 or job["spec"].get("active") is False for job in jobs)


def event(kind, body):
    print(json.dumps({{"type": kind, "object": body}}), flush=True)


verb, rest = words[0], words[1:]
if verb == "get" and rest[1] == "-l":
    obj(rest[0], "")
    label, value = rest[2].split("=")
    found = [load(path) for path in sorted((home / rest[0]).glob("*.json"))]
    print(json.dumps({{"items": [one for one in found if one["metadata"]["labels"].get(label) == value]}}))
elif verb == "get" and "--watch" in rest:
    path = obj(rest[0], rest[1])
    event("ADDED", load(path))
    for _ in range(6000):
        if ended():
            break
        time.sleep(0.01)
    pod, words = load(path), (home / "messages" / rest[1]).read_text()
    pod["status"]["containerStatuses"][1]["state"] = {{"terminated": {{"exitCode": 75, **({{"message": words}} if words else {{}})}}}}
    event("MODIFIED", pod)
    path.unlink()
    event("DELETED", pod)
elif verb == "get":
    print(obj(rest[0], rest[1]).read_text())
elif verb == "patch":
    path = obj(rest[0], rest[1])
    body, change = load(path), json.loads(rest[rest.index("-p") + 1])
    if (home / "old").exists() and rest[0] == "jobs.batch":
        change.get("spec", {{}}).pop("suspend", None)
    merge(body, change)
    path.with_suffix(".tmp").write_text(json.dumps(body))
    os.replace(path.with_suffix(".tmp"), path)  # others read it at this very moment
    print(path.read_text())
elif verb == "exec":
    if (home / "no-exec").exists():
        fail("Error from server (Forbidden): pods is forbidden: cannot create resource pods/exec")
    os.execvp("sh", rest[rest.index("--") + 1 :])
"""  # noqa: E501


def message(state: str, path: str = "", exact: bool = True, because: str | None = None) -> str:
    """What a run leaves in a pod's status: see core/progress/exit_message.py."""
    checkpoint = {"path": path, "step": 12, "kind": "jit", "exact": exact, "at": 1.0} if path else None
    facts = {
        "state": state,
        "incarnation": 1,
        "checkpoint": checkpoint,
        "notice": "SIGTERM",
        "because": because,
    }
    return json.dumps({"progressPercentage": 12, **facts})


class Cluster:
    def __init__(self, home: Path) -> None:
        self.home = home
        self.kubectl = home / "kubectl"
        for folder in ("pods", "jobs.batch", "messages"):
            (home / folder).mkdir(parents=True)
        self.kubectl.write_text(FAKE.format(python=sys.executable, home=str(home)))
        self.kubectl.chmod(self.kubectl.stat().st_mode | stat.S_IXUSR)

    def add(self, resource: str, name: str, **more: Any) -> None:
        body = {"metadata": {"name": name, "namespace": "team"}, "spec": {"parallelism": 2}, "status": {}}
        (self.home / resource).mkdir(exist_ok=True)
        (self.home / resource / f"{name}.json").write_text(json.dumps({**body, **more}))

    def get(self, resource: str, name: str) -> dict[str, Any]:
        body: dict[str, Any] = json.loads((self.home / resource / f"{name}.json").read_text())
        return body

    def pod(
        self, name: str, label: str, phase: str = "Running", says: str = "", *, leaving: bool = False
    ) -> None:
        """`says`: the termination message of its container, once the job is suspended."""
        key, value = label.split("=")
        containers = [
            {"name": "sidecar"},
            {"name": "train", "env": [{"name": "LASTCALL_ENABLED", "value": "1"}]},
        ]
        body: dict[str, dict[str, Any]] = {
            "metadata": {"name": name, "labels": {key: value}},
            "spec": {"containers": containers, "nodeName": "node-1"},
            "status": {
                "phase": phase,
                "containerStatuses": [{"name": "sidecar"}, {"name": "train", "restartCount": 1}],
            },
        }
        if leaving:
            body["metadata"]["deletionTimestamp"] = "2026-11-16T00:00:00Z"
        (self.home / "pods" / f"{name}.json").write_text(json.dumps(body))
        (self.home / "messages" / name).write_text(says)

    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.home / "calls").read_text().splitlines()]
