"""How the values of settings are read. Each parser takes text or a proper value; its ValueError ends the
sentence that begins with "name=value"."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP")
PLACES = ("s3", "file")  # the schemes of object stores
MOST_THREADS = 64
_YES = ("1", "true", "yes", "on")
_NO = ("0", "false", "no", "off")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


def flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = value.strip().lower() if isinstance(value, str) else ""
    if text not in _YES + _NO:
        raise ValueError("is neither yes nor no")
    return text in _YES


def seconds(value: object) -> float:
    try:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError
        number = float(value)
    except (ValueError, OverflowError):
        raise ValueError("is not a number of seconds") from None
    if not math.isfinite(number):
        raise ValueError("is not a finite number of seconds")
    if number < 0:
        raise ValueError("is negative")
    return number


def some_seconds(value: object) -> float:
    number = seconds(value)
    if number == 0:
        raise ValueError("leaves no time to save anything")
    return number


def whole(value: object) -> int:
    try:
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ValueError
        return int(value)
    except ValueError:
        raise ValueError("is not a whole number") from None


def positive(value: object) -> int:
    number = whole(value)
    if number < 1:
        raise ValueError("is less than 1")
    return number


def threads(value: object) -> int:
    number = positive(value)
    if number > MOST_THREADS:
        raise ValueError(f"is more than {MOST_THREADS}")
    return number


def exit_code(value: object) -> int:
    number = whole(value)
    if number == 0:
        raise ValueError("would mean that training finished, and the run would not be restarted")
    if not 1 <= number <= 255:
        raise ValueError("is not an exit code")
    return number


def port(value: object) -> int:
    number = whole(value)
    if not 0 <= number <= 65535:
        raise ValueError("is not a port")
    return number


def file(value: object) -> str:
    text = value.strip() if isinstance(value, str) else ""
    if not text or "\0" in text:
        raise ValueError("is not the path of a file")
    return text


def place(value: object) -> str:
    """Where objects are kept: s3://BUCKET/PREFIX or file:///FOLDER."""
    text = value.strip() if isinstance(value, str) else ""
    scheme, _, rest = text.partition("://")
    if scheme not in PLACES or not rest.strip("/") or rest.startswith("/") != (scheme == "file"):
        raise ValueError("is neither a bucket nor a folder")
    if "\0" in rest or ".." in rest.split("/"):
        raise ValueError("points outside its own prefix")
    return f"{scheme}://{rest.rstrip('/')}"


def split_place(url: str) -> tuple[str, str]:
    """The scheme, and what follows: BUCKET/PREFIX, or FOLDER without its first slash."""
    scheme, _, rest = place(url).partition("://")
    return scheme, rest.lstrip("/")


def is_object_name(text: str) -> bool:
    """Whether a Kubernetes object may have this name: a DNS subdomain."""
    return len(text) <= 253 and _SUBDOMAIN.fullmatch(text) is not None


def text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("is not a name")
    return value.strip()


def one_of(choices: Sequence[str]) -> Callable[[object], str]:
    """Case is ignored; the result is spelled as in `choices`. Transformers' IntervalStrategy is text, too."""

    def parse(value: object) -> str:
        text = value.strip().lower() if isinstance(value, str) else None
        for choice in choices:
            if choice.lower() == text:
                return choice
        raise ValueError("is not one of the choices")

    return parse


def signals(value: object) -> tuple[str, ...]:
    if isinstance(value, str) and value.strip().lower() == "none":
        return ()
    if isinstance(value, str):
        names = [name for name in value.split(",") if name.strip()]
        if not names:
            raise ValueError("names no signal")
    elif isinstance(value, list | tuple):
        names = list(value)
    else:
        raise ValueError("is not a list of signal names")
    known = one_of(SIGNALS)
    try:
        return tuple(dict.fromkeys(known(name) for name in names))
    except ValueError:
        raise ValueError("names a signal that lastcall does not listen to") from None
