"""Every setting with its origin, and the versions of installed packages. A wrong value is a finding, not a
crash."""

from __future__ import annotations

import contextlib
import difflib
import io
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from lastcall import errors, installing, settings
from lastcall.doctor import finding
from lastcall.doctor.finding import Finding
from lastcall.launch.shell.commandline import Launch

_PACKAGES = (
    "lastcall",
    "torch",
    "transformers",
    "accelerate",
    "ray",
    "lightning",
    "keras",
    "safetensors",
    "xxhash",
)
_Config = TypeVar("_Config", settings.JITCheckpointConfig, settings.PeriodicCheckpointConfig)
_LEAST_TORCH = (2, 4)
_SWITCHES = ("LASTCALL_ENABLED", "RAY_TRAIN_JIT_CHECKPOINT_ENABLED")
# How `lastcall run` in the command changes what the environment says.
_OPTIONS = {
    "--grace": "LASTCALL_GRACE_SECONDS",
    "--exit-code": "LASTCALL_EXIT_CODE",
    "--guard-steps": "LASTCALL_GUARD_STEPS",
    "--guard-seconds": "LASTCALL_GUARD_SECONDS",
    "--log-level": "LASTCALL_LOG_LEVEL",
}


@dataclass(frozen=True)
class Configuration:
    """The settings that a session here would use; for a wrong value, its default."""

    jit: settings.JITCheckpointConfig
    periodic: settings.PeriodicCheckpointConfig

    def shown(self) -> dict[str, dict[str, object]]:
        known: dict[str, dict[str, object]] = {}
        for config, rows in ((self.jit, settings.JIT), (self.periodic, settings.PERIODIC)):
            origins = config.origins()
            for row in rows:
                value = getattr(config, row.field)
                value = list(value) if isinstance(value, tuple) else value
                known[row.field] = {"value": value, "origin": origins[row.field], "variable": row.variable}
        return known


def check(environ: Mapping[str, str], launch: Launch) -> tuple[Configuration, list[Finding]]:
    """The settings from the environment, with what `lastcall run` in the command adds."""
    seen = dict(environ)
    for option, variable in _OPTIONS.items():
        if option in launch.options:
            seen[variable] = launch.options[option]
    if any(name.startswith("--guard") for name in launch.options):
        seen["LASTCALL_GUARD"] = "1"
    findings = list(_wrong(seen))
    jit, wrong = _whole(settings.JITCheckpointConfig, seen)
    periodic, wrong_too = _whole(settings.PeriodicCheckpointConfig, seen)
    findings += [*wrong, *wrong_too, *_unknown(environ), *_switch(jit, launch, environ)]
    configuration = Configuration(jit, periodic)
    if not findings:
        given = [
            f"{row['variable']}"
            for row in configuration.shown().values()
            if row["origin"] not in ("default", "argument")
        ]
        findings.append(
            finding.ok("settings", f"all valid; set here: {', '.join(given) or 'none, all are defaults'}")
        )
    return configuration, findings


def _wrong(environ: dict[str, str]) -> Iterator[Finding]:
    """Reports each wrong value and removes it from `environ`."""
    for row in settings.JIT + settings.PERIODIC:
        for name in filter(None, (row.variable, row.alias)):
            text = environ.get(name, "")
            if not text.strip():
                continue
            try:
                row.parse(text)
            except ValueError as error:
                del environ[name]
                example = f"export {name}={row.example}"
                yield _as_finding(
                    f"{name}={text!r} {error}. Set it to {row.allowed}, for example: {example}", name
                )


def _as_finding(message: str, name: str | None = None) -> Finding:
    says, _, remedy = message.partition(". ")
    return finding.risk(
        "settings", f"{says}: a run would exit at once with code {errors.EXIT_CONFIG}", remedy, variable=name
    )


def _whole(kind: type[_Config], environ: Mapping[str, str]) -> tuple[_Config, list[Finding]]:
    """Checks all settings together: some contradict each other."""
    message = _refused(lambda: kind(environ=environ))
    if message is None:
        return kind(environ=environ), []
    return kind(environ={}), [_as_finding(message)]


def _refused(make: Callable[[], object]) -> str | None:
    """Why a configuration is refused. Suppresses the message on stderr, which would repeat the finding."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            make()
    except errors.ConfigError as error:
        return str(error)
    return None


def _unknown(environ: Mapping[str, str]) -> Iterator[Finding]:
    known = [row.variable for row in settings.JIT + settings.PERIODIC] + list(settings.LAUNCH)
    for message in settings.unknown_variables(environ):
        name = message.split()[0]
        near = difflib.get_close_matches(name, known, 1, 0.8)
        says = f"{name} is not a setting of lastcall and is ignored"
        if near:
            yield finding.risk(
                "variables",
                f"{says}; {near[0]}, probably meant, is not set",
                f'export {near[0]}="${name}"; unset {name}',
                variable=name,
                meant=near[0],
            )
        else:
            yield finding.warning("variables", says, f"unset {name}", variable=name)


def _switch(
    jit: settings.JITCheckpointConfig, launch: Launch, environ: Mapping[str, str]
) -> Iterator[Finding]:
    if not jit.enabled:
        name = jit.origins()["enabled"]
        yield finding.risk(
            "enabled",
            f"lastcall is disabled by {name}={environ.get(name, '')}: nothing is saved",
            f"export {name}=1",
        )
    elif (
        launch.given
        and not launch.wrapped
        and not any(environ.get(name, "").strip() for name in _SWITCHES)
        and not _asks(launch)
    ):
        yield finding.warning(
            "enabled",
            "lastcall is not enabled: the program does not use it, and neither lastcall run nor "
            "LASTCALL_ENABLED enables it",
            f"lastcall run -- {launch.text}",
        )


def _asks(launch: Launch) -> bool:
    """Whether the program uses lastcall itself. True if that is unknown."""
    script = next((word for word in launch.words if word.endswith(".py")), None)
    try:
        return script is None or "lastcall" in Path(script).read_text(errors="replace")
    except OSError:
        return True


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    if found["lightning"] is None:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found["lightning"] = metadata.version("pytorch-lightning")
    return found


def check_versions(found: Mapping[str, str | None]) -> Iterator[Finding]:
    problems = []
    if found["xxhash"] is None:
        problems.append(
            finding.warning(
                "versions",
                "xxhash is not installed: digests use blake2b, which is slower than a fast disk, so saves "
                "take longer",
                "pip install xxhash",
                package="xxhash",
            )
        )
    torch = found["torch"]
    if torch is not None and _numbers(torch) < _LEAST_TORCH:
        problems.append(
            finding.warning(
                "versions",
                f"torch {torch} is older than the oldest supported version",
                installing.extra("torch"),
            )
        )
    yield from problems
    if not problems:
        there = ", ".join(f"{name} {version}" for name, version in found.items() if version is not None)
        yield finding.ok("versions", there)


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")[:2]
    return tuple(int(part) for part in parts if part.isdigit())
