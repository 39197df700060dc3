"""Every error lastcall raises on purpose.

LastcallError
├── ConfigError        a setting is wrong; also a ValueError; exits with code 78
├── StateError         the state handed to protect() cannot be saved; also a TypeError; exits with 78 if it
                       ends a start
├── MismatchError      the checkpoint does not fit the live state; also a ValueError; exits with 78 if it ends
                       a start
├── CheckpointError    a checkpoint is damaged or hostile; also a ValueError
│   └── UncheckedError ... or may be intact: unknown here. Never set aside, never replaced by a start from
    scratch
│       ├── UnreadableError ... because the file system could not read it (DeniedError: this user may not);
        storage.errnos
│       └── FormatError     ... because another version of lastcall wrote it
├── SaveError          a save could not be completed; what was committed before is intact
│   ├── NoSpaceError   ... because the disk is full
│   └── DeadlineError  ... because the time ran out
├── BusyError          another process is running in this directory
├── StorageError       an object store could not be reached, or a request to it failed
│   └── StorageRefused ... and a retry will not help: credentials, permissions, a missing bucket
├── StoreLost          the store through which the ranks agree cannot be reached
└── RanksError         the ranks of a run do not fit together, or one of them did not join; the message names
                       it
Preempted              not an error: leaves the training loop after a notice was handled; a SystemExit
"""

from __future__ import annotations

EXIT_CONFIG = 78  # sysexits.h EX_CONFIG


class LastcallError(Exception):
    """Base of all errors that lastcall raises on purpose."""

    exit_code = 1
    """The exit code of a process whose start ends with this error uncaught. EXIT_CONFIG: running it again
    will not help."""


class ConfigError(LastcallError, ValueError, SystemExit):
    """A setting is wrong. It is a SystemExit too, so that an uncaught one leaves with code 78, which
    launchers know not to retry."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = EXIT_CONFIG


class StateError(LastcallError, TypeError):
    """Something passed to protect() cannot be saved; the message names the path of the leaf."""

    exit_code = EXIT_CONFIG


class MismatchError(LastcallError, ValueError):
    """The checkpoint is intact, but does not fit the live state (another model, another shape)."""

    exit_code = EXIT_CONFIG


class CheckpointError(LastcallError, ValueError):
    """A checkpoint's files are damaged or malicious."""


class UncheckedError(CheckpointError):
    """It is unknown here whether a checkpoint is intact: the library for its digests is not installed. A run
    does not ignore it: it would resume from an older one, or start from scratch, beside one that is probably
    good."""

    exit_code = EXIT_CONFIG


class UnreadableError(UncheckedError, OSError):
    """A checkpoint could not be read, for a reason that says nothing about its bytes: an unreachable file
    server, too many open files."""


class DeniedError(UnreadableError, PermissionError):
    """... because this user may not read it."""


class FormatError(UncheckedError):
    """A checkpoint is intact, but in a format that this version of lastcall does not read."""


class SaveError(LastcallError):
    """A save could not be completed. Checkpoints committed before are intact."""


class NoSpaceError(SaveError):
    """The disk is full."""


class DeadlineError(SaveError):
    """The time ran out before the checkpoint was durable."""


class BusyError(LastcallError):
    """Another process is running in this directory."""


class StorageError(LastcallError):
    """An object store, or a folder that is used like one, could not be reached, or a request to it failed."""


class StorageRefused(StorageError):
    """A retry would not help: the credentials, their permissions, or the name of the bucket are wrong."""


class StoreLost(LastcallError):
    """The store through which the ranks of a run agree cannot be reached. A local save never depends on
    it."""


class RanksError(LastcallError):
    """The ranks of a run do not fit together (different directories or states), or one of them did not
    join."""


class Preempted(SystemExit):
    """Leaves the training loop after a notice was handled. `code` is the exit code that the platform
    needs."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(code)
        self.message = message

    def __str__(self) -> str:
        return self.message
