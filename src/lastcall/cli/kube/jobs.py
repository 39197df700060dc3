"""`lastcall kube status|pause|resume`: a job in a cluster, through the user's own kubectl."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from lastcall.cli import output
from lastcall.cli import parser as parsers
from lastcall.kube.jobs import jobs, progress, suspension
from lastcall.kube.jobs.jobs import ClusterJob, JobStatus, PodStatus
from lastcall.kube.jobs.kubectl import Kubectl

_STATUS_EXAMPLES = """examples:
  lastcall kube status trainjob/exp1 -n team
  lastcall kube status exp1 --json
"""
_PAUSE_EXAMPLES = """examples:
  lastcall kube pause trainjob/exp1 -n team
  lastcall kube pause exp1 --timeout 300
"""
_RESUME_EXAMPLES = """examples:
  lastcall kube resume trainjob/exp1 -n team
"""
_IDENTITY = {
    "kind": "TrainJob, RayJob or Job",
    "name": "the name of the job",
    "namespace": "its namespace",
}
_STATUS_JSON = {
    **_IDENTITY,
    "state": "the state of the job: running, paused, queued, ...",
    "pods": "one entry for each pod",
    "pods[].name": "the name of the pod",
    "pods[].phase": "its phase",
    "pods[].leaving": "whether it is being deleted",
    "pods[].node": "its node, or null",
    "pods[].restarts": "how often its container was restarted",
    "pods[].container": "the name of the training container",
    "pods[].because": "why it waits or why it ended, or null",
    "pods[].runs": "the runs in it",
    "pods[].runs[].directory": "the directory of the run in the pod",
    "pods[].runs[].progress": "its progress.json",
    "pods[].runs[].start": "the event of its start, or null",
    "pods[].runs[].last_save": "the event of its last commit, or null",
    "pods[].runs[].notice": "the event of its last notice, or null",
}
_PAUSE_JSON = {
    **_IDENTITY,
    "paused": "true",
    "new": "whether this was the first request",
    "gone": "whether its pods are gone",
    "pods": "how each pod ended",
    "pods[].pod": "the name of the pod",
    "pods[].outcome": "saved, not saved, finished, failed or left; null: unknown",
    "pods[].words": "what it said",
}
_RESUME_JSON = {
    **_IDENTITY,
    "paused": "false",
    "was_paused": "whether it was paused until now",
}
_JOB = "a TrainJob, RayJob or Job: trainjob/NAME, rayjob/NAME, job/NAME, or NAME if unambiguous"


def add(commands: Any) -> None:
    """Add these to the commands of `lastcall kube`."""
    parser = commands.add_parser(
        "status",
        help="show a job: pods, progress, checkpoints",
        description="Shows a job in a cluster: its pods, their progress and saves.",
        epilog=_STATUS_EXAMPLES,
    )
    _add_common(parser, _STATUS_JSON)
    parser.set_defaults(call=status)
    parser = commands.add_parser(
        "pause",
        help="save and stop a job, and keep it stopped",
        description="Suspends a job: its pods get SIGTERM, save and exit. Waits until they are gone and "
        "reports what "
        "they saved. Exits with 1 if they did not save.",
        epilog=_PAUSE_EXAMPLES,
    )
    _add_common(parser, _PAUSE_JSON)
    parser.add_argument("--no-wait", action="store_true", help="do not wait until the pods are gone")
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=parsers.seconds,
        help="stop waiting after this many seconds (the job stays paused)",
    )
    parser.set_defaults(call=pause)
    parser = commands.add_parser(
        "resume",
        help="resume a paused job",
        description="Resumes a paused job from what it saved.",
        epilog=_RESUME_EXAMPLES,
    )
    _add_common(parser, _RESUME_JSON)
    parser.set_defaults(call=resume)


def _add_common(parser: argparse.ArgumentParser, fields: Mapping[str, str]) -> None:
    parser.add_argument("job", metavar="JOB", help=_JOB)
    parser.add_argument(
        "-n", "--namespace", metavar="NAME", help="its namespace (default: that of the context)"
    )
    parser.add_argument(
        "--context", metavar="NAME", help="the kubectl context of the cluster (default: the current context)"
    )
    parser.add_argument(
        "--kubectl", metavar="PATH", default="kubectl", help="the kubectl program to use (default: kubectl)"
    )
    output.add_json(parser, fields)


def status(args: argparse.Namespace) -> int:
    found = jobs.status(_kubectl(args), args.job)
    if args.json:
        output.document(
            {
                **_identity(found.target),
                "state": found.state,
                "pods": [_described(item) for item in found.pods],
            }
        )
        return 0
    output.say(f"{found.target} in {found.target.namespace}: {found.state}", state=found.state)
    for item in found.pods:
        output.say(_pod_line(item), hang="    ")
        for run in item.runs:
            for name, value in _facts(run, time.time()):
                output.pair(name, value, 10, "    ")
    if hint := _hint(found):
        output.say(hint)
    return 0


def pause(args: argparse.Namespace) -> int:
    def tell(line: str) -> None:
        sys.stderr.write(f"{output.printable(line)}\n")
        sys.stderr.flush()

    done = suspension.pause(_kubectl(args), args.job, wait=not args.no_wait, timeout=args.timeout, tell=tell)
    if args.json:
        endings = [
            {"pod": item.pod.name, "outcome": item.outcome, "words": item.words} for item in done.endings
        ]
        output.document(
            {**_identity(done.target), "paused": True, "new": done.new, "gone": done.gone, "pods": endings}
        )
    else:
        output.say(_sentence(done), state="WITHOUT saving" if done.lost else "paused")
    return 1 if done.lost or (done.waited and not done.gone) else 0


def resume(args: argparse.Namespace) -> int:
    target, was_paused = jobs.resume(_kubectl(args), args.job)
    if args.json:
        output.document({**_identity(target), "paused": False, "was_paused": was_paused})
    elif was_paused:
        output.say(f"{target} is resumed. Follow it with: lastcall kube status {target}{_where(target)}")
    else:
        output.say(f"{target} was not paused")
    return 0


def _kubectl(args: argparse.Namespace) -> Kubectl:
    return Kubectl(args.kubectl, args.context, args.namespace)


def _identity(target: ClusterJob) -> dict[str, object]:
    return {"kind": target.kind.title, "name": target.name, "namespace": target.namespace}


def _where(target: ClusterJob) -> str:
    return f" -n {target.namespace}" if target.namespace else ""


def _described(item: PodStatus) -> dict[str, object]:
    pod = item.pod
    return {
        "name": pod.name,
        "phase": pod.phase,
        "leaving": pod.leaving,
        "node": pod.node,
        "restarts": pod.restarts,
        "container": pod.container,
        "because": item.because or None,
        "runs": [
            {
                "directory": run.directory,
                "progress": run.progress,
                "start": run.start,
                "last_save": run.committed,
                "notice": run.notice,
            }
            for run in item.runs
        ],
    }


def _pod_line(item: PodStatus) -> str:
    pod = item.pod
    parts = [pod.phase.lower() if not pod.leaving else "leaving"]
    parts += [f"on {pod.node}"] if pod.node else []
    parts += [output.plural(pod.restarts, "restart")] if pod.restarts else []
    parts += [item.because] if item.because and item.because != pod.phase.lower() else []
    return f"  {output.printable(pod.name)}: {output.printable(', '.join(parts))}"


def _facts(run: progress.PodRun, now: float) -> Iterator[tuple[str, str]]:
    yield "directory", run.directory
    step, total = run.progress.get("step"), run.progress.get("total")
    if isinstance(step, int):
        yield (
            "step",
            f"{step} of {total} ({step / total:.1%})" if isinstance(total, int) and total else str(step),
        )
    metrics = run.progress.get("metrics")
    if isinstance(metrics, dict) and metrics:
        yield "metrics", ", ".join(f"{name} {output.number(value)}" for name, value in metrics.items())
    eta = run.progress.get("eta_seconds")
    if isinstance(eta, int | float):
        yield "time left", output.duration(eta, precise=False)
    if run.start is not None and run.start.get("resumed"):
        yield "resumed", f"from {run.start['resumed']} (incarnation {run.start.get('incarnation')})"
    if run.committed is not None:
        at = run.committed.get("at")
        ago = f", {output.age(at, now)}" if isinstance(at, int | float) else ""
        yield "last save", f"{run.committed.get('path')} ({run.committed.get('save')}{ago})"
    if run.notice is not None:
        yield "notice", str(run.notice.get("reason"))


def _hint(found: JobStatus) -> str:
    if found.state == "paused":
        return f"To resume: lastcall kube resume {found.target}{_where(found.target)}"
    return ""


def _sentence(done: suspension.Paused) -> str:
    target = done.target
    again = f"To resume: lastcall kube resume {target}{_where(target)}"
    if not done.waited:
        return (
            f"{target} is asked to save and stop. Follow it with: lastcall kube status "
            f"{target}{_where(target)}. {again}"
        )
    if not done.gone:
        return f"{target} still has pods. It stays paused; they exit once they have saved. {again}"
    if not done.endings:
        return f"{target} is paused{'' if done.new else ' already'}; none of its pods was running. {again}"
    saved = sorted({item.words for item in done.endings if item.outcome == "saved"})
    if saved:
        return f"{target} is paused: {output.printable('; '.join(saved))}. {again}"
    if any(item.outcome == "finished" for item in done.endings):
        return f"{target} finished before it could be paused."
    if failed := sorted({item.words for item in done.endings if item.outcome == "not saved"}):
        words = output.printable("; ".join(failed))
        return f"{target} is paused, but exited WITHOUT saving: {words}. {again}"
    if ended := sorted({item.words for item in done.endings if item.outcome is not None}):
        words = output.printable("; ".join(ended))
        return f"{target} is paused; its training ended on its own: {words}. {again}"
    return (
        f"{target} is paused. It is unknown whether it saved: no pod left an exit message of lastcall. "
        f"Is the job protected? {again}"
    )
