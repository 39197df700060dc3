from __future__ import annotations

import socket
import ssl
import threading
from pathlib import Path

import pytest

from lastcall.kube.webhook import certificates, tls
from lastcall.kube.webhook.certificates import Pair


def written(folder: Path, pair: Pair) -> tuple[Path, Path]:
    (folder / "a.crt").write_bytes(pair.certificate)
    (folder / "a.key").write_bytes(pair.key)
    return folder / "a.crt", folder / "a.key"


def shaken(context: ssl.SSLContext, authority: Pair, name: str) -> bytes:
    """The certificate that a client who trusts the authority gets."""
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def serve() -> None:
            try:
                context.wrap_socket(ours, server_side=True).close()
            except OSError:
                ours.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            client = ssl.create_default_context(cadata=authority.certificate.decode())
            with client.wrap_socket(theirs, server_hostname=name) as connection:
                found = connection.getpeercert(True)
                assert found is not None
                return found
        finally:
            theirs.close()
            thread.join()


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_a_client_that_trusts_the_authority_trusts_what_it_signed(tmp_path: Path) -> None:
    authority = certificates.authority()
    held = tls.Serving(tls.Own(*written(tmp_path, authority), ("hook.team.svc", "127.0.0.1")))
    assert shaken(held.context, authority, "hook.team.svc") == shaken(held.context, authority, "127.0.0.1")
    with pytest.raises(ssl.SSLCertVerificationError):
        shaken(held.context, authority, "other.team.svc")
    with pytest.raises(ssl.SSLCertVerificationError):
        shaken(held.context, certificates.authority(), "hook.team.svc")


def test_the_certificate_is_renewed_in_time_under_connections(tmp_path: Path) -> None:
    authority = certificates.authority()
    source = tls.Own(*written(tmp_path, authority), ("hook",), hours=3.0)
    held = tls.Serving(source)
    first = shaken(held.context, authority, "hook")
    clock = held.clock = Clock(held.served.ends - 3700)
    assert held.look() is None and shaken(held.context, authority, "hook") == first
    clock.now += 200
    assert held.look() == "it was about to expire"
    assert shaken(held.context, authority, "hook") != first


def test_another_authority_in_the_files_is_taken_up(tmp_path: Path) -> None:
    held = tls.Serving(tls.Own(*written(tmp_path, certificates.authority()), ("hook",)))
    later = certificates.authority()
    written(tmp_path, later)
    assert held.look() == "its files have changed"
    shaken(held.context, later, "hook")


def test_files_that_are_half_replaced_change_nothing_until_they_are_whole(tmp_path: Path) -> None:
    authority = certificates.authority()
    held = tls.Serving(tls.Own(*written(tmp_path, authority), ("hook",)))
    before = shaken(held.context, authority, "hook")
    later = certificates.authority()
    (tmp_path / "a.crt").write_bytes(later.certificate)
    for _ in range(2):
        with pytest.raises(ValueError, match="does not belong to its certificate"):
            held.look()
    assert shaken(held.context, authority, "hook") == before
    (tmp_path / "a.key").write_bytes(later.key)
    assert held.look() == "its files have changed"


def test_a_certificate_of_others_is_served_and_read_anew(tmp_path: Path) -> None:
    authority = certificates.authority()
    held = tls.Serving(tls.Given(*written(tmp_path, certificates.serving(authority, ["hook"]))))
    first = shaken(held.context, authority, "hook")
    held.clock = Clock(held.served.ends + 1)
    assert held.look() is None  # whoever made it renews it
    written(tmp_path, certificates.serving(authority, ["hook"]))
    assert held.look() == "its files have changed"
    assert shaken(held.context, authority, "hook") != first


def test_the_key_is_left_on_no_disk_and_out_of_the_log(tmp_path: Path) -> None:
    pair = certificates.authority()
    assert "key" not in repr(pair).replace("BEGIN", "").lower().split("certificate=")[
        0
    ] and "PRIVATE" not in repr(pair)
