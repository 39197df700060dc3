"""Every source of notices besides signals: a stop file, the clouds' metadata, the end of a Slurm
allocation."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from lastcall import clock as clocks
from lastcall import settings
from lastcall.notices import files, walltime
from lastcall.notices.cloud import CLOUDS, aws, azure, detect, gcp
from lastcall.notices.cloud.metadata import Metadata
from lastcall.types import Notice

_ENDPOINTS = {
    "aws": "AWS_EC2_METADATA_SERVICE_ENDPOINT",  # the variables of Amazon's own libraries
    "gcp": "GCE_METADATA_HOST",  # the variables of Google's own libraries
    "azure": "LASTCALL_AZURE_METADATA_ENDPOINT",
}


class NoticeSource(Protocol):
    """A source of notices on a thread of its own. Nothing here raises, and stop() returns within a second or
    so."""

    name: str

    def start(self, notify: Callable[[Notice], None]) -> None:
        """Start watching. `notify` is called from another thread; what it raises is logged. Does nothing if
        already started."""

    def stop(self) -> None:
        """After this, notify is no longer called. May be started again, and then reports again what is still
        valid."""


def build(
    stop_file: Path | None,
    cloud: str = "auto",
    slurm: bool = True,
    *,
    environ: Mapping[str, str] | None = None,
    clock: clocks.Clock | None = None,
    firmware: Path = detect.DMI,
) -> list[NoticeSource]:
    """The sources that apply here, none of them started. No network access; ConfigError for a wrong
    setting."""
    environ = os.environ if environ is None else environ
    clock = clock or clocks.Clock()
    if cloud not in CLOUDS:
        settings.fail(
            f"cloud={cloud!r} is not one of the choices. Set it to one of {', '.join(CLOUDS)}, for "
            "example: --cloud auto"
        )
    found: list[NoticeSource] = []
    if stop_file is not None:
        found.append(files.StopFile(stop_file, clock))
    elif named := settings.stop_file(environ):
        found.append(files.StopFile.named(named, clock))
    source = _cloud(cloud, environ, clock, firmware)
    if source is not None:
        found.append(source)
    if slurm:
        lead = _seconds(environ, "LASTCALL_SLURM_LEAD_SECONDS", walltime.LEAD)
        allocation = walltime.Slurm.of_environment(environ, lead, clock)
        if allocation is not None:
            found.append(allocation)
    return found


def _cloud(
    cloud: str, environ: Mapping[str, str], clock: clocks.Clock, firmware: Path
) -> NoticeSource | None:
    if cloud == "none":
        return None
    if cloud != "auto":
        return _metadata(cloud, environ, clock)
    known = detect.by_firmware(firmware)
    allowed = [name for name in _ENDPOINTS if name != "aws" or not _switched_off(environ)]
    own = _metadata(known, environ, clock) if known in allowed else None
    named = [name for name in allowed if environ.get(_ENDPOINTS[name], "").strip()]
    asked = named or (allowed if known is None else [])
    if not asked or known in asked:
        return own
    return detect.Detecting([_metadata(name, environ, clock, probing=True) for name in asked], own, clock)


def _switched_off(environ: Mapping[str, str]) -> bool:
    """Amazon's own variable, which tells its libraries to leave the metadata service alone."""
    return environ.get("AWS_EC2_METADATA_DISABLED", "").strip().lower() == "true"


def _metadata(
    cloud: str, environ: Mapping[str, str], clock: clocks.Clock, *, probing: bool = False
) -> Metadata:
    endpoint = environ.get(_ENDPOINTS[cloud], "").strip()
    if cloud == "aws":
        ipv6 = environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE", "").strip().lower() == "ipv6"
        rebalance = _flag(environ, "LASTCALL_AWS_REBALANCE")
        return aws.Aws(endpoint or (aws.BASE_IPV6 if ipv6 else aws.BASE), rebalance=rebalance, clock=clock)
    if cloud == "gcp":
        return gcp.Gcp(endpoint or (gcp.ADDRESS if probing else gcp.HOST), clock)
    lead = _seconds(environ, "LASTCALL_AZURE_LEAD_SECONDS", azure.LEAD)
    return azure.Azure(endpoint or azure.BASE, lead=lead, clock=clock)


def _seconds(environ: Mapping[str, str], variable: str, default: float) -> float:
    text = environ.get(variable, "").strip()
    if not text:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        settings.fail(
            f"{variable}={text!r} is not a number of seconds. Set it to a number of at least 0: export "
            f"{variable}={default:g}"
        )
    return number


def _flag(environ: Mapping[str, str], variable: str) -> bool:
    text = environ.get(variable, "").strip().lower()
    if text not in ("", "1", "true", "yes", "on", "0", "false", "no", "off"):
        settings.fail(
            f"{variable}={text!r} is neither yes nor no. Set it to 1 or 0, for example: export {variable}=1"
        )
    return text in ("1", "true", "yes", "on")
