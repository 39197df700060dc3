"""All checks, in the order in which a user would ask: does the notice arrive, is there time, is there space,
is the run restarted?"""

from __future__ import annotations

import os
from dataclasses import dataclass

from lastcall import settings
from lastcall.doctor import finding
from lastcall.doctor.checks import capacity, configuration, delivery, grace, ray, restart, rundir, storage
from lastcall.doctor.finding import Case, Finding
from lastcall.launch import platforms
from lastcall.launch.shell import commandline


@dataclass(frozen=True)
class DoctorReport:
    findings: tuple[Finding, ...]
    settings: dict[str, dict[str, object]]
    versions: dict[str, str | None]

    @property
    def risks(self) -> int:
        return sum(item.level == "risk" for item in self.findings)

    @property
    def warnings(self) -> int:
        return sum(item.level == "warning" for item in self.findings)

    @property
    def verdict(self) -> str:
        return "risk" if self.risks else "ok"


def inspect(case: Case, known: rundir.Directory | None) -> DoctorReport:
    """`known`: what is known about the directory; None if none was given or it does not exist yet."""
    launch = commandline.understand(case.command, case.environ)
    config, of_settings = configuration.check(case.environ, launch)
    jit = config.jit
    guard = case.guard or jit.guard
    versions = configuration.versions()
    platform, why = platforms.choose(launch.options.get("--platform", "auto"), case.environ)
    findings = [*_delivery(case, launch, jit)]
    of_storage, speed = _storage(case, jit, known)
    expected = grace.expect(case, known, speed)
    findings.append(grace.check_grace(jit, expected, speed))
    findings += grace.check_platform(case, jit, expected, platform.name)
    findings += grace.check_torchrun(launch, jit, expected, case.environ)
    findings += grace.check_slurm(launch, expected, case.environ)
    findings += ray.check(case, launch, jit, expected, versions["ray"])
    findings += of_storage
    if case.directory is not None and not any(
        item.name == "writable" and item.level == "risk" for item in of_storage
    ):
        findings += storage.check_room(case.directory, expected.nbytes, known.spare if known else 0)
    if guard:
        findings.append(capacity.check_shared(jit, expected.nbytes))
        findings += capacity.check_group(guard)
    findings.append(capacity.check_memory(expected.nbytes, config.periodic.save_strategy != "no"))
    findings += restart.check_codes(launch)
    findings.append(restart.check_platform(platform, why, launch, jit, case.environ))
    if known is not None:
        findings += rundir.check(known, starting=bool(launch.given))
    findings.append(rundir.check_unannounced(config, known, guard))
    findings += of_settings
    findings += configuration.check_versions(versions)
    return DoctorReport(tuple(findings), config.shown(), versions)


def _delivery(case: Case, launch: commandline.Launch, jit: settings.JITCheckpointConfig) -> list[Finding]:
    chain = delivery.above(os.getpid())
    blocked, ignored = delivery.own_masks()
    found = [
        delivery.check_first(os.getpid(), chain),
        delivery.check_between(chain, case.environ),
        *delivery.check_command(launch, case.environ),
        *delivery.check_signals(jit.signals, blocked, ignored, launch),
    ]
    return [delivery.with_stop_file(item, jit.stop_file) for item in found]


def _storage(
    case: Case, jit: settings.JITCheckpointConfig, known: rundir.Directory | None
) -> tuple[list[Finding], storage.Speed | None]:
    if case.directory is None:
        return [finding.ok("storage", "not checked: no directory was given (lastcall doctor DIR)")], None
    mount = storage.mount_of(storage.nearest(case.directory))
    findings = [storage.check_place(case.directory, mount), storage.check_writable(case.directory, mount)]
    if findings[-1].level == "risk":
        return findings, None
    if not case.write_test:
        return [*findings, finding.ok("write-test", "skipped (--no-write-test)")], None
    if known is not None and known.active:
        return [
            *findings,
            finding.ok("write-test", "skipped: it would slow down the run that is active here"),
        ], None
    measured, speed = storage.check_speed(case.directory, jit.threads)
    return [*findings, measured], speed
