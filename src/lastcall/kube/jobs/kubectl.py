"""Runs the user's own kubectl, with its contexts, credentials and proxies, and so only what the user is
allowed to do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lastcall import errors

SECONDS = 60.0  # seconds to wait for an answer
_LONGEST = 500  # characters of its error message that are shown
# a line of its log: the same error five times over, before the one for people
_LOGGED = re.compile(r"[EWI][0-9]{4} [0-9:.]+ ")


class KubectlError(errors.LastcallError):
    """kubectl could not run, or refused; the message is its own."""


class NotFound(KubectlError):
    """There is no such object, or no such kind in this cluster."""


class Forbidden(KubectlError):
    """The user may not do this."""


@dataclass(frozen=True)
class Kubectl:
    program: str = "kubectl"
    context: str | None = None
    namespace: str | None = None
    """None: that of the context."""

    def run(self, *words: str, seconds: float = SECONDS) -> str:
        """The output of a command."""
        command = self.command(*words)
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise KubectlError(f"`{_shown(command)}` did not answer within {seconds:.0f} s") from error
        except OSError as error:
            raise KubectlError(f"cannot start {command[0]}: {error.strerror}") from error
        if done.returncode != 0:
            raise _refusal(command, done.stderr or done.stdout, done.returncode)
        return done.stdout

    def read(self, *words: str, seconds: float = SECONDS) -> dict[str, Any]:
        """A JSON object that it prints."""
        text = self.run(*words, "-o", "json", seconds=seconds)
        try:
            body = json.loads(text)
        except ValueError as error:
            raise KubectlError(
                f"`{_shown(self.command(*words))}` did not return JSON: {text[:100]!r}"
            ) from error
        if not isinstance(body, dict):
            raise KubectlError(f"`{_shown(self.command(*words))}` did not return an object: {text[:100]!r}")
        return body

    def patch(self, resource: str, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Apply a merge patch; returns the updated object."""
        return self.read("patch", resource, name, "--type=merge", "-p", json.dumps(body))

    def pods(self, selector: str) -> list[dict[str, Any]]:
        items = self.read("get", "pods", "-l", selector).get("items")
        return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []

    def following(self, *words: str) -> subprocess.Popen[str]:
        """Start a command that streams its output; its errors are ignored."""
        return subprocess.Popen(
            self.command(*words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )

    def command(self, *words: str) -> list[str]:
        path = shutil.which(self.program)
        if path is None:
            raise KubectlError(
                f"cannot find {self.program}. Install kubectl (https://kubernetes.io/docs/tasks/tools/), or "
                "give its path: "
                "--kubectl /path/to/kubectl"
            )
        chosen = [f"--context={self.context}"] if self.context else []
        chosen += [f"--namespace={self.namespace}"] if self.namespace else []
        # Behind the verb and before what comes after a -- of `exec`
        return [path, *words[:1], *chosen, *words[1:]]


def _refusal(command: Sequence[str], said: str, code: int) -> KubectlError:
    lines = said.splitlines()
    text = (
        " ".join(" ".join([line for line in lines if not _LOGGED.match(line)] or lines).split())[:_LONGEST]
        or f"exit code {code}"
    )
    if "(Forbidden)" in said:
        return Forbidden(
            f"{text}. Ask the administrator of this cluster for the permission; to list yours: "
            "kubectl auth can-i --list"
        )
    if "(NotFound)" in said or "the server doesn't have a resource type" in said:
        return NotFound(text)
    return KubectlError(f"`{_shown(command)}` failed: {text}")


def _shown(command: Sequence[str]) -> str:
    return " ".join(["kubectl", *command[1:]])[:200]
