"""How the sockets of our own store are set up, on both sides."""

from __future__ import annotations

import socket

_CUT = 10.0  # seconds of silence from the other host's kernel until a link counts as cut


def tune(link: socket.socket) -> None:
    """Answers are not delayed, and a link that was cut silently is noticed: by data that is not acknowledged,
    and while nothing is sent, by probes."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_CUT * 1000))
