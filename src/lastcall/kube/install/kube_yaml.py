"""YAML as kubectl reads and writes it. PyYAML differs and would change objects: 22:22 becomes 1342, a date is
written in another way, and "1e-5" is read as a number, for which the API server refuses the whole object.

This module was compared with kubectl 1.32, text by text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from lastcall.kube.inject.draft import Object

# Texts that the YAML of Kubernetes takes for a number or for yes and no, and PyYAML does not: 1e-5, 08, y.
# Unquoted, they are refused.
_OTHER_THAN_TEXT = re.compile(r"[-+]?\.?[0-9][-+.:_0-9e]*|[-+]?0[box][0-9a-f_]+|y|n", re.IGNORECASE)
_BREAKS = re.compile("[\x85\u2028\u2029]")  # ends of lines, to YAML 1.1: they survive as escapes only


class _Dumper(yaml.SafeDumper):
    """Without anchors: people read these files, and Helm's templates have no place for them."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = '"' if _BREAKS.search(data) else "'" if _OTHER_THAN_TEXT.fullmatch(data) else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


class _KubeLoader(yaml.SafeLoader):
    """Without dates, times of day, and the `=` of YAML 1.1; with 1e3, 08 and y."""


_DIGITS = "-+0123456789"
_NUMBER = r"[-+]?(\.[0-9][0-9_]*|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9][0-9_]*)?"
# what a text without quotes is, in the order in which it is asked: the kind, all of it, and how it begins
_PLAIN = (
    (
        "bool",
        r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF|y|Y|n|N",
        [*"yYnNtTfFoO"],
    ),
    ("int", r"[-+]?(0b[01][01_]*|0o?[0-7][0-7_]*|0|[1-9][0-9_]*|0x[0-9a-fA-F][0-9a-fA-F_]*)", [*_DIGITS]),
    ("float", rf"{_NUMBER}|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", [*_DIGITS, "."]),
    ("merge", r"<<", ["<"]),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
)
_KubeLoader.yaml_implicit_resolvers = {}  # PyYAML's own
for _kind, _all, _first in _PLAIN:
    _KubeLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"^(?:{_all})$"), _first)


def _bool(loader: _KubeLoader, node: yaml.ScalarNode) -> bool:
    return node.value.lower() in ("y", "yes", "true", "on")


_KubeLoader.add_constructor("tag:yaml.org,2002:bool", _bool)


def load(content: str) -> Iterator[Any]:
    """The documents in it. yaml.YAMLError where it is none."""
    return yaml.load_all(content, Loader=_KubeLoader)


def text(objects: Sequence[Object]) -> str:
    return yaml.dump_all(
        objects, Dumper=_Dumper, sort_keys=False, width=200, explicit_start=True, allow_unicode=True
    )
