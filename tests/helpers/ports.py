"""Ports that are free, and stay so until their listener is there."""

from __future__ import annotations

import random
import socket

_BELOW = range(15_000, 32_000)  # the kernel takes ports for outgoing connections from above: one of those may take a free one there


def free_ports(count: int) -> list[int]:
    """All different."""
    held: list[socket.socket] = []
    try:
        while len(held) < count:
            probe = socket.socket()
            try:
                probe.bind(("", random.SystemRandom().choice(_BELOW)))
            except OSError:
                probe.close()
                continue
            held.append(probe)
        return [probe.getsockname()[1] for probe in held]
    finally:
        for probe in held:
            probe.close()


def free_port() -> int:
    return free_ports(1)[0]
