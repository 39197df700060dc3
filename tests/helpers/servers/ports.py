"""Ports that are free, and stay so until their listener is there."""

from __future__ import annotations

import random
import socket

# below it are those of Ray's workers, above it those that the kernel takes for outgoing connections
_BETWEEN = range(20_000, 32_000)


def free_ports(count: int) -> list[int]:
    """All different."""
    held: list[socket.socket] = []
    try:
        while len(held) < count:
            probe = socket.socket()
            try:
                probe.bind(("", random.SystemRandom().choice(_BETWEEN)))
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
