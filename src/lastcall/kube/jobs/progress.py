"""The progress of a run in a pod, and how it ended, without lastcall's command in the pod's image.

While it runs, the files that every run writes are read with `kubectl exec`: the shell script below finds the
directories that processes of the container hold (their locks are open files) and prints what lies in them.
Without sh in the image, or without the permission to exec, the state of the object and its pods is still
shown.

How a stopped run ended is in its log, which is followed while it ends: its pod is deleted afterwards.

Discarded: the progress page (it is only served if LASTCALL_PROGRESS_PORT was set); `lastcall watch` in the
pod (the image may not have the package, and may call its Python anything).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

SCRIPT = r"""
ls -l /proc/[0-9]*/fd 2>/dev/null | sed -n 's|^.* -> \(/.*\)/\.lastcall/lock$|\1|p' | sort -u | while read -r run; do
  echo "run $run"
  echo "progress $(tr '\n' ' ' < "$run/.lastcall/progress.json")"
  tail -n 2000 "$run/.lastcall/events-0.jsonl" | grep -E '"kind": *"(committed|notice|start)"'
done 2>/dev/null
true
"""  # noqa: E501
_ENDINGS = (  # the log lines of a run that ends, and what they mean
    ("saved", re.compile(r"Notice answered: (.*)")),
    ("saved", re.compile(r"(JIT checkpoint completed.*)")),
    ("not saved", re.compile(r"(.*\bnothing (?:is|was|could be) saved.*)", re.IGNORECASE)),
    ("not saved", re.compile(r"(JIT checkpoint failed: .*)")),
    ("finished", re.compile(r"(Training (?:is )?finished.*)")),
)


@dataclass
class Run:
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


def parse(text: str) -> list[Run]:
    """Parses the script's output. Invalid lines are skipped: they come out of a container."""
    runs: list[Run] = []
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        if word == "run":
            runs.append(Run(rest))
        elif runs and word == "progress":
            runs[-1].progress = _object(rest)
        elif runs:
            runs[-1].tell(_object(line))
    return runs


def ending(line: str) -> tuple[str, str] | None:
    """How a run ended ("saved", "not saved", "finished") and the message, if this line of its log tells."""
    for outcome, words in _ENDINGS:
        if found := words.search(line):
            return outcome, found[1].strip()
    return None


def _object(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}
