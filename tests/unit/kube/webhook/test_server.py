from __future__ import annotations

import socket

import pytest

from lastcall.kube.webhook.server import Address


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_connections_send_without_delay(host: str) -> None:
    with Address(host, 0).bound() as bound, socket.create_connection(("127.0.0.1", bound.getsockname()[1])):
        with bound.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
