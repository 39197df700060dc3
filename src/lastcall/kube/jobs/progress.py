"""The progress of a run in a pod, and how it ended, without lastcall's command in the pod's image.

While it runs, the files that every run writes are read with `kubectl exec`: the shell script below finds the
directories that processes of the container hold (their locks are open files) and prints what lies in them.
Without sh in the image, or without the permission to exec, the state of the object and its pods is still
shown.

How a stopped run ended is in the termination message of its container, which Kubernetes keeps in the pod's
status: see core/progress/exit_message.py.

Discarded: the progress page (it is only served if LASTCALL_PROGRESS_PORT was set); `lastcall watch` in the
pod (the image may not have the package, and may call its Python anything).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from lastcall.core.progress.report import ANSWERS
from lastcall.types import Outcome

SCRIPT = r"""
ls -l /proc/[0-9]*/fd 2>/dev/null | sed -n 's|^.* -> \(/.*\)/\.lastcall/lock$|\1|p' | sort -u | while read -r run; do
  echo "run $run"
  echo "progress $(tr '\n' ' ' < "$run/.lastcall/progress.json")"
  tail -n 2000 "$run/.lastcall/events-0.jsonl" | grep -E '"kind": *"(committed|notice|start)"'
done 2>/dev/null
true
"""  # noqa: E501
_ENDS = frozenset(outcome.value for outcome in Outcome)


@dataclass
class PodRun:
    """A run that is active in a pod."""

    directory: str
    progress: dict[str, Any] = field(default_factory=dict)
    start: dict[str, Any] | None = None
    committed: dict[str, Any] | None = None  # the last save of this incarnation
    notice: dict[str, Any] | None = None

    def tell(self, event: dict[str, Any]) -> None:
        kind = event.get("kind")
        if kind == "start":
            self.start, self.notice = event, None
        elif kind == "committed":
            self.committed = event
        elif kind == "notice":
            self.notice = event


def parse(text: str) -> list[PodRun]:
    """Parses the script's output. Invalid lines are skipped: they come out of a container."""
    runs: list[PodRun] = []
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        if word == "run":
            runs.append(PodRun(rest))
        elif runs and word == "progress":
            runs[-1].progress = _object(rest)
        elif runs:
            runs[-1].tell(_object(line))
    return runs


def ending(message: str) -> tuple[str, str] | None:
    """How a run ended (an Outcome) and what to show a person, from the termination message of its container.
    None if the message is another program's, or if there is none."""
    document = _object(message)
    outcome = document.get("state")
    if not isinstance(outcome, str) or outcome not in _ENDS:
        return None
    newest = _named(document.get("checkpoint"))
    if outcome == "saved":
        return outcome, f"saved {newest}" if newest and _is_answer(document) else "saved"
    if outcome == "not saved":
        because = document.get("because")
        return outcome, f"not saved: {because}" if because else "not saved"
    return outcome, f"{outcome}; newest checkpoint: {newest}" if newest else outcome


def _is_answer(document: dict[str, Any]) -> bool:
    """Whether the checkpoint is that of the notice. One that other ranks committed is not in the events of
    this rank, which then names an older one."""
    checkpoint = document["checkpoint"]
    kind, step = checkpoint.get("kind"), checkpoint.get("step")
    return str(kind) in ANSWERS or (step is not None and step == document.get("currentStep"))


def _named(checkpoint: object) -> str:
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("path"), str):
        return ""
    exact = checkpoint.get("exact")
    how = " (exact)" if exact is True else " (not exact)" if exact is False else ""
    return f"{checkpoint['path']}{how}"


def _object(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}
