"""Every place that keeps objects does what a mirror needs of it: a folder, and a bucket of a real S3
server."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.servers import ports
from helpers.servers import s3 as s3_server
from helpers.servers.s3 import Server
from lastcall import errors
from lastcall.storage import objects
from lastcall.storage.objects import Objects

LARGE = os.urandom(1024) * (37 * 1024)  # three parts of S3's
Place = Callable[[str], Objects]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with s3_server.served(tmp_path_factory.mktemp("s3") / "buckets") as found:
        yield found


@pytest.fixture
def bucket(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    server.bucket("runs")
    return server


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    if request.param == "folder":
        return objects.opened(f"file://{tmp_path}/mirror")
    request.getfixturevalue("bucket")
    return objects.opened(f"s3://runs/{tmp_path.name}")


def test_what_is_written_is_read(place: Objects) -> None:
    place.write("a/b.json", b"one")
    assert place.read("a/b.json", 10) == b"one"
    place.write("a/b.json", b"two")
    assert place.read("a/b.json", 10) == b"two"


def test_what_is_not_there_is_nothing(place: Objects) -> None:
    assert place.read("a/b.json", 10) is None
    assert place.names() == {}
    assert place.age("a/b.json") is None
    place.remove(["a/b.json"])


def test_what_is_too_large_is_not_read(place: Objects) -> None:
    place.write("a", b"12345")
    with pytest.raises(errors.StorageError, match="more than 4 bytes"):
        place.read("a", 4)


def test_names_are_those_below_the_place(place: Objects) -> None:
    for name in ("checkpoint-1/x", "checkpoint-1/deep/y", "checkpoint-10/x", ".lastcall/run.json"):
        place.write(name, b"12")
    assert place.names("checkpoint-1/") == {"checkpoint-1/x": 2, "checkpoint-1/deep/y": 2}
    assert set(place.names("checkpoint-")) == {"checkpoint-1/x", "checkpoint-1/deep/y", "checkpoint-10/x"}
    assert len(place.names()) == 4


@pytest.mark.parametrize("content", [b"", b"small", LARGE], ids=["empty", "small", "large"])
@pytest.mark.parametrize("threads", [True, False])
def test_a_file_goes_there_and_comes_back(
    place: Objects, tmp_path: Path, content: bytes, threads: bool
) -> None:
    (tmp_path / "file").write_bytes(content)
    sent: list[int] = []
    fetched: list[int] = []
    place.send(tmp_path / "file", "checkpoint-1/file", sent.append, threads=threads)
    assert place.names() == {"checkpoint-1/file": len(content)}
    place.fetch("checkpoint-1/file", tmp_path / "back", fetched.append)
    assert (tmp_path / "back").read_bytes() == content
    assert sum(sent) == sum(fetched) == len(content)


def test_a_copy_is_made_over_there(place: Objects, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(LARGE)
    place.send(tmp_path / "file", "a/file")
    place.copy("a/file", "b/file")
    place.remove(["a/file"])
    assert place.names() == {"b/file": len(LARGE)}
    place.fetch("b/file", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == LARGE


def test_a_copy_of_nothing_is_an_error(place: Objects) -> None:
    with pytest.raises(errors.StorageError):
        place.copy("a/file", "b/file")
    with pytest.raises(errors.StorageError):
        place.fetch("a/file", Path("/nowhere"))


class Enough(Exception):
    pass


# boto3 leaves its file and socket to the collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_transfer_that_is_ended_leaves_nothing_there(place: Objects, tmp_path: Path) -> None:
    def enough(count: int) -> None:
        raise Enough

    (tmp_path / "file").write_bytes(LARGE)
    with pytest.raises(Enough):
        place.send(tmp_path / "file", "a/file", enough)
    assert place.names() == {}
    place.send(tmp_path / "file", "a/file")
    with pytest.raises(Enough):
        place.fetch("a/file", tmp_path / "back", enough)
    gc.collect()


def test_a_file_that_is_not_here_is_an_error(place: Objects, tmp_path: Path) -> None:
    with pytest.raises(errors.StorageError):
        place.send(tmp_path / "missing", "a/file")


def test_the_age_is_told_by_one_clock(place: Objects) -> None:
    place.write("a", b"")
    age = place.age("a")
    assert age is not None and age >= 0


def test_a_bucket_that_is_not_there_is_refused_with_what_to_do(bucket: Server) -> None:
    place = objects.opened("s3://nowhere/exp1")
    for attempt in (place.names, lambda: place.write("a", b"")):
        with pytest.raises(errors.StorageRefused, match="Create it, or name another"):
            attempt()


def test_wrong_credentials_are_refused(bucket: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(errors.StorageRefused, match="AWS_SECRET_ACCESS_KEY does not belong"):
        objects.opened("s3://runs/exp1").names()


def test_keys_may_lie_in_a_folder_and_variables_win(
    bucket: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bucket.environment.items():
        monkeypatch.delenv(name)
        (tmp_path / name).write_text(f"{value}\n")
    objects.opened(f"s3://runs/{tmp_path.name}", str(tmp_path)).write("a", b"")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(errors.StorageRefused):
        objects.opened("s3://runs/exp1", str(tmp_path)).names()


def test_no_credentials_are_refused(bucket: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    with pytest.raises(errors.StorageRefused, match="no credentials found"):
        objects.opened("s3://runs/exp1").names()


@pytest.mark.parametrize("endpoint", ["minio:9000", "http://"])
def test_an_address_that_is_none_is_refused(
    bucket: Server, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setenv("AWS_S3_ENDPOINT", endpoint)
    with pytest.raises(errors.StorageRefused, match="endpoint"):
        objects.opened("s3://runs/exp1")


def test_what_is_no_name_of_a_bucket_is_refused(bucket: Server) -> None:
    with pytest.raises(errors.StorageRefused, match="bucket name"):
        objects.opened("s3://runs!/exp1").names()


def test_a_folder_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.StorageRefused, match="could not be written"):
        objects.opened(f"file://{tmp_path}/file/exp1").write("a", b"")


def test_what_somebody_was_killed_over_goes_with_the_rest_of_its_folder(tmp_path: Path) -> None:
    place = objects.opened(f"file://{tmp_path}/mirror")
    place.write("checkpoint-1/deep/a", b"")
    (tmp_path / "mirror" / "checkpoint-1" / "deep" / ".lastcall-part-1-2").write_bytes(b"half")
    assert set(place.names()) == {"checkpoint-1/deep/a"}
    place.remove(["checkpoint-1/deep/a"])
    assert list((tmp_path / "mirror").iterdir()) == []


def test_a_store_that_does_not_answer_is_an_error_that_may_pass(
    bucket: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_S3_ENDPOINT", f"http://127.0.0.1:{ports.free_port()}")
    with pytest.raises(errors.StorageError) as raised:
        objects.opened("s3://runs/exp1").read("a", 10)
    assert not isinstance(raised.value, errors.StorageRefused)


@pytest.mark.parametrize(
    "url", ["", "runs/exp1", "s3://", "s3:///exp1", "file://exp1", "gs://runs/exp1", "s3://runs/../x"]
)
def test_what_is_no_place_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is neither|points outside"):
        objects.opened(url)
