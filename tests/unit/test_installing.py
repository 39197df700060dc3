from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

from lastcall import installing

ROOT = Path(__file__).resolve().parents[2]


def test_the_extras_of_the_messages_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert {name: tuple(what) for name, what in extras.items() if name != "all"} == installing.EXTRAS
    assert extras["all"] == [f"lastcall[{','.join(name for name in extras if name != 'all')}]"] or set(
        re.findall(r"\w+", extras["all"][0])
    ) == {"lastcall", *installing.EXTRAS}


def test_an_install_line_survives_the_shell() -> None:
    assert shlex.split(installing.extra("torch")) == [
        "python3",
        "-m",
        "pip",
        "install",
        "torch>=2.4",
        "numpy>=1.26",
    ]
    assert "lastcall's extra `kube`" in installing.missing("the webhook", "starlette", "kube")
    assert installing.wheel("1.2.3") == "python3 -m pip install lastcall-1.2.3-py3-none-any.whl"
