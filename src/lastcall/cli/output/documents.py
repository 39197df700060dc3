"""JSON for programs: `--json`, and what it prints."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping

SCHEMA = 1  # raised when a field changes its meaning or is removed; fields may be added at any time


class JsonFlag(argparse.Action):
    """The option --json. It carries the fields of the document, for docs/reference/commands.md."""

    def __init__(
        self, option_strings: list[str], dest: str, fields: Mapping[str, str], help: str = ""
    ) -> None:
        super().__init__(option_strings, dest, nargs=0, default=False, help=help)
        self.fields = dict(fields)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, True)


def add_json(
    parser: argparse.ArgumentParser,
    fields: Mapping[str, str],
    help: str = "print JSON (its fields are in docs/reference/commands.md)",
) -> None:
    """`fields`: each field of the document, `schema` excepted, and what it means. What stands in a list is
    written `name[].field`."""
    parser.add_argument("--json", action=JsonFlag, fields=fields, help=help)


def document(body: Mapping[str, object]) -> None:
    """The one JSON document of a command."""
    sys.stdout.write(json.dumps({"schema": SCHEMA, **_finite(body)}, indent=2, allow_nan=False) + "\n")


def line(body: Mapping[str, object]) -> None:
    """One JSON document on a line of its own, flushed at once: its reader may be waiting for it."""
    sys.stdout.write(json.dumps({"schema": SCHEMA, **_finite(body)}, allow_nan=False) + "\n")
    sys.stdout.flush()


def _finite(value: object) -> dict[str, object]:
    made = _plain(value)
    assert isinstance(made, dict)
    return made


def _plain(value: object) -> object:
    """Replaces NaN and infinity, which most JSON readers refuse, by text."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
