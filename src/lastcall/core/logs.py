"""Log lines reach a person also where nobody has configured logging: for the time of a session, and only then."""

from __future__ import annotations

import logging

_NAME = "lastcall"


class Visible:
    """While entered, INFO lines of ours go to stderr, unless the application has set up logging by itself."""

    def __init__(self, level: str) -> None:
        self._level = level
        self._handler: logging.Handler | None = None
        self._before = logging.NOTSET

    def __enter__(self) -> Visible:
        logger = logging.getLogger(_NAME)
        self._before = logger.level
        if logger.level == logging.NOTSET:
            logger.setLevel(self._level)
        if not logger.hasHandlers():
            self._handler = logging.StreamHandler()
            self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s lastcall: %(message)s", "%H:%M:%S"))
            logger.addHandler(self._handler)
        return self

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger(_NAME)
        logger.setLevel(self._before)
        if self._handler is not None:
            logger.removeHandler(self._handler)
            self._handler = None
