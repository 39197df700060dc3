from __future__ import annotations

import json
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from helpers.processes.forkserver import PATIENCE, until
from helpers.servers.metadata import BAD, AwsServer, AzureServer, GcpServer, MetadataServer
from lastcall import clock as clocks
from lastcall.notices import polling
from lastcall.notices.cloud.aws import Aws
from lastcall.notices.cloud.azure import Azure
from lastcall.notices.cloud.client import Client
from lastcall.notices.cloud.gcp import Gcp
from lastcall.notices.cloud.metadata import Metadata
from lastcall.types import Notice

SERVERS = {"aws": AwsServer, "gcp": GcpServer, "azure": AzureServer}


def source_for(server: MetadataServer) -> Metadata:
    if isinstance(server, GcpServer):
        return Gcp(server.host)
    return Aws(server.url) if isinstance(server, AwsServer) else Azure(server.url)


def announce(server: MetadataServer, seconds: float = 30.0) -> None:
    """The end of this machine, in the words of its cloud."""
    if isinstance(server, AwsServer):
        server.interrupt(seconds)
    elif isinstance(server, GcpServer):
        server.set("preempted", "TRUE")
    else:
        assert isinstance(server, AzureServer)
        server.announce("Preempt", seconds)


@contextmanager
def listening(source: Metadata, seconds: float = 10.0) -> Iterator[queue.Queue[Notice]]:
    """A source that looks often, and hurries."""
    heard: queue.Queue[Notice] = queue.Queue()
    source.interval, source.most, source.client.seconds = 0.01, 0.02, seconds
    if isinstance(source, Gcp):
        source.hold = 0.05
    source.start(heard.put)
    try:
        yield heard
    finally:
        source.stop()


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[MetadataServer]:
    with SERVERS[request.param]() as server:
        yield server


@pytest.fixture
def aws() -> Iterator[AwsServer]:
    with AwsServer() as server:
        yield server


@pytest.fixture
def gcp() -> Iterator[GcpServer]:
    with GcpServer() as server:
        yield server


@pytest.fixture
def azure() -> Iterator[AzureServer]:
    with AzureServer() as server:
        yield server


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def close_to(value: float | None, expected: float, slack: float = 5.0) -> bool:
    return value is not None and abs(value - expected) <= slack


# ---- every cloud -------------------------------------------------------------------------------------------


def test_news_become_one_notice_with_its_deadline(server: MetadataServer) -> None:
    with listening(source_for(server)) as heard:
        server.wait_for_requests(4)
        assert heard.empty()
        before = time.monotonic()
        announce(server, 30.0)
        notice = heard.get(timeout=PATIENCE)
        assert notice.source in SERVERS and notice.at >= before
        assert close_to(notice.deadline, before + 30.0)
        server.wait_for_requests(6)
        assert heard.empty(), "news that are repeated are not news"


def test_news_that_are_there_at_the_start_are_told_again_after_a_restart(server: MetadataServer) -> None:
    announce(server)
    source = source_for(server)
    for _ in range(2):
        with listening(source) as heard:
            assert heard.get(timeout=PATIENCE).deadline is not None


@pytest.mark.parametrize("behaviour", BAD)
def test_a_bad_server_is_warned_of_once_and_heard_again_when_it_recovers(
    server: MetadataServer, behaviour: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.behaviour = behaviour
    source = source_for(server)
    slow = behaviour in ("hang", "dribble")
    if isinstance(source, Azure):
        source.begin = lambda: source.client.open()  # type: ignore[method-assign]  # no patience with a slow start
    with caplog.at_level(logging.DEBUG, "lastcall"), listening(source, 0.1 if slow else 10.0) as heard:
        server.wait_for_requests(4)
        assert heard.empty()
        until(lambda: len([line for line in caplog.messages if "retrying" in line]) >= 2, "two failures")
        assert len(warnings(caplog)) == 1, caplog.messages
        announce(server)
        source.client.seconds = 10.0
        server.behaviour = "good"
        assert heard.get(timeout=PATIENCE).deadline is not None
        until(lambda: any("works again" in line for line in caplog.messages), "the news of the recovery")


def test_a_redirect_is_not_followed(server: MetadataServer) -> None:
    server.behaviour = "redirect"
    with listening(source_for(server)):
        server.wait_for_requests(4)
    assert not any("elsewhere" in path for _, path in server.requests)


def test_proxies_of_the_environment_are_ignored(
    server: MetadataServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    announce(server)
    with listening(source_for(server)) as heard:
        assert heard.get(timeout=PATIENCE)


def test_stop_does_not_wait_for_a_server_that_hangs(server: MetadataServer) -> None:
    server.behaviour = "hang"
    source = source_for(server)
    with listening(source, seconds=PATIENCE):
        until(lambda: bool(server.requests), "a request")
        thread = source._thread
        assert thread is not None
    thread.join(PATIENCE / 2)
    assert not thread.is_alive()


def test_a_server_that_is_not_there_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        source = Aws(f"http://127.0.0.1:{taken.getsockname()[1]}")
        with caplog.at_level(logging.DEBUG, "lastcall"), listening(source) as heard:
            until(lambda: len(caplog.messages) >= 3, "three failures")
        assert heard.empty()
    assert len(warnings(caplog)) == 1
    assert "cannot be reached" in warnings(caplog)[0] and "Training continues" in warnings(caplog)[0]


@pytest.mark.parametrize(
    "base",
    ["metadata", "ftp://127.0.0.1", "http://", "http://[::1", "http://127.0.0.1:99999999", "http://a b/"],
)
def test_a_wrong_address_is_an_error_that_shows_it(base: str) -> None:
    with pytest.raises(polling.Trouble) as caught:
        Client(base).request("GET", "/", {})
    assert base.rstrip("/") in str(caught.value)


def test_each_probe_knows_its_own_cloud_only() -> None:
    with AwsServer() as aws, GcpServer() as gcp, AzureServer() as azure:
        for server in (aws, gcp, azure):
            answers = [Aws(server.url).probe(), Gcp(server.host).probe(), Azure(server.url).probe()]
            assert answers == [server is aws, server is gcp, server is azure]


def test_a_notify_that_raises_does_not_end_the_listening(
    aws: AwsServer, caplog: pytest.LogCaptureFixture
) -> None:
    heard: queue.Queue[Notice] = queue.Queue()

    def notify(notice: Notice) -> None:
        heard.put(notice)
        raise RuntimeError("no")

    source = Aws(aws.url)
    source.interval = 0.01
    source.start(notify)
    aws.interrupt(100)
    heard.get(timeout=PATIENCE)
    aws.interrupt(50)
    heard.get(timeout=PATIENCE)
    source.stop()
    assert any("still watching for notices" in line for line in caplog.messages)


def test_notify_may_stop_the_source(aws: AwsServer) -> None:
    source, done = Aws(aws.url), threading.Event()

    def notify(notice: Notice) -> None:
        source.stop()
        done.set()

    aws.interrupt(60)
    source.start(notify)
    assert done.wait(PATIENCE)


# ---- EC2 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_ec2_each_action_is_a_notice_that_names_it(aws: AwsServer, action: str) -> None:
    aws.interrupt(100.0, action)
    with listening(Aws(aws.url)) as heard:
        notice = heard.get(timeout=PATIENCE)
    assert notice.source == "aws" and action in notice.reason


def test_ec2_a_time_that_is_past_is_due_now(aws: AwsServer) -> None:
    aws.interrupt(-3600.0)
    with listening(Aws(aws.url)) as heard:
        notice = heard.get(timeout=PATIENCE)
    assert notice.deadline is not None and abs(notice.deadline - notice.at) < 1.0


def test_ec2_a_time_that_is_too_far_ahead_is_a_wrong_clock(aws: AwsServer) -> None:
    aws.interrupt(7200.0)
    with listening(Aws(aws.url)) as heard:
        notice = heard.get(timeout=PATIENCE)
    assert close_to(notice.deadline, notice.at + 120.0, 1.0)


def test_ec2_an_interruption_without_a_readable_time_is_still_one(
    aws: AwsServer, caplog: pytest.LogCaptureFixture
) -> None:
    aws.items["spot/instance-action"] = json.dumps({"action": "stop", "time": "soon"})
    with listening(Aws(aws.url)) as heard:
        notice = heard.get(timeout=PATIENCE)
    assert notice.deadline is None and "'soon'" in warnings(caplog)[0]


@pytest.mark.parametrize(
    "body",
    [
        '{"action": "noop", "time": "2017-09-18T08:22:00Z"}',
        "{}",
        "[]",
        "null",
        "terminate",
        '{"action": ["stop"]}',
    ],
)
def test_ec2_an_action_that_is_none_is_no_notice(
    aws: AwsServer, body: str, caplog: pytest.LogCaptureFixture
) -> None:
    aws.items["spot/instance-action"] = body
    with listening(Aws(aws.url)) as heard:
        aws.wait_for_requests(4, "instance-action")
    assert heard.empty() and len(warnings(caplog)) == 1


def test_ec2_a_token_that_has_run_out_is_replaced_without_a_word(
    aws: AwsServer, caplog: pytest.LogCaptureFixture
) -> None:
    with listening(Aws(aws.url)) as heard:
        aws.wait_for_requests(4)
        aws.interrupt(60.0)
        aws.expire_tokens()
        assert heard.get(timeout=PATIENCE)
        aws.wait_for_requests(6)
    assert sum(method == "PUT" for method, _ in aws.requests) == 2
    assert not warnings(caplog)


def test_ec2_silence_explains_the_hop_limit_of_containers(
    aws: AwsServer, caplog: pytest.LogCaptureFixture
) -> None:
    aws.behaviour = "hang"
    with listening(Aws(aws.url), 0.05):
        until(lambda: bool(warnings(caplog)), "a warning")
    assert "--http-put-response-hop-limit 2" in warnings(caplog)[0]


def test_ec2_a_rebalance_recommendation_is_only_logged(
    aws: AwsServer, caplog: pytest.LogCaptureFixture
) -> None:
    aws.items["events/recommendations/rebalance"] = '{"noticeTime": "2020-10-27T08:22:00Z"}'
    with caplog.at_level(logging.INFO, "lastcall"), listening(Aws(aws.url)) as heard:
        aws.wait_for_requests(4, "rebalance")
    assert heard.empty()
    assert len([line for line in caplog.messages if "LASTCALL_AWS_REBALANCE=1" in line]) == 1


def test_ec2_a_rebalance_recommendation_is_a_notice_when_asked_for(aws: AwsServer) -> None:
    aws.items["events/recommendations/rebalance"] = '{"noticeTime": "2020-10-27T08:22:00Z"}'
    with listening(Aws(aws.url, rebalance=True)) as heard:
        notice = heard.get(timeout=PATIENCE)
    assert "rebalance" in notice.reason and notice.deadline is None


def test_ec2_auto_scaling_says_when_an_instance_leaves(aws: AwsServer) -> None:
    aws.items["autoscaling/target-lifecycle-state"] = "InService"
    with listening(Aws(aws.url)) as heard:
        aws.wait_for_requests(3, "lifecycle")
        assert heard.empty()
        aws.items["autoscaling/target-lifecycle-state"] = "Terminated"
        notice = heard.get(timeout=PATIENCE)
    assert "Auto Scaling" in notice.reason and notice.deadline is None


# ---- Compute Engine ----------------------------------------------------------------------------------------


def test_gce_a_question_is_held_until_the_answer_changes(gcp: GcpServer) -> None:
    with listening(Gcp(gcp.host)) as heard:
        gcp.wait_for_requests(1, "wait_for_change=true")
        gcp.set("preempted", "TRUE")
        assert heard.get(timeout=PATIENCE).reason == "Compute Engine preemption"
    waiting = [path for _, path in gcp.requests if "wait_for_change" in path]
    assert all("last_etag=" in path and "timeout_sec=" in path for path in waiting)


def test_gce_maintenance_that_stops_the_machine_is_a_notice_of_a_minute(gcp: GcpServer) -> None:
    gcp.set("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")
    with listening(Gcp(gcp.host)) as heard:
        notice = heard.get(timeout=PATIENCE)
    assert "TERMINATE_ON_HOST_MAINTENANCE" in notice.reason and close_to(
        notice.deadline, notice.at + 60.0, 1.0
    )


def test_gce_a_live_migration_is_no_notice(gcp: GcpServer, caplog: pytest.LogCaptureFixture) -> None:
    gcp.set("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE")
    with caplog.at_level(logging.DEBUG, "lastcall"), listening(Gcp(gcp.host)) as heard:
        until(lambda: any("MIGRATE" in line for line in caplog.messages), "a debug line")
    assert heard.empty() and not warnings(caplog)


def test_gce_a_server_of_another_flavor_is_not_believed(
    gcp: GcpServer, caplog: pytest.LogCaptureFixture
) -> None:
    gcp.flavor = "Vanilla"
    gcp.set("preempted", "TRUE")
    with listening(Gcp(gcp.host)) as heard:
        gcp.wait_for_requests(3)
    assert heard.empty() and "Metadata-Flavor" in warnings(caplog)[0]


# ---- Azure -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Reboot", "Redeploy"])
def test_azure_each_stop_is_a_notice_that_names_it(azure: AzureServer, kind: str) -> None:
    azure.announce(kind, 40.0)
    with listening(Azure(azure.url)) as heard:
        notice = heard.get(timeout=PATIENCE)
    assert notice.source == "azure" and kind in notice.reason and close_to(notice.deadline, notice.at + 40.0)


def test_azure_a_freeze_and_the_events_of_other_machines_are_no_notices(
    azure: AzureServer, caplog: pytest.LogCaptureFixture
) -> None:
    azure.announce("Freeze", 40.0)
    azure.announce("Preempt", 40.0, "trainer_1", "trainer_2")
    with listening(Azure(azure.url)) as heard:
        azure.wait_for_requests(4, "scheduledevents")
        assert heard.empty() and not warnings(caplog)
        azure.announce("Preempt", 40.0, "trainer_1", "TRAINER_0")
        assert heard.get(timeout=PATIENCE)


def test_azure_every_event_is_ours_where_the_name_is_unknown(
    azure: AzureServer, caplog: pytest.LogCaptureFixture
) -> None:
    azure.machine = None
    azure.announce("Preempt", 40.0, "trainer_1")
    with listening(Azure(azure.url)) as heard:
        assert heard.get(timeout=PATIENCE)
    assert "every event is treated as ours" in warnings(caplog)[0]


def test_azure_an_event_that_has_started_is_due_now(azure: AzureServer) -> None:
    azure.announce("Reboot", None, status="Started")
    with listening(Azure(azure.url)) as heard:
        notice = heard.get(timeout=PATIENCE)
    assert notice.deadline is not None and abs(notice.deadline - notice.at) < 1.0


def test_azure_an_event_without_a_time_is_a_notice_without_a_deadline(azure: AzureServer) -> None:
    azure.announce("Terminate", None)
    with listening(Azure(azure.url)) as heard:
        assert heard.get(timeout=PATIENCE).deadline is None


class Turned(clocks.Clock):
    """A clock whose time of day can be set, as the days pass that an event is ahead."""

    ahead = 0.0

    def wall(self) -> float:
        return time.time() + self.ahead


def test_azure_a_stop_days_ahead_is_waited_for(azure: AzureServer, caplog: pytest.LogCaptureFixture) -> None:
    azure.announce("Redeploy", 7 * 86400.0)
    clock = Turned()
    with listening(Azure(azure.url, clock=clock)) as heard:
        azure.wait_for_requests(4, "scheduledevents")
        assert heard.empty()
        assert len(warnings(caplog)) == 1 and "training continues until 300 s before" in warnings(caplog)[0]
        clock.ahead = 7 * 86400.0 - 250.0
        notice = heard.get(timeout=PATIENCE)
    assert close_to(notice.deadline, notice.at + 250.0)


def test_azure_a_slow_first_answer_is_expected(azure: AzureServer, caplog: pytest.LogCaptureFixture) -> None:
    azure.behaviour = "hang"
    with caplog.at_level(logging.DEBUG, "lastcall"), listening(Azure(azure.url), 0.05):
        azure.wait_for_requests(3)
    assert not warnings(caplog)


@pytest.mark.parametrize("events", [["event"], [5], [None]])
def test_azure_events_that_are_none_are_no_notices(
    azure: AzureServer, events: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    azure.events = events
    with listening(Azure(azure.url)) as heard:
        azure.wait_for_requests(3, "scheduledevents")
    assert heard.empty() and len(warnings(caplog)) == 1


# ---- times -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2017-09-18T08:22:00Z", 1505722920.0),
        ("2017-09-18T10:22:00+02:00", 1505722920.0),
        ("2017-09-18T08:22:00", 1505722920.0),
        ("Mon, 18 Sep 2017 08:22:00 GMT", 1505722920.0),
        ("", None),
        ("soon", None),
        ("99999999999999", None),
        (5, None),
        (None, None),
    ],
)
def test_times_are_read_in_the_formats_of_the_clouds(text: object, expected: float | None) -> None:
    assert polling.instant(text) == expected


def test_a_time_of_day_becomes_a_deadline_of_the_monotonic_clock() -> None:
    class Fixed(clocks.Clock):
        now: Callable[[], float] = lambda self: 50.0  # type: ignore[assignment]
        wall: Callable[[], float] = lambda self: 1_000_000.0  # type: ignore[assignment]

    assert polling.monotonic(Fixed(), 1_000_030.0) == 80.0
    assert polling.monotonic(Fixed(), 900_000.0) == 50.0
