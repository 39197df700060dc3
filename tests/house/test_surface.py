"""What a user sees of the package without asking for more: names, and what the documents give away."""

from __future__ import annotations

import inspect
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import lastcall

ROOT = Path(__file__).resolve().parents[2]


def test_f21_import_star_and_help_need_no_optional_package() -> None:
    """F21: `__all__` names nothing that needs Kubeflow, Ray or Transformers; those come when they are asked
    for."""
    hidden = (
        "import sys\nfor name in ('kubeflow', 'ray', 'transformers', 'accelerate'): sys.modules[name] = "
        "None\n"
    )
    script = (
        f"{hidden}from lastcall import *\nimport inspect, lastcall, pydoc\n"
        "inspect.getmembers(lastcall)\npydoc.render_doc(lastcall)\nprint(protect)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_f21_help_works_without_torch() -> None:
    script = (
        "import importlib.util as u\nfound = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name in ('torch', 'numpy') else found(name, *more)\n"
        "import inspect, lastcall\nprint([name for name, _ in inspect.getmembers(lastcall) if name == "
        "'protect'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_every_name_is_documented() -> None:
    for name in lastcall.__all__:
        assert inspect.getdoc(getattr(lastcall, name)) or name == "__version__", name
    assert "protect" in pydoc.render_doc(lastcall)


def test_e11_no_path_of_a_private_machine_is_in_the_documents() -> None:
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        assert not re.search(r"(^|[^\w.])/(work|farm)/", path.read_text()), path
