"""Found by every Python process below `lastcall run`, whatever its version: so this file uses nothing newer
than Python 2.

It starts the bootstrap, takes its own folder out of `sys.path`, and gives the name back: the program's own
sitecustomize, which this one hides, is imported in its place. If there is none, or if it fails, that import
raises here, and `site` reports what it would report without us: nothing, or the error of that file.
"""

import os
import sys

_folder = os.path.dirname(__file__)
_self = sys.modules.pop(__name__)  # kept: Python 2 empties a module without references


def _start():
    # type: () -> None
    words = [
        os.environ.get(name, "").strip().lower()
        for name in ("LASTCALL_ENABLED", "RAY_TRAIN_JIT_CHECKPOINT_ENABLED")
    ]
    if sys.version_info < (3, 11) or not set(words) - {"", "0", "false", "no", "off"}:
        return
    # Last and only for this import: a Python of another environment uses its own lastcall if it has one, and
    # must see nothing else of what is installed beside ours. Once imported, the package finds its modules on
    # its own. In a pod the folder is a link into the tree that was copied there (`lastcall kube copy`).
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(_folder))))
    sys.path.append(home)
    try:
        from lastcall.auto import bootstrap
    finally:
        sys.path.pop()
    bootstrap.start()


try:
    _start()
except Exception:
    try:
        _kind, _error = sys.exc_info()[:2]
        sys.stderr.write(
            "lastcall: not enabled in this process: "
            + getattr(_kind, "__name__", "error")
            + ": "
            + str(_error)
            + "\n"
        )
    except Exception:
        pass

sys.path[:] = [_entry for _entry in sys.path if _entry != _folder]
__import__(__name__)
