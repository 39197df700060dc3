from __future__ import annotations

import logging
import queue
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.processes.forkserver import PATIENCE, until
from helpers.servers.metadata import AwsServer, AzureServer, GcpServer
from lastcall import errors, settings
from lastcall.notices import files, sources, walltime
from lastcall.notices.cloud import detect
from lastcall.notices.cloud.aws import Aws
from lastcall.notices.cloud.azure import Azure
from lastcall.notices.cloud.gcp import Gcp
from lastcall.types import Notice

AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"


def firmware(folder: Path, **values: str) -> Path:
    for name, value in values.items():
        (folder / name).write_text(value + "\n")
    return folder


@pytest.fixture
def nowhere(tmp_path: Path) -> Path:
    """The firmware of a machine under somebody's desk."""
    folder = tmp_path / "dmi"
    folder.mkdir()
    return firmware(
        folder,
        sys_vendor="Dell Inc.",
        product_name="Precision",
        board_vendor="Dell Inc.",
        chassis_asset_tag="",
    )


@pytest.fixture
def silent(tmp_path: Path) -> Path:
    """A sandbox that shows no firmware."""
    return tmp_path / "no" / "dmi"


def kinds(found: Sequence[sources.NoticeSource]) -> list[type]:
    return [type(source) for source in found]


def test_off_cloud_and_without_slurm_there_is_nothing_and_nobody_is_asked(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection was made")

    monkeypatch.setattr(socket, "create_connection", refuse)
    before = threading.active_count()
    assert sources.build(None, environ={}, firmware=nowhere) == []
    assert threading.active_count() == before


def test_every_source_that_has_something_to_say_is_built(tmp_path: Path, nowhere: Path) -> None:
    environ = {"SLURM_JOB_ID": "5", "SLURM_JOB_END_TIME": "1714557600"}
    found = sources.build(tmp_path / "stop", "gcp", environ=environ, firmware=nowhere)
    assert kinds(found) == [files.StopFile, Gcp, walltime.Slurm]
    assert [source.name for source in found] == ["stop-file", "gcp", "slurm"]
    assert kinds(sources.build(None, "none", slurm=False, environ=environ, firmware=nowhere)) == []


@pytest.mark.parametrize(("cloud", "expected"), [("aws", Aws), ("gcp", Gcp), ("azure", Azure)])
def test_a_cloud_that_was_chosen_is_taken_whatever_the_firmware_says(
    cloud: str, expected: type, nowhere: Path
) -> None:
    assert kinds(sources.build(None, cloud, environ={}, firmware=nowhere)) == [expected]


def test_a_cloud_that_does_not_exist_is_refused_with_the_choices(nowhere: Path) -> None:
    with pytest.raises(errors.ConfigError, match="auto, aws, gcp, azure, none"):
        sources.build(None, "ibm", environ={}, firmware=nowhere)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"sys_vendor": "Amazon EC2", "product_name": "p4d.24xlarge"}, "aws"),
        ({"sys_vendor": "Xen", "product_name": "HVM domU", "bios_version": "4.11.amazon"}, "aws"),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, "gcp"),
        ({"sys_vendor": "Google", "product_name": "Eve"}, ""),
        (
            {
                "sys_vendor": "Microsoft Corporation",
                "product_name": "Virtual Machine",
                "chassis_asset_tag": AZURE_TAG,
            },
            "azure",
        ),
        (
            {
                "sys_vendor": "Microsoft Corporation",
                "product_name": "Virtual Machine",
                "chassis_asset_tag": "5",
            },
            "",
        ),
        ({"sys_vendor": "QEMU", "product_name": "Standard PC"}, ""),
        ({}, None),
    ],
)
def test_the_firmware_tells_the_cloud(tmp_path: Path, values: dict[str, str], expected: str | None) -> None:
    assert detect.by_firmware(firmware(tmp_path, **values)) == expected


def test_auto_takes_the_cloud_of_the_firmware(tmp_path: Path) -> None:
    folder = firmware(tmp_path, sys_vendor="Amazon EC2", product_name="m5.large")
    assert kinds(sources.build(None, environ={}, firmware=folder)) == [Aws]
    assert sources.build(None, environ={"AWS_EC2_METADATA_DISABLED": "true"}, firmware=folder) == []


def test_the_endpoints_are_those_of_the_vendors_own_variables(nowhere: Path) -> None:
    environ = {
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://a:1/",
        "GCE_METADATA_HOST": "b:2",
        "LASTCALL_AZURE_METADATA_ENDPOINT": "http://c:3",
    }
    found = [
        sources.build(None, cloud, environ=environ, firmware=nowhere)[0] for cloud in ("aws", "gcp", "azure")
    ]
    assert [source.client.base for source in found] == ["http://a:1", "http://b:2", "http://c:3"]  # type: ignore[attr-defined]
    (ipv6,) = sources.build(
        None, "aws", environ={"AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE": "IPv6"}, firmware=nowhere
    )
    assert ipv6.client.base == "http://[fd00:ec2::254]"  # type: ignore[attr-defined]


def test_auto_with_an_endpoint_probes_it_and_listens_to_who_answers(nowhere: Path) -> None:
    heard: queue.Queue[Notice] = queue.Queue()
    with AwsServer() as aws, GcpServer() as gcp, AzureServer() as azure:
        aws.behaviour = gcp.behaviour = "500"
        azure.announce("Preempt", 30)
        environ = {
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": aws.url,
            "GCE_METADATA_HOST": gcp.host,
            "LASTCALL_AZURE_METADATA_ENDPOINT": azure.url,
        }
        (source,) = sources.build(None, environ=environ, firmware=nowhere)
        assert not aws.requests, "built, but not started"
        for _ in range(2):  # also after a restart
            source.start(heard.put)
            assert heard.get(timeout=PATIENCE).source == "azure"
            source.stop()
        assert len(aws.requests) == len(gcp.requests) == 1
        assert (
            isinstance(source, detect.Detecting) and source.found is not None and source.found._thread is None
        )


@pytest.mark.parametrize(("behaviour", "expected"), [("good", "aws"), ("500", "azure")])
def test_an_endpoint_that_was_set_goes_before_the_firmware_if_it_answers(
    tmp_path: Path, behaviour: str, expected: str
) -> None:
    folder = firmware(tmp_path, sys_vendor="Microsoft Corporation", chassis_asset_tag=AZURE_TAG)
    with AwsServer() as aws:
        aws.behaviour = behaviour
        (source,) = sources.build(
            None, environ={"AWS_EC2_METADATA_SERVICE_ENDPOINT": aws.url}, firmware=folder
        )
        assert isinstance(source, detect.Detecting) and source.otherwise is not None
        source.otherwise.client.base = "http://127.0.0.1:9"  # nobody leaves this machine in a test
        source.start(lambda notice: None)
        until(lambda: source.found is not None, "the end of the search")
        source.stop()
        assert source.found is not None and source.found.name == expected


def test_auto_without_a_firmware_asks_all_three_once_and_gives_up_quietly(
    silent: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def refuse(address: tuple[str, int], timeout: float) -> None:
        asked.append((address, timeout <= 1.0))
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", refuse)
    (source,) = sources.build(None, environ={}, firmware=silent)
    with caplog.at_level(logging.DEBUG, "lastcall"):
        source.start(lambda notice: None)
        until(lambda: "none of the clouds" in caplog.text, "the end of the search")
        source.stop()
    assert asked == [(("169.254.169.254", 80), True)] * 3
    assert not [record for record in caplog.records if record.levelno >= logging.INFO]


def test_stop_during_the_search_ends_it(nowhere: Path) -> None:
    with AwsServer() as aws:
        aws.behaviour = "hang"
        (source,) = sources.build(
            None, environ={"AWS_EC2_METADATA_SERVICE_ENDPOINT": aws.url}, firmware=nowhere
        )
        source.start(lambda notice: None)
        until(lambda: bool(aws.requests), "the question")
        thread = source._thread  # type: ignore[attr-defined]
        source.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert source.found is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("variable", "value", "cloud"),
    [
        ("LASTCALL_SLURM_LEAD_SECONDS", "soon", "none"),
        ("LASTCALL_SLURM_LEAD_SECONDS", "-1", "none"),
        ("LASTCALL_SLURM_LEAD_SECONDS", "inf", "none"),
        ("LASTCALL_AZURE_LEAD_SECONDS", "nan", "azure"),
        ("LASTCALL_AWS_REBALANCE", "maybe", "aws"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(variable: str, value: str, cloud: str, nowhere: Path) -> None:
    with pytest.raises(errors.ConfigError, match=f"{variable}='{value}'.*export {variable}="):
        sources.build(None, cloud, environ={variable: value}, firmware=nowhere)


def test_the_settings_reach_their_sources(nowhere: Path) -> None:
    environ = {
        "LASTCALL_AWS_REBALANCE": "1",
        "LASTCALL_AZURE_LEAD_SECONDS": "60",
        "LASTCALL_SLURM_LEAD_SECONDS": "45",
        "SLURM_JOB_ID": "5",
        "SLURM_JOB_END_TIME": "1714557600",
    }
    aws, slurm = sources.build(None, "aws", environ=environ, firmware=nowhere)
    (azure,) = sources.build(None, "azure", slurm=False, environ=environ, firmware=nowhere)
    assert aws._rebalance is True  # type: ignore[attr-defined]
    assert slurm._wanted == 45.0  # type: ignore[attr-defined]
    assert azure._lead == 60.0  # type: ignore[attr-defined]
    assert set(settings.LAUNCH) >= {name for name in environ if name.startswith("LASTCALL_")}


def test_starting_twice_is_harmless(tmp_path: Path, nowhere: Path) -> None:
    heard: queue.Queue[Notice] = queue.Queue()
    (source,) = sources.build(tmp_path / "stop", "none", environ={}, firmware=nowhere)
    source.start(heard.put)
    source.start(heard.put)
    (tmp_path / "stop").write_text("5")
    assert heard.get(timeout=PATIENCE)
    source.stop()
    assert heard.empty()


def test_the_stop_file_that_the_environment_names_is_listened_to_unless_another_is_given(
    nowhere: Path, tmp_path: Path
) -> None:
    environ = {"LASTCALL_STOP_FILE": f" {tmp_path / 'named'} "}
    (named,) = sources.build(None, environ=environ, firmware=nowhere)
    (given,) = sources.build(tmp_path / "given", environ=environ, firmware=nowhere)
    assert isinstance(named, files.StopFile) and isinstance(given, files.StopFile)
    assert (named.path, given.path) == (tmp_path / "named", tmp_path / "given")
