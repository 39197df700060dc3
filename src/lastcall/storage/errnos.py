"""What an error of the file system says about a checkpoint that was being read. Every reader of checkpoints
asks here, and only here.

    damage    a fact about the bytes: they are gone, or the medium does not give them back. The checkpoint is
              set aside, and the next
              older one serves
    passing   a fact about this moment or this process, and not about the bytes: retried for a few seconds;
              then the start stops
    fatal     the same, but a retry does not help: the start stops at once

What is not in the table is passing: a start that stops can be repeated, a run that started from scratch
beside an intact checkpoint has thrown work away. Two mistakes this replaces: every errno of open() was damage
(one ESTALE cost the run), and only EIO of read() was (a bad sector that says ENODATA ended every start,
though an older checkpoint was whole).
"""

from __future__ import annotations

import enum
import errno
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from lastcall import errors

log = logging.getLogger("lastcall")
T = TypeVar("T")
# seconds before each further attempt: together as long as a server takes to come back
WAITS = (0.05, 0.15, 0.3, 0.5, 1.0)


class Meaning(enum.Enum):
    DAMAGE = "damage"
    PASSING = "passing"
    FATAL = "fatal"


@dataclass(frozen=True)
class Row:
    meaning: Meaning
    why: str
    again: bool = True  # whether a retry may succeed


def _gone(why: str) -> Row:
    return Row(Meaning.DAMAGE, why, again=False)


def _medium(why: str) -> Row:
    return Row(Meaning.DAMAGE, why)


def _passing(why: str) -> Row:
    return Row(Meaning.PASSING, why)


def _fatal(why: str) -> Row:
    return Row(Meaning.FATAL, why, again=False)


_UNKNOWN = _passing("not known to mean anything about the bytes")
TABLE: dict[int, Row] = {
    # The path is not a file with these bytes.
    errno.ENOENT: _gone("the file is missing"),
    errno.ENOTDIR: _gone("a file is where a folder was"),
    errno.EISDIR: _gone("a folder is where the file was"),
    errno.ELOOP: _gone("a link is where the file was, and links are not followed"),
    errno.ENXIO: _gone("a socket or a pipe is where the file was"),
    errno.ENODEV: _gone("a device is where the file was"),
    # The medium does not give the bytes back. Retried, since a cable or a controller may have caused it; then
    # it is damage.
    errno.EIO: _medium("the disk could not read it"),
    errno.ENODATA: _medium("the disk reports a medium error (as O_DIRECT reads of a bad sector do)"),
    errno.EREMOTEIO: _medium("the disk reports a target error"),
    errno.EILSEQ: _medium("the disk's own checksum of the sector does not match (T10 DIF)"),
    errno.EUCLEAN: _medium("the file system's own structures are damaged (EFSCORRUPTED)"),
    errno.EBADMSG: _medium("the file system's own checksum does not match (EFSBADCRC)"),
    # The file server, or the way to it.
    errno.ESTALE: _passing("the file server has forgotten its handle of the file"),
    errno.ETIMEDOUT: _passing("the file server did not answer in time"),
    errno.ENOTCONN: _passing("the connection to the file server is lost"),
    errno.ECONNRESET: _passing("the connection to the file server is lost"),
    errno.ECONNREFUSED: _passing("the file server refuses connections"),
    errno.ECONNABORTED: _passing("the connection to the file server is lost"),
    errno.EHOSTDOWN: _passing("the file server is down"),
    errno.EHOSTUNREACH: _passing("the file server cannot be reached"),
    errno.ENETUNREACH: _passing("the file server cannot be reached"),
    errno.ENETDOWN: _passing("the network is down"),
    errno.ESHUTDOWN: _passing("the file system was shut down, or its server was"),
    errno.EREMCHG: _passing("the file server has changed"),
    errno.EPROTO: _passing("the file server's answer was not understood"),
    errno.ENOLINK: _passing("the link to the file server is lost"),
    errno.ENOMEDIUM: _passing("the disk is not in its place"),
    # Who may read it. Root squash, an expired Kerberos ticket and a lost group look like this, too.
    errno.EACCES: _passing("this user may not read it: see who owns it (ls -l) and which user this is (id)"),
    errno.EPERM: _passing("this user may not read it: see who owns it (ls -l) and which user this is (id)"),
    errno.EKEYEXPIRED: _passing("the credentials for the file server have expired (kinit)"),
    errno.ENOKEY: _passing("the key that the file is encrypted with is not there"),
    # What this process or this machine has run out of.
    errno.EMFILE: _passing("this process has too many files open (ulimit -n)"),
    errno.ENFILE: _passing("this machine has too many files open"),
    errno.ENOMEM: _passing("out of memory"),
    errno.ENOBUFS: _passing("out of memory"),
    errno.EINTR: _passing("interrupted by a signal"),
    errno.EAGAIN: _passing("not now"),
    errno.EBUSY: _passing("another process is using it"),
    errno.ETXTBSY: _passing("another process is using it"),
    errno.EDEADLK: _passing("another process has locked it"),
    errno.ENOLCK: _passing("the file server has no locks left"),
    errno.ENOSPC: _passing("the disk is full (file systems that allocate on reading)"),
    errno.EDQUOT: _passing("the quota is used up (file systems that allocate on reading)"),
    # What no retry changes: the file system cannot do what was requested, or the request is invalid.
    errno.ENAMETOOLONG: _fatal("the path is too long for this file system"),
    errno.EINVAL: _fatal("the file system cannot read it in this way"),
    errno.ENOSYS: _fatal("the file system cannot read it in this way"),
    errno.EOPNOTSUPP: _fatal("the file system cannot read it in this way"),
    errno.EOVERFLOW: _fatal("the file is too large for this system"),
    errno.EROFS: _fatal("the file system is read-only"),
    errno.EBADF: _fatal("a fault in lastcall, or its file was closed by other code"),
    errno.EFAULT: _fatal("a fault in lastcall"),
}


def of(error: OSError) -> Row:
    """What it means."""
    return TABLE.get(error.errno or 0, _UNKNOWN)


def is_damage(error: OSError) -> bool:
    return of(error).meaning is Meaning.DAMAGE


def named(error: OSError) -> str:
    """In searchable form: `Stale file handle (ESTALE)`."""
    code = errno.errorcode.get(error.errno or 0)
    return f"{error.strerror or error}" + (f" ({code})" if code else "")


def reading(operation: Callable[[], T], said: str) -> T:
    """Returns the operation's result. CheckpointError if the bytes are damaged, UnreadableError if that is
    unknown; retried before, if that may help. `said`: what cannot be done with which file, the start of the
    sentence."""
    for attempt, wait in enumerate((*WAITS, None)):
        try:
            return operation()
        except OSError as error:
            if isinstance(error, errors.LastcallError):
                raise
            if wait is None or not of(error).again:
                raise verdict(error, said) from error
            if attempt == 0:
                log.warning("%s: %s. Retrying for %.0f s", said, named(error), sum(WAITS))
        time.sleep(wait)
    raise AssertionError("unreachable")


def verdict(error: OSError, said: str) -> errors.CheckpointError:
    """The error to raise for one that is final."""
    row = of(error)
    if row.meaning is Meaning.DAMAGE:
        return errors.CheckpointError(f"{said}: {error.strerror or error}")
    kind = errors.DeniedError if isinstance(error, PermissionError) else errors.UnreadableError
    return kind(
        f"{said}: {named(error)}: {row.why}. This does not mean that its bytes are damaged, so this run "
        "neither continues without the checkpoint nor starts from scratch. Start it again when the file can "
        "be read; to do without the checkpoint, move its folder away."
    )
