"""Ray Train: versions, the time that a node has before it goes, how often Ray polls, and whether a
resubmitted run resumes.

Ray itself is not imported, and no cluster is contacted: these checks read the environment of a pod or a
driver, and the script's source.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lastcall import installing, settings
from lastcall.adapters.ray.driver import run_name, versions
from lastcall.doctor import finding
from lastcall.doctor.checks import storage
from lastcall.doctor.checks.grace import KUBERNETES, Expected
from lastcall.doctor.finding import Case, Finding
from lastcall.launch.shell.commandline import Launch

_SIGNS = (
    "RAY_TRAIN_JIT_CHECKPOINT_ENABLED",
    "RAY_ADDRESS",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
    "RAY_CLUSTER_NAME",
)
_DRAIN, _DRAIN_SECONDS = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", 30.0
# Ray's default is 5; lastcall sets 1 unless it is set
_LOOK, _LOOK_SECONDS = "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", 1.0
_POLL, _POLL_SECONDS = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", 2.0
_WATCHER = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"
# the first version whose `ray start` drains its node when it gets SIGTERM; older ones kill at once
_DRAINS = (2, 57)
_OFF = ("0", "false", "no", "off")


@dataclass(frozen=True)
class Configured:
    """The arguments of the script's RunConfig(...) calls; None for one that is missing or cannot be read."""

    name: bool = False
    storage_path: ast.expr | None = None


def concerns(environ: Mapping[str, str], launch: Launch) -> bool:
    return any(environ.get(name, "").strip() for name in _SIGNS) or read(launch) is not None


def check(
    case: Case, launch: Launch, jit: settings.JITCheckpointConfig, expected: Expected, version: str | None
) -> Iterator[Finding]:
    """No findings if nothing here uses Ray."""
    if not concerns(case.environ, launch):
        return
    yield check_version(version)
    if version is not None:
        yield check_drain(case, version)
        yield check_polls(case.environ, jit, expected)
    configured = read(launch)
    if configured is not None:
        yield check_name(configured, jit, case.environ)
        yield check_storage(configured)


def check_version(version: str | None) -> Finding:
    if version is None:
        return finding.risk(
            "ray",
            "Ray is used, but not installed here: no script can be protected",
            installing.extra("ray"),
            version=None,
        )
    remark = versions.remark(version)
    if remark is None:
        return finding.ok("ray", f"Ray {version} is a version that lastcall was tested with", version=version)
    level = finding.risk if versions.parse(version) < versions.OLDEST else finding.warning
    newest = ".".join(map(str, versions.NEWEST))
    return level("ray", remark, f"pip install 'ray[train]=={newest}.*'", version=version)


def check_drain(case: Case, version: str) -> Finding:
    """A pod's SIGTERM goes to `ray start`, which drains its node for so long and then ends it. Train workers
    are not signalled."""
    limit = KUBERNETES if case.termination_grace is None else case.termination_grace
    whose = (
        "the platform"
        if case.termination_grace is not None
        else "Kubernetes (assumed; pass it to the doctor: --termination-grace)"
    )
    drain = _number(case.environ, _DRAIN, _DRAIN_SECONDS)
    facts = {"drain": drain, "limit": limit, "told": case.termination_grace is not None}
    enough = max(int(limit), 120)
    remedy = (
        f"in the pod: terminationGracePeriodSeconds: {enough}, and in its environment {_DRAIN}={enough - 10}"
    )
    if versions.parse(version) < _DRAINS:
        says = (
            f"`ray start` of Ray {version} ends its node at once when its pod is deleted: no train worker is "
            "notified"
        )
        return finding.risk(
            "ray-drain", says, f"pip install 'ray[train]>={'.'.join(map(str, _DRAINS))}'", **facts
        )
    if drain <= 0:
        says = (
            f"{_DRAIN}={drain:g}: `ray start` ends its node at once when its pod is deleted, and no train "
            "worker is notified"
        )
        return finding.risk("ray-drain", says, remedy, **facts)
    if drain >= limit:
        race = "race" if drain == limit else "do not fit"
        says = (
            f"Ray drains a node for {finding.seconds(drain)}, and {whose} kills it after "
            f"{finding.seconds(limit)}: the two {race}"
        )
        level = finding.risk if facts["told"] and drain > limit else finding.warning
        return level("ray-drain", says, remedy, **facts)
    return finding.ok(
        "ray-drain",
        f"Ray drains a node for {finding.seconds(drain)} of the {finding.seconds(limit)} of {whose}",
        **facts,
    )


def check_polls(environ: Mapping[str, str], jit: settings.JITCheckpointConfig, expected: Expected) -> Finding:
    """A drain is seen at the next poll; a report is committed when the controller has polled every rank: two
    polls at most."""
    look, poll = _number(environ, _LOOK, _LOOK_SECONDS), _number(environ, _POLL, _POLL_SECONDS)
    drain = _number(environ, _DRAIN, _DRAIN_SECONDS)
    needs = look + jit.kill_wait + (expected.seconds or 0.0) + 2 * poll
    facts = {"look": look, "poll": poll, "needs": needs, "drain": drain}
    sum_ = (
        f"a drain is seen within {finding.seconds(look)}, the kill wait is {finding.seconds(jit.kill_wait)}, "
        "a save takes "
        f"{'an unknown time' if expected.seconds is None else finding.seconds(expected.seconds)}, and its "
        "commit up to two polls of "
        f"{finding.seconds(poll)}"
    )
    if environ.get(_WATCHER, "").strip().lower() in _OFF:
        return finding.risk(
            "ray-polls",
            f"{_WATCHER} is off: no train worker is notified of a drain",
            f"unset {_WATCHER}",
            **facts,
        )
    if 0 < drain < needs:
        remedy = (
            f"export {_LOOK}=1 {_POLL}=0.5 LASTCALL_KILL_WAIT_SECONDS=0, or give the pods more time: "
            f"{_DRAIN}={int(needs) + 10}"
        )
        return finding.risk(
            "ray-polls", f"{sum_}: more than the drain of {finding.seconds(drain)}", remedy, **facts
        )
    return finding.ok("ray-polls", sum_, **facts)


def check_name(
    configured: Configured, jit: settings.JITCheckpointConfig, environ: Mapping[str, str]
) -> Finding:
    job = run_name.of_job(environ)
    if configured.name:
        return finding.ok("ray-name", "the script gives its run a name")
    if jit.run_id is not None or job is not None:
        return finding.ok("ray-name", f"the run is called {jit.run_id or job}: resubmitted, it resumes")
    return finding.warning(
        "ray-name",
        "RunConfig has no name, so Ray derives one from the date: a resubmitted job starts from scratch",
        "export LASTCALL_RUN_ID=exp1; or in the script: RunConfig(name='exp1', ...)",
    )


def check_storage(configured: Configured) -> Finding:
    place = configured.storage_path
    if place is None:
        return finding.risk(
            "ray-storage",
            "RunConfig has no storage_path: checkpoints go to ~/ray_results, which is lost with the pod and "
            "invisible to other nodes",
            "RunConfig(storage_path='/mnt/shared', ...), or an object store: "
            "RunConfig(storage_path='s3://bucket/runs', ...)",
        )
    if not isinstance(place, ast.Constant) or not isinstance(place.value, str):
        return finding.ok(
            "ray-storage", f"storage_path={ast.unparse(place)}, which is only known when the script runs"
        )
    if "://" in place.value:
        return finding.ok("ray-storage", f"checkpoints go to {place.value}", path=place.value)
    path = Path(place.value).expanduser()
    found = storage.check_place(path, storage.mount_of(storage.nearest(path)))
    return Finding(
        "ray-storage",
        found.level,
        found.says,
        found.remedy and "RunConfig(storage_path='/mnt/shared', ...)",
        found.facts,
    )


def read(launch: Launch) -> Configured | None:
    """The RunConfig of a script with a Ray trainer; None if the command is no such script, or cannot be
    read."""
    script = next((word for word in launch.words if word.endswith(".py")), None)
    try:
        tree = ast.parse(Path(script).read_text(errors="replace")) if script is not None else None
    except (OSError, SyntaxError, ValueError):
        return None
    if tree is None or not any(_imports_train(node) for node in ast.walk(tree)):
        return None
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("RunConfig")
    ]
    words = {word.arg: word.value for call in calls for word in call.keywords}
    if None in words:  # RunConfig(**options): whatever they are
        return Configured(True, words[None])
    named = words.get("name")
    return Configured(
        named is not None and not (isinstance(named, ast.Constant) and named.value is None),
        words.get("storage_path"),
    )


def _imports_train(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(name.name.startswith("ray.train") for name in node.names)
    if isinstance(node, ast.ImportFrom) and node.module is not None:
        return node.module.startswith("ray.train") or (
            node.module == "ray" and any(name.name == "train" for name in node.names)
        )
    return False


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    """As Ray reads it; Ray itself reports what is not a number."""
    try:
        return float(environ.get(name, "") or default)
    except ValueError:
        return default
