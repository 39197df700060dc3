"""The training function as text that arrives unaltered.

The SDK asks `inspect.getsource` for the function's text and puts it into a shell script, into a here-document
that the shell expands: `${x}` and `$x` are replaced, what stands in backticks is executed, backslashes
vanish, and a line EOM ends it. Before that Kubernetes replaces `$(NAME)` in a container's command, and makes
one `$` of two. So the SDK gets another function: a few lines of plain Python around the text in base64, which
none of them can alter.

Discarded: escaping what the shell would expand. The SDK's local backend uses no shell, and Kubernetes has
rules of its own.
"""

from __future__ import annotations

import ast
import base64
import inspect
import itertools
import json
import linecache
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from lastcall.adapters.kubeflow import standalone

FILE = "lastcall_kubeflow.py"  # the script's name in the pod
_WIDTH = 96
# Linux starts no process with an argument of 128 KiB: the SDK's script is one, and has some lines of its own
_MOST_BYTES = 112 * 1024
_STUB = '''\
def {name}():
    """The training function and its arguments are in the text below, in base64, which no shell changes."""
    import sys

    try:
        from lastcall.adapters.kubeflow import pod
        from lastcall.auto import bootstrap
    except ImportError as error:
        print(
            "lastcall is not installed in this pod (%s). Pass TransformersTrainer(package=...), a requirement "
            "that pip finds, or use an image that has it" % error,
            file=sys.stderr,
        )
        sys.exit(78)
    bootstrap.start()  # if Python has not done so already
    pod.run(
        globals(),
{text},
    )
'''  # noqa: E501
_NAME = "train_in_pod"
_count = itertools.count()


def check_size(func: Callable[..., Any], args: Mapping[str, Any] | None) -> None:
    """ValueError if the pod could not start with it."""
    size = len(_source_of_stub(packed(func, args)))
    if size > _MOST_BYTES:
        raise ValueError(
            f"{func.__name__}() and func_args take {size} bytes, but the command of a pod has room for "
            f"{_MOST_BYTES}. Store the data where the pods can read it, and pass its path"
        )


def packed(func: Callable[..., Any], args: Mapping[str, Any] | None) -> str:
    """A function and its arguments; `pod.unpacked` is the way back."""
    whole = {"name": func.__name__, "source": source_of(func), "args": arguments_of(args)}
    return base64.b64encode(zlib.compress(json.dumps(whole).encode(), 9)).decode()


def stub(func: Callable[..., Any], args: Mapping[str, Any] | None) -> Callable[[], None]:
    """A function whose source, as `inspect` finds it, unpacks this one in the pod and calls it."""
    source = _source_of_stub(packed(func, args))
    file = f"/lastcall/{next(_count)}/{FILE}"  # each its own: linecache knows files by their names
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": "lastcall_kubeflow"}
    exec(compile(source, file, "exec"), namespace)
    made: Callable[[], None] = namespace[_NAME]
    return made


def _source_of_stub(text: str) -> str:
    lines = [text[start : start + _WIDTH] for start in range(0, len(text), _WIDTH)]
    return _STUB.format(name=_NAME, text="\n".join(f'        "{line}"' for line in lines))


def source_of(func: Callable[..., Any]) -> str:
    """The text of a function that can run on its own."""
    standalone.check_kind(func)
    name = func.__name__
    try:
        source = inspect.getsource(func)
    except OSError as error:
        raise ValueError(
            f"the source of {name}() cannot be found ({error}). Define it in a file or in a notebook cell"
        ) from error
    # taking the indentation away would change texts of many lines
    whole = f"if True:\n{source}" if source[0].isspace() else source
    standalone.check_names(func, whole)
    return whole


def arguments_of(args: Mapping[str, Any] | None) -> str:
    """The arguments as Python literals: they must survive the round trip."""
    if args is not None and not isinstance(args, Mapping):
        raise ValueError(f"func_args={args!r} is not a dict: arguments are passed by name")
    text = repr(dict(args or {}))
    try:
        whole = ast.literal_eval(text) == dict(args or {})
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        whole = False
    if not whole:
        raise ValueError(
            f"func_args={text} cannot be sent to the pod: only text, bytes, numbers, True, False, None, and "
            "lists, tuples, sets and dicts of "
            "them do"
        )
    return text
