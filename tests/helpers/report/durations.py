"""`--durations-file FILE`: the slowest tests, files and folders, so that the suite can be kept short."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

_SLOWEST = 50


class Durations:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Fixtures count for the test that made them."""
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text("".join(f"{line}\n" for line in self.lines()))

    def lines(self) -> Iterator[str]:
        folders: dict[str, float] = defaultdict(float)
        files: dict[str, float] = defaultdict(float)
        for nodeid, seconds in self._seconds.items():
            path = Path(nodeid.partition("::")[0])
            folders["/".join(path.parts[:3] if len(path.parts) > 3 else path.parts[:2])] += seconds
            files[path.as_posix()] += seconds
        yield f"{sum(self._seconds.values()):9.1f} s  {len(self._seconds)} tests, one after the other"
        for title, found in (("folders", folders), ("files", files), ("tests", self._seconds)):
            yield ""
            yield f"the slowest {title}"
            for name, seconds in sorted(found.items(), key=lambda one: -one[1])[:_SLOWEST]:
                yield f"{seconds:9.1f} s  {name}"
