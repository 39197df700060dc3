"""Attacks: a run directory, a mirror, a shared-memory file or a network peer that belongs to somebody else.
Each of these succeeded before. The ids are those of the findings."""

from __future__ import annotations

import json
import logging
import os
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import torch

import lastcall
from lastcall import clock as clocks
from lastcall import errors, events
from lastcall.core.checkpoint import departure
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.checkpoint.ownership import Fence
from lastcall.core.engine import digest
from lastcall.core.guard import guard, mailbox
from lastcall.core.progress.page import MetricsPage
from lastcall.core.ranks import keys
from lastcall.core.restore import contents
from lastcall.core.startup import recovery, takeover
from lastcall.core.store.client import StoreClient
from lastcall.core.store.memory import MemoryStore
from lastcall.core.store.server import StoreServer
from lastcall.core.transfer.parts import PartTransfer
from lastcall.formats import marshalled
from lastcall.storage import files as storage
from lastcall.storage import objects
from lastcall.types import FileRecord, Kind

CLOCK = clocks.Clock()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A run directory that somebody else has prepared."""
    private = tmp_path / "run" / ".lastcall"
    private.mkdir(parents=True)
    return tmp_path / "run"


def train(directory: Path, steps: int = 2) -> int:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with lastcall.protect(directory, model=model, optimizer=optimizer) as run:
        for _ in run.steps(steps):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    return run.step


# ---- D1: guard.json ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["precious.txt", "lastcall-0-1-abc"])
def test_d1_a_directory_from_somebody_else_deletes_no_file_of_mine(
    directory: Path, tmp_path: Path, name: str
) -> None:
    precious = tmp_path / name
    precious.write_text("mine")
    (directory / ".lastcall" / guard.POINTER).write_text(json.dumps({"areas": [str(precious)]}))
    train(directory)
    assert precious.read_text() == "mine"


def test_d1_a_link_that_is_named_like_an_area_is_left_alone(directory: Path, tmp_path: Path) -> None:
    area = guard.Area.create(tmp_path / f"lastcall-{os.getuid()}-1-a", 4096, 4096)
    link = tmp_path / f"lastcall-{os.getuid()}-1-b"
    link.symlink_to(area.path)
    (directory / ".lastcall" / guard.POINTER).write_text(json.dumps({"areas": [str(link)]}))
    train(directory)
    assert area.path.exists() and link.is_symlink()


def test_d1_the_guarded_state_of_another_run_of_mine_is_neither_taken_nor_removed(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    area = guard.Area.create(tmp_path / f"lastcall-{os.getuid()}-1-a", 4096, 1 << 16)
    body = {
        "run": "another",
        "incarnation": 1,
        "step": 9,
        "document": {},
        "groups": [],
        "metrics": {},
        "at": 0.0,
    }
    text = json.dumps(body).encode()
    area.write(lambda address: True, digest.of(text).encode() + text)
    (directory / ".lastcall" / "run.json").write_text(json.dumps({"run": "this one", "incarnations": 1}))
    (directory / ".lastcall" / guard.POINTER).write_text(json.dumps({"areas": [str(area.path)]}))
    with caplog.at_level(logging.WARNING, "lastcall"):
        assert recovery.recover(directory, "a kill") is None
    assert area.path.exists() and "it belongs to another run" in caplog.text


# ---- D2: links where we write ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["run.tmp", "run.json.tmp", "owner.tmp", "owner.json.tmp", "guard.tmp"])
def test_d2_a_link_under_a_name_that_was_known_beforehand_is_not_written_through(
    directory: Path, tmp_path: Path, name: str
) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    (directory / ".lastcall" / name).symlink_to(precious)
    train(directory)
    assert precious.read_text() == "mine"


@pytest.mark.parametrize("name", ["events-0.jsonl", "progress.json.tmp", "progress.json"])
@pytest.mark.parametrize("make", [os.symlink, os.link])
def test_d2_a_log_that_is_a_link_is_made_anew(
    directory: Path, tmp_path: Path, make: object, name: str
) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    make(precious, directory / ".lastcall" / name)  # type: ignore[operator]
    train(directory)
    assert precious.read_text() == "mine"
    assert '"outcome": "finished"' in (directory / ".lastcall" / "events-0.jsonl").read_text()


def test_d2_progress_is_written_through_no_link(directory: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    (directory / ".lastcall" / "progress.json.tmp").symlink_to(precious)
    progress = events.Progress(directory / ".lastcall" / "progress.json", CLOCK)
    progress.update(3)
    progress.flush()
    assert precious.read_text() == "mine" and json.loads(progress.path.read_text())["step"] == 3


def test_d2_our_part_of_the_directory_is_no_link_to_another_folder(tmp_path: Path) -> None:
    (tmp_path / "home" / "staging").mkdir(parents=True)
    (tmp_path / "home" / "staging" / "mine").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lastcall").symlink_to(tmp_path / "home")
    with pytest.raises(errors.ConfigError, match="lastcall writes into no other folder. Remove it: rm"):
        train(tmp_path / "run")
    assert (tmp_path / "home" / "staging" / "mine").exists() and len(list((tmp_path / "home").iterdir())) == 1


@pytest.mark.parametrize("make", [os.mkfifo, Path.touch, lambda path: path.symlink_to("/")])
def test_d2_what_is_where_checkpoints_are_made_costs_no_save(directory: Path, make: object) -> None:
    make(directory / ".lastcall" / "staging")  # type: ignore[operator]
    assert train(directory) == 2 and (directory / "checkpoint-2").is_dir()


@pytest.mark.parametrize("name", ["events-0.jsonl", "progress.json.tmp", "progress.json"])
def test_d2_a_pipe_in_the_place_of_a_log_hangs_nobody(directory: Path, name: str) -> None:
    os.mkfifo(directory / ".lastcall" / name)
    assert list(events.read(directory / ".lastcall" / "events-0.jsonl")) == []
    train(directory)
    assert [
        event for event in events.read(directory / ".lastcall" / "events-0.jsonl") if event["kind"] == "start"
    ]


def test_d2_a_log_without_lines_costs_a_reader_no_memory(directory: Path) -> None:
    path = directory / ".lastcall" / "events-0.jsonl"
    with open(path, "wb") as file:
        file.truncate(64 << 20)
    assert max(len(line) for line in events._lines(path)) <= 2 * events._LONGEST_LINE


@pytest.mark.parametrize("make", [os.symlink, os.link])
def test_d2_a_lock_that_is_a_link_is_refused_and_what_it_points_to_stays(
    directory: Path, tmp_path: Path, make: object
) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    make(precious, directory / ".lastcall" / "lock")  # type: ignore[operator]
    with pytest.raises(errors.ConfigError, match="is not a plain file.*Remove it: rm"):
        train(directory)
    assert precious.read_text() == "mine"


# ---- D3: secrets -------------------------------------------------------------------------------------------


def test_d3_keys_are_for_this_user_alone_and_of_one_incarnation(directory: Path) -> None:
    private = directory / ".lastcall"
    made = keys.Keys.made("token", "store")
    made.write(private)
    path = private / keys.NAME
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keys.read(private, "token") == made and keys.read(private, "another") is None
    path.chmod(0o644)
    assert keys.read(private, "token") is None  # somebody else may have read them
    path.write_bytes(b"[]")
    path.chmod(0o600)
    assert keys.read(private, "token") is None


def test_d3_nothing_that_opens_anything_is_in_the_store_where_the_ranks_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unit.core.joint import test_joint_start

    server = StoreServer("127.0.0.1", secret="s3cret")
    server.start()
    monkeypatch.setenv("LASTCALL_STORE", f"{server.address[1]}:s3cret")
    try:
        with test_joint_start.start(tmp_path, tmp_path) as two:
            found = test_joint_start.joined(two.all_join())
            said = two.store.get("start", 0.0)
            assert said is not None and b"s3cret" not in said
            assert found[0].keys == found[1].keys and found[0].keys.parts.encode() not in said
            assert found[0].keys.parts not in (tmp_path / ".lastcall" / "owner.json").read_text()
            for one in found:
                one.store.close()
    finally:
        server.stop()


# ---- D4: strangers -----------------------------------------------------------------------------------------


def test_d4_idle_connections_to_the_store_leave_room_for_ranks(caplog: pytest.LogCaptureFixture) -> None:
    server = StoreServer("127.0.0.1", secret="s3cret")
    server._most_strangers = 20
    server.start()
    idle = []
    try:
        idle = [socket.create_connection(server.address) for _ in range(100)]
        client = StoreClient(*server.address, "s3cret")
        client.set("key", b"x")
        assert client.get("key", 5.0) == b"x"
        assert len(server._strangers) <= 20
        client.close()
    finally:
        for link in idle:
            link.close()
        server.stop()


def test_d4_idle_connections_cost_a_rank_no_thread_and_no_file(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path, storage.Files())
    catalog.make()
    parcels = PartTransfer(catalog, MemoryStore(), "s" * 32, 0, "127.0.0.1")
    address = ("127.0.0.1", parcels._listening.getsockname()[1])
    idle = []
    before = threading.active_count()
    try:
        for _ in range(150):
            link = socket.create_connection(address)
            link.send(b"\0")  # dribbles
            idle.append(link)
        until = time.monotonic() + 20
        while threading.active_count() > before + 40 and time.monotonic() < until:
            time.sleep(0.05)
        assert threading.active_count() <= before + 40
    finally:
        for link in idle:
            link.close()
        parcels.close()


def test_d4_slow_clients_do_not_silence_the_progress_page() -> None:
    class Report:
        def document(self) -> dict[str, object]:
            return {"step": 3}

    page = MetricsPage(0, Report())  # type: ignore[arg-type]
    page.open()
    slow = []
    try:
        for _ in range(20):
            link = socket.create_connection(("127.0.0.1", page.port))
            link.send(b"GET /metrics HTTP/1.1\r\nX: ")
            slow.append(link)
        with urllib.request.urlopen(f"http://127.0.0.1:{page.port}/metrics", timeout=10) as answer:
            assert json.loads(answer.read()) == {"step": 3}
    finally:
        for link in slow:
            link.close()
        page.close()


# ---- D5: mailboxes -----------------------------------------------------------------------------------------


def test_d5_a_mailbox_that_others_can_write_to_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    box = mailbox.Mailbox.create(tmp_path, "run", 1, 0)
    assert box is not None and box.write(1, "B", (b"x",))
    assert mailbox.read(tmp_path, "run", 1, 0)
    box.path.chmod(0o666)
    with caplog.at_level(logging.WARNING, "lastcall"):
        assert mailbox.read(tmp_path, "run", 1, 0) == []
    assert "does not belong to this user alone" in caplog.text
    box.close()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"r\0\0\0\0",
        b"c" + bytes(60),
        b"(\xff\xff\xff\xff",
        b"[\x01\0\0\0" * 500,
        b"{i\0\0",
        b"l\xff\xff\xff\x7f",
        b"NN",
        b"\xe9",
        b"0",
    ],
)
def test_d5_crafted_letters_are_refused_and_do_not_crash_the_interpreter(data: bytes) -> None:
    with pytest.raises((ValueError, marshalled._EndOfDict)):
        marshalled.loads(data)


def test_d5_what_marshal_writes_is_read_as_it_was() -> None:
    import marshal

    value = {"a": (1, -(2**40), 2**100, 1.5, "é\ud800", b"\0\xff", None, True), 3: [False, [], {}, ()]}
    assert marshalled.loads(marshal.dumps(value, marshalled.VERSION)) == value


# ---- D6, D7: files that are larger than they should be -----------------------------------------------------


def test_d6_a_document_of_gigabytes_is_refused_before_a_byte_is_read(tmp_path: Path) -> None:
    huge = 8 << 30
    with open(tmp_path / "state.json", "wb") as file:
        file.truncate(huge)
    record = records.Record(1, 1, Kind.MANUAL, "", True, (FileRecord("state.json", huge, huge, "", ("x",)),))
    from lastcall.core.checkpoint.record import Entry

    with pytest.raises(errors.CheckpointError, match="more than the .* that are read"):
        contents.small_file(Entry(tmp_path, record), "state.json")


def test_d7_a_hostile_mirror_neither_hangs_a_start_nor_fills_the_disk(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "zero").symlink_to("/dev/zero")
    os.mkfifo(place / "pipe")
    (place / "plain").write_bytes(b"x")
    folder = objects.FolderStore(place)
    assert set(folder.names()) == {"plain"}
    for name in ("zero", "pipe"):
        with pytest.raises(errors.StorageError):
            folder.read(name, 100)
        with pytest.raises(errors.StorageError):
            folder.fetch(name, tmp_path / "got")
    with pytest.raises(errors.StorageError, match="more than 0 bytes"):
        folder.read("plain", 0)


# ---- D8: forged small files --------------------------------------------------------------------------------


def forged(**changes: object) -> bytes:
    body = json.loads(records.Record(1, 1, Kind.MANUAL, "", True, ()).to_json())
    del body["digest"]
    body.update(changes)
    body["digest"] = digest.of(json.dumps(body, sort_keys=True).encode())
    return json.dumps(body).encode()


@pytest.mark.parametrize(
    "changes",
    [
        {"world": 0},
        {"step": 10**30},
        {"incarnation": 2**64},
        {"created": float("inf")},
        {"seconds": float("nan")},
        {"reason": "\ud800"},
        {"metrics": {"\udfff": 1.0}},
        {"metrics": {"loss": 10**400}},
    ],
)
def test_d8_a_forged_record_is_no_record(changes: dict[str, object]) -> None:
    with pytest.raises(errors.CheckpointError):
        records.parse(forged(**changes))


def test_d8_forged_and_deep_and_long_files_do_not_keep_a_run_from_starting(directory: Path) -> None:
    private = directory / ".lastcall"
    os.mkfifo(private / "run.json")
    (private / "owner.json").write_text("[" * 100_000)
    os.mkfifo(private / "leaving-0.json")
    (private / guard.POINTER).write_text("[" * 100_000)
    for number, data in enumerate(
        (forged(world=0), b"[" * 100_000, b'{"format": ' + b"9" * 5000 + b"}", forged(step=10**30))
    ):
        folder = directory / f"checkpoint-{number + 1}"
        folder.mkdir()
        (folder / records.NAME).write_bytes(data)
    assert train(directory) == 2


@pytest.mark.parametrize("incarnations", [-1, 10**400, "x", None, 1e300])
def test_d8_a_forged_run_json_does_not_keep_a_run_from_starting(
    directory: Path, incarnations: object
) -> None:
    text = json.dumps({"run": "x", "incarnations": 0}).replace(
        "0", str(incarnations) if incarnations is not None else "null"
    )
    (directory / ".lastcall" / "run.json").write_text(text)
    assert train(directory) == 2


BODIES: list[object] = [
    [],
    {},
    {"step": "x", "document": {}, "groups": [], "metrics": {}},
    {"step": -1, "document": {}, "groups": [], "metrics": {}},
    {"step": 10**400, "document": [], "groups": [], "metrics": {}},
    {
        "step": 1,
        "document": {},
        "groups": [{"name": "../../x", "entries": [], "frozen": False, "rank": 0}],
        "metrics": {},
    },
    {
        "step": 1,
        "document": {},
        "groups": [{"name": "m", "entries": [["w", "F32", [4], 1 << 50, 16]], "frozen": False, "rank": 0}],
        "metrics": {},
    },
    {
        "step": 1,
        "document": {},
        "groups": [{"name": "m", "entries": [["w", "F32", [-4], 0, -16]], "frozen": False, "rank": 0}],
        "metrics": {},
    },
    {
        "step": 1,
        "document": {},
        "groups": [{"name": "m", "entries": 5, "frozen": False, "rank": 0}],
        "metrics": {},
    },
    {"step": 1, "document": {}, "groups": [], "metrics": {"a": "b"}},
    {"step": 1, "document": {}, "groups": [], "metrics": {}, "incarnation": "x" * 5000},
    {"step": 1, "document": {}, "groups": [], "metrics": {}, "run": 7},
]


@pytest.mark.parametrize("number", range(len(BODIES)))
def test_d8_crafted_guard_areas_are_passed_over(directory: Path, tmp_path: Path, number: int) -> None:
    area = guard.Area.create(tmp_path / f"lastcall-{os.getuid()}-1-a", 4096, 1 << 20)
    text = json.dumps(BODIES[number]).encode()
    area.write(lambda address: True, digest.of(text).encode() + text)
    (directory / ".lastcall" / guard.POINTER).write_text(json.dumps({"areas": [str(area.path)]}))
    assert recovery.recover(directory, "a kill") is None


# ---- D9, D10 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [1e9, -5.0, float("inf"), float("nan")])
def test_d9_a_leaver_with_more_time_than_anybody_has_is_not_waited_for(
    directory: Path, seconds: float
) -> None:
    word = {
        "rank": 0,
        "reason": "x",
        "seconds": seconds,
        "process": {"host": "elsewhere", "pid": 1, "started": 1},
        "machine": "m",
    }
    (directory / ".lastcall" / "leaving-0.json").write_text(json.dumps(word))
    assert departure.found(directory / ".lastcall") == []
    catalog = Catalog(directory, storage.Files())
    assert takeover.Takeover(catalog, CLOCK, lambda: False).open()
    catalog.close()


def pth() -> str:
    import lastcall.auto

    return (Path(lastcall.auto.__file__).parent / "lastcall-auto.pth").read_text()


@pytest.mark.parametrize(("flag", "started"), [((), True), (("-E",), False), (("-I",), False)])
def test_d10_an_isolated_python_does_not_start_lastcall(
    tmp_path: Path, flag: tuple[str, ...], started: bool
) -> None:
    package = tmp_path / "lastcall" / "auto"
    package.mkdir(parents=True)
    (tmp_path / "lastcall" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "bootstrap.py").write_text("def start():\n    print('started')\n")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nexec({pth()!r})\nprint('on')"
    done = subprocess.run(
        [sys.executable, "-S", *flag, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "LASTCALL_ENABLED": "1"},
        check=True,
    )
    assert done.stdout.split() == (["started", "on"] if started else ["on"])


@pytest.mark.parametrize("raised", ["SystemExit(3)", "KeyboardInterrupt", "ImportError"])
def test_d10_a_package_that_shadows_ours_ends_no_python(tmp_path: Path, raised: str) -> None:
    (tmp_path / "lastcall").mkdir()
    (tmp_path / "lastcall" / "__init__.py").write_text(f"raise {raised}")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nexec({pth()!r})\nprint('on')"
    done = subprocess.run(
        [sys.executable, "-S", "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "LASTCALL_ENABLED": "1"},
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["on"])


def test_fences_and_keys_of_one_take_no_link_along(directory: Path, tmp_path: Path) -> None:
    """D2: owner.json itself may be a link; it is replaced, and what it points to stays."""
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    (directory / ".lastcall" / "owner.json").symlink_to(precious)
    Fence.take(directory / ".lastcall", 1)
    assert precious.read_text() == "mine" and not (directory / ".lastcall" / "owner.json").is_symlink()
