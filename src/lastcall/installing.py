"""How lastcall and what it needs are installed: for every message that says so.

lastcall is on no package index yet, so no message may say `pip install lastcall`: a stranger could take that
name. An extra is therefore installed by what is in it, which works wherever lastcall runs already; lastcall
itself by its wheel.
"""

from __future__ import annotations

import shlex

# as in pyproject.toml, without `all`; a copied package (in a volume, on PYTHONPATH) has no metadata
EXTRAS: dict[str, tuple[str, ...]] = {
    "torch": ("torch>=2.4", "numpy>=1.26"),
    "ray": ("ray[train]>=2.51", "torch>=2.4", "numpy>=1.26"),
    "kubeflow": ("kubeflow>=0.5,<0.6",),
    "kube": ("starlette>=0.46", "uvicorn>=0.54", "cryptography>=43", "pyyaml>=6"),
    "s3": ("boto3>=1.36",),
    "transformers": ("transformers>=5.0", "accelerate>=1.1", "torch>=2.4", "numpy>=1.26"),
}


def extra(name: str) -> str:
    """The line that installs what this extra of lastcall asks for."""
    return f"python3 -m pip install {shlex.join(EXTRAS[name])}"


def missing(what: str, package: str, name: str) -> str:
    """The sentence of an error: what cannot be used, because this package of this extra is not installed."""
    return f"{what} needs {package} (lastcall's extra `{name}`). Install it with: {extra(name)}"


def wheel(version: str) -> str:
    """The line that installs this version of lastcall."""
    return f"python3 -m pip install lastcall-{version}-py3-none-any.whl"
