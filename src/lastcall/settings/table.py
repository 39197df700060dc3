"""The table of settings: one row each. Parsing, defaults, error messages, the table in the guide and the
search for misspelled names read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lastcall import parsing

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True)
class Setting:
    """One row: a field of a configuration, the variable that fills it, and what it may be."""

    field: str
    variable: str
    default: object
    parse: Callable[[object], object]
    allowed: str  # completes the sentence "Set it to ..."
    example: str  # as it is written in a shell
    alias: str | None = None  # another program's name for it; ours wins


_YES_OR_NO = "1 or 0 (true/false, yes/no, on/off)"

JIT = (
    Setting(
        "enabled", "LASTCALL_ENABLED", True, parsing.flag, _YES_OR_NO, "1", "RAY_TRAIN_JIT_CHECKPOINT_ENABLED"
    ),
    Setting(
        "kill_wait",
        "LASTCALL_KILL_WAIT_SECONDS",
        3.0,
        parsing.seconds,
        "a number of at least 0",
        "3.0",
        "RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT",
    ),
    Setting("grace", "LASTCALL_GRACE_SECONDS", 30.0, parsing.some_seconds, "a number greater than 0", "30.0"),
    Setting(
        "signals",
        "LASTCALL_SIGNALS",
        ("SIGTERM",),
        parsing.signals,
        f"one or more of {', '.join(parsing.SIGNALS)}, or none",
        "SIGTERM,SIGUSR1",
    ),
    Setting("stop_file", "LASTCALL_STOP_FILE", None, parsing.file, "the path of a file", "/tmp/stop"),
    Setting("rescue", "LASTCALL_RESCUE", True, parsing.flag, _YES_OR_NO, "1"),
    Setting("spare", "LASTCALL_SPARE", True, parsing.flag, _YES_OR_NO, "1"),
    Setting("guard", "LASTCALL_GUARD", False, parsing.flag, _YES_OR_NO, "1"),
    Setting(
        "guard_steps", "LASTCALL_GUARD_STEPS", None, parsing.positive, "a whole number of at least 1", "10"
    ),
    Setting(
        "guard_seconds", "LASTCALL_GUARD_SECONDS", None, parsing.some_seconds, "a number greater than 0", "30"
    ),
    Setting(
        "guard_folder", "LASTCALL_GUARD_FOLDER", "/dev/shm", parsing.text, "a folder in memory", "/dev/shm"
    ),
    Setting("huge_pages", "LASTCALL_HUGE_PAGES", True, parsing.flag, _YES_OR_NO, "1"),
    Setting(
        "threads",
        "LASTCALL_WRITER_THREADS",
        16,
        parsing.threads,
        f"a whole number from 1 to {parsing.MOST_THREADS}",
        "16",
    ),
    Setting(
        "ranks",
        "LASTCALL_RANKS",
        "together",
        parsing.one_of(("together", "separate")),
        "one of together, separate",
        "together",
    ),
    Setting(
        "on_hang", "LASTCALL_ON_HANG", "save", parsing.one_of(("save", "exit")), "one of save, exit", "save"
    ),
    Setting(
        "on_error",
        "LASTCALL_ON_ERROR",
        "save",
        parsing.one_of(("save", "leave")),
        "one of save, leave",
        "save",
    ),
    Setting(
        "hang_seconds", "LASTCALL_HANG_SECONDS", 30.0, parsing.some_seconds, "a number greater than 0", "30.0"
    ),
    Setting("exit_code", "LASTCALL_EXIT_CODE", 75, parsing.exit_code, "a whole number from 1 to 255", "75"),
    Setting(
        "log_level",
        "LASTCALL_LOG_LEVEL",
        "INFO",
        parsing.one_of(_LEVELS),
        f"one of {', '.join(_LEVELS)}",
        "INFO",
    ),
    Setting(
        "progress_port",
        "LASTCALL_PROGRESS_PORT",
        None,
        parsing.port,
        "a port from 0 to 65535 (0: any that is free)",
        "28080",
    ),
    Setting(
        "run_id",
        "LASTCALL_RUN_ID",
        None,
        parsing.text,
        "a name that no other run in this directory has",
        "exp1",
    ),
    Setting(
        "directory",
        "LASTCALL_DIRECTORY",
        None,
        parsing.text,
        "a folder that outlives the process",
        "/mnt/checkpoints/exp1",
    ),
    Setting(
        "unmatched",
        "LASTCALL_UNMATCHED",
        "refuse",
        parsing.one_of(("refuse", "allow")),
        "one of refuse, allow",
        "refuse",
    ),
    Setting("progress_push", "LASTCALL_PROGRESS_PUSH", True, parsing.flag, _YES_OR_NO, "1"),
    Setting(
        "mirror",
        "LASTCALL_MIRROR",
        None,
        parsing.place,
        "s3://BUCKET/PREFIX or file:///FOLDER",
        "s3://runs/exp1",
    ),
    Setting(
        "mirror_keys",
        "LASTCALL_MIRROR_KEYS",
        None,
        parsing.text,
        "a folder that a secret is mounted at",
        "/mnt/connection",
    ),
)

PERIODIC = (
    Setting(
        "save_strategy",
        "LASTCALL_SAVE_STRATEGY",
        "no",
        parsing.one_of(("no", "steps", "epoch")),
        "one of no, steps, epoch",
        "steps",
    ),
    Setting(
        "save_steps", "LASTCALL_SAVE_STEPS", None, parsing.positive, "a whole number of at least 1", "500"
    ),
    Setting(
        "save_total_limit",
        "LASTCALL_SAVE_TOTAL_LIMIT",
        None,
        parsing.positive,
        "a whole number of at least 1",
        "3",
    ),
    Setting("monitor", "LASTCALL_MONITOR", None, parsing.text, "the name of a reported metric", "eval_loss"),
    Setting("mode", "LASTCALL_MODE", "min", parsing.one_of(("min", "max")), "one of min, max", "min"),
    Setting("save_best_only", "LASTCALL_SAVE_BEST_ONLY", False, parsing.flag, _YES_OR_NO, "1"),
)
