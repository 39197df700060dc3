"""The settings of a run: the one place that reads the environment.

Each setting comes from the explicit argument, else from the environment, else from its default; `origins()`
says which. `JIT` and `PERIODIC` are the whole list; parsing, defaults, error messages and the search for
misspelled names read them. The sentence under each field says what it does: `python tools/settings_table.py
--write` copies it into docs/reference/settings.md. Text and proper values go through the same parser, so that
a configuration file which only knows text works too, and "false" is never true.
"""

from __future__ import annotations

import copy
import difflib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NoReturn

from lastcall import errors, parsing

SaveStrategy = Literal["no", "steps", "epoch"]
Mode = Literal["min", "max"]

DEFAULT_SAVE_STEPS = 500  # what Transformers uses
PREFIX = "LASTCALL_"
# Set by `lastcall run`, in torchrun, and by `lastcall drill --prove`, for the processes below.
INTERNAL = (
    "LASTCALL_REGISTRY",
    "LASTCALL_STORE",
    "LASTCALL_ATTEMPT",
    "LASTCALL_PROOF",
    "LASTCALL_HANDS_OVER",
)
LAUNCH = (  # read by `lastcall run`: notices/ and launch/platforms.py
    "LASTCALL_AWS_REBALANCE",
    "LASTCALL_AZURE_LEAD_SECONDS",
    "LASTCALL_AZURE_METADATA_ENDPOINT",
    "LASTCALL_REQUEUE_FILE",
    "LASTCALL_SLURM_LEAD_SECONDS",
)
S3_NAMES = (  # boto3's, and AWS_S3_ENDPOINT, which is that of OpenShift AI's data connections
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_DEFAULT_REGION",
    "AWS_S3_ENDPOINT",
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL",
)
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def fail(message: str) -> NoReturn:
    """Raise ConfigError. The message is written here: Python prints nothing for an uncaught SystemExit with a
    code."""
    if sys.stderr is not None:
        sys.stderr.write(f"lastcall: {message}\n")
    raise errors.ConfigError(message)


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


@dataclass(frozen=True, init=False)
class JITCheckpointConfig:
    """What happens when a notice comes.

    A `kill_wait` longer than the `grace` is refused where both were given, since they contradict each other.
    Where one is a default, both stay: the budget cuts the wait short, with a log line. No default is changed,
    so `origins()` never reports a made-up value.
    """

    enabled: bool
    """Off means off: no thread, no handler, no file."""
    kill_wait: float
    """Seconds after the notice before a save may start; training continues meanwhile."""
    grace: float
    """Seconds between the notice and the kill, unless the notice itself says."""
    signals: tuple[str, ...]
    """The signals that are notices: any of SIGTERM, SIGUSR1, SIGUSR2, SIGINT, SIGHUP; `none` for none at
    all."""
    stop_file: str | None
    """A file that is a notice once it appears: what a Kubernetes preStop hook can create where no signal gets
    through."""
    rescue: bool
    """Save the last completed step from a side thread when no boundary comes in time."""
    spare: bool
    """Keep preallocated space for the next checkpoint: faster saves, at the cost of one checkpoint's size on
    disk."""
    guard: bool
    """Keep a copy of the last boundary in shared memory, which the guardian in `lastcall run` saves if this
    process is killed. Also `protect(..., guard=True)`."""
    guard_steps: int | None
    """Steps between two such copies. With neither this nor `guard_seconds`, they cost at most a hundredth of
    the time."""
    guard_seconds: float | None
    """Seconds between two such copies."""
    guard_folder: str
    """Where the copies are kept: a folder that outlives the process, such as an emptyDir with medium Memory.
    It needs room for twice the state."""
    huge_pages: bool
    """Move large host tensors into huge pages during training, at a tenth of one thread's time: they are
    written a fifth faster."""
    threads: int
    """How many threads write a checkpoint; each has a buffer of 4 MB."""
    ranks: str
    """What the processes of torch.distributed are: one run in one directory (`together`), or each a run of
    its own (`separate`)."""
    on_hang: str
    """When a rank hangs, the others save. Then they wait for it (`save`), or exit so that the run is started
    again (`exit`)."""
    on_error: str
    """When an exception, Ctrl-C, `sys.exit()` or a closed terminal (SIGHUP) leaves the block: save the last
    completed step first (`save`), or leave at once (`leave`). With many ranks, an exception always makes all
    of them save."""
    hang_seconds: float
    """A rank hangs if it makes no progress for this many seconds, or for ten times the longest usual step if
    that is more."""
    exit_code: int
    """The exit code after a notice and a committed checkpoint; it asks the platform to run the job again."""
    log_level: str
    """The minimum level of log lines to show: DEBUG, INFO, WARNING, ERROR or CRITICAL."""
    progress_port: int | None
    """The port on which rank 0 serves its progress as JSON, for OpenShift AI's controller among others; none:
    no port."""
    run_id: str | None
    """The name of a Trainer's run; checkpoints of other runs are left alone. None: made from the model, the
    length of the data and the training arguments. Two runs of one name in one `output_dir` are the same run,
    and one resumes from the other."""
    directory: str | None
    """Where a Trainer's checkpoints go, with all else that it saves in its `output_dir`, whatever the script
    calls that. None: where the script says."""
    unmatched: str
    """When a checkpoint and `protect()` do not name the same models and optimizers: stop (`refuse`), or start
    these from scratch (`allow`)."""
    progress_push: bool
    """In a pod whose TrainJob asks for its status, rank 0 reports its progress to Kubeflow Trainer."""
    mirror: str | None
    """A second location for the checkpoints, `s3://BUCKET/PREFIX` or `file:///FOLDER`: they are uploaded
    after each commit, and downloaded where the directory has none that is as new."""
    mirror_keys: str | None
    """A folder with the mirror's keys in files named AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
    AWS_S3_ENDPOINT, ...: a mounted secret. Variables of these names win."""
    _origins: Mapping[str, str] = field(init=False, repr=False, compare=False)

    def __init__(
        self,
        enabled: bool | None = None,
        kill_wait: float | None = None,
        grace: float | None = None,
        signals: Sequence[str] | None = None,
        rescue: bool | None = None,
        spare: bool | None = None,
        guard: bool | None = None,
        guard_steps: int | None = None,
        guard_seconds: float | None = None,
        guard_folder: str | None = None,
        huge_pages: bool | None = None,
        threads: int | None = None,
        ranks: str | None = None,
        on_hang: str | None = None,
        hang_seconds: float | None = None,
        exit_code: int | None = None,
        log_level: str | None = None,
        progress_port: int | None = None,
        run_id: str | None = None,
        directory: str | None = None,
        progress_push: bool | None = None,
        stop_file: str | None = None,
        mirror: str | None = None,
        mirror_keys: str | None = None,
        unmatched: str | None = None,
        on_error: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        given = {
            "enabled": enabled,
            "kill_wait": kill_wait,
            "grace": grace,
            "signals": signals,
            "rescue": rescue,
            "spare": spare,
            "guard": guard,
            "guard_steps": guard_steps,
            "guard_seconds": guard_seconds,
            "guard_folder": guard_folder,
            "huge_pages": huge_pages,
            "threads": threads,
            "ranks": ranks,
            "on_hang": on_hang,
            "hang_seconds": hang_seconds,
            "exit_code": exit_code,
            "log_level": log_level,
            "progress_port": progress_port,
            "run_id": run_id,
            "directory": directory,
            "progress_push": progress_push,
            "stop_file": stop_file,
            "mirror": mirror,
            "mirror_keys": mirror_keys,
            "unmatched": unmatched,
            "on_error": on_error,
        }
        _fill(self, JIT, given, environ)
        if self.kill_wait > self.grace and "default" not in (
            self._origins["kill_wait"],
            self._origins["grace"],
        ):
            wait, limit = _name(self, "kill_wait"), _name(self, "grace")
            fail(
                f"{wait}={self.kill_wait} is longer than {limit}={self.grace}: "
                f"the kill would come before the save starts. Lower {wait} or raise {limit}."
            )

    def origins(self) -> dict[str, str]:
        """Where each value came from: "argument", the name of the variable, or "default"."""
        return dict(self._origins)


@dataclass(frozen=True, init=False)
class PeriodicCheckpointConfig:
    """When to make checkpoints without a notice, and how many to keep."""

    save_strategy: SaveStrategy
    """When to save: `no`, `steps` or `epoch`. Not given, it is `steps` where `save_steps` is given, else
    `no`."""
    save_steps: int | None
    """Steps between two saves, with `steps` only; 500 there unless given."""
    save_total_limit: int | None
    """How many checkpoints are kept; none keeps all. The last two valid ones and the best one are never
    removed, so 1 keeps two."""
    monitor: str | None
    """The reported metric that decides which checkpoint is the best; the best one is kept beyond the
    limit."""
    mode: Mode
    """Whether the best metric is the lowest (`min`) or the highest (`max`)."""
    save_best_only: bool
    """Make a periodic save only when `monitor` is better than ever before. Just-in-time saves are always
    made."""
    _origins: Mapping[str, str] = field(init=False, repr=False, compare=False)

    def __init__(
        self,
        save_strategy: SaveStrategy | None = None,
        save_steps: int | None = None,
        save_total_limit: int | None = None,
        monitor: str | None = None,
        mode: Mode | None = None,
        save_best_only: bool | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        given = {
            "save_strategy": save_strategy,
            "save_steps": save_steps,
            "save_total_limit": save_total_limit,
            "monitor": monitor,
            "mode": mode,
            "save_best_only": save_best_only,
        }
        origins = _fill(self, PERIODIC, given, environ)
        if self.save_steps is not None and origins["save_strategy"] == "default":
            object.__setattr__(self, "save_strategy", "steps")
            origins["save_strategy"] = origins["save_steps"]  # this one decided
        if self.save_steps is None and self.save_strategy == "steps":
            object.__setattr__(self, "save_steps", DEFAULT_SAVE_STEPS)
        if self.save_best_only and self.monitor is None:
            fail(
                f"{_name(self, 'save_best_only')}={self.save_best_only} needs a metric to determine the best "
                "checkpoint. Pass monitor='eval_loss' or: export LASTCALL_MONITOR=eval_loss"
            )

    def origins(self) -> dict[str, str]:
        """Where each value came from: "argument", the name of the variable, or "default"."""
        return dict(self._origins)


def changed(config: JITCheckpointConfig, **values: object) -> JITCheckpointConfig:
    """The same configuration with other values, which count as arguments."""
    other = copy.copy(config)
    for setting in JIT:
        if setting.field in values:
            value, origin = _resolve(setting, values[setting.field], {})
            object.__setattr__(other, setting.field, value)
            object.__setattr__(other, "_origins", {**other._origins, setting.field: origin})
    return other


def misplaced(name: str, value: object) -> str | None:
    """How to pass a setting that was given to protect() as if it were state; None if there is no setting of
    this name."""
    for rows, config in (
        (JIT, "config=lastcall.JITCheckpointConfig"),
        (PERIODIC, "periodic=lastcall.PeriodicCheckpointConfig"),
    ):
        for setting in rows:
            if name.lower() in (
                setting.field,
                setting.variable.lower(),
                setting.variable.lower().removeprefix("lastcall_"),
            ):
                return f"{config}({setting.field}={value!r:.100})"
    return None


def registry_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """The registry of training processes of the `lastcall run` above this process, if there is one."""
    folder = (os.environ if environ is None else environ).get("LASTCALL_REGISTRY")
    return Path(folder) if folder and os.path.isdir(folder) else None


def proof_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """The folder of the `lastcall drill --prove` that this process is part of."""
    folder = (os.environ if environ is None else environ).get("LASTCALL_PROOF")
    return Path(folder) if folder and os.path.isdir(folder) else None


def hands_over(environ: Mapping[str, str] | None = None) -> bool:
    """Whether `lastcall run --resume-args` above this process gives a restart the path of what was saved."""
    return (os.environ if environ is None else environ).get("LASTCALL_HANDS_OVER") == "1"


def stop_file(environ: Mapping[str, str] | None = None) -> str | None:
    """The stop file that the environment names: that of this container, whatever another container's settings
    are."""
    return (os.environ if environ is None else environ).get("LASTCALL_STOP_FILE", "").strip() or None


def s3_connection(keys: str | None, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The settings of the object store: from the environment, or from a folder where a secret is mounted."""
    environ = os.environ if environ is None else environ
    found = {}
    for name in S3_NAMES:
        try:
            said = environ.get(name) or (Path(keys, name).read_text().strip() if keys else "")
        except (OSError, ValueError):
            said = ""
        if said:
            found[name] = said
    return found


def launcher_store(environ: Mapping[str, str] | None = None) -> str | None:
    """The port and the secret of the store that the `lastcall run` above this process, if there is one, runs
    for the ranks."""
    return (os.environ if environ is None else environ).get("LASTCALL_STORE", "").strip() or None


def of_torchrun(environ: Mapping[str, str] | None = None) -> dict[str, str] | None:
    """The variables that torchrun sets for its workers; None if it is not above this process, or has no store
    of its own."""
    environ = os.environ if environ is None else environ
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    if not all(environ.get(name) for name in names) or environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return {name: environ[name] for name in names}


@dataclass(frozen=True)
class Attempt:
    """The number of torchrun's attempt. `agreed`: all machines use the same number; otherwise each has
    counted on its own."""

    name: str = "0"
    agreed: bool = True


def attempt(environ: Mapping[str, str] | None = None) -> Attempt:
    """The first attempt, if the ranks are never restarted. If torchrun is not patched (auto/attempts.py), its
    own count."""
    environ = os.environ if environ is None else environ
    if told := environ.get("LASTCALL_ATTEMPT"):
        return Attempt(told)
    counted = environ.get("TORCHELASTIC_RESTART_COUNT") or "0"
    return Attempt(counted, environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE"))


def torchrun_id(environ: Mapping[str, str] | None = None) -> str | None:
    """torchrun's ID of the run of this worker; None if torchrun is not above it."""
    return (os.environ if environ is None else environ).get("TORCHELASTIC_RUN_ID") or None


def host_of_rank_0(size: int, environ: Mapping[str, str] | None = None) -> str:
    """The address of rank 0 for a run with this many ranks."""
    environ = os.environ if environ is None else environ
    if environ.get("LOCAL_WORLD_SIZE") == str(size):  # all of them are on one machine
        return "127.0.0.1"
    return environ.get("MASTER_ADDR") or os.uname().nodename


@dataclass(frozen=True)
class StatusServer:
    """Where to report a TrainJob's progress to Kubeflow Trainer, as its controller sets it in the pod
    (KEP-2779)."""

    url: str
    ca_file: str | None
    token_file: str


def status_server(environ: Mapping[str, str] | None = None) -> StatusServer | None:
    """None outside of a TrainJob, or if the controller's feature gate is off."""
    environ = os.environ if environ is None else environ
    url, token = environ.get("KUBEFLOW_TRAINER_SERVER_URL"), environ.get("KUBEFLOW_TRAINER_SERVER_TOKEN")
    return (
        StatusServer(url, environ.get("KUBEFLOW_TRAINER_SERVER_CA_CERT") or None, token)
        if url and token
        else None
    )


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """A message for each LASTCALL_* variable that nothing reads. The values are left out: they may be
    secret."""
    known = [setting.variable for setting in JIT + PERIODIC]
    known += INTERNAL + LAUNCH

    def nearest(name: str) -> str:
        # LASTCALL_GRACE: the unit was forgotten
        if longer := [other for other in known if other.startswith(name)]:
            return min(longer, key=len)
        return max(known, key=lambda other: difflib.SequenceMatcher(None, name, other).ratio())

    return [
        f"{name} is not a setting of lastcall and is ignored. Did you mean {nearest(name)}?"
        for name in sorted(os.environ if environ is None else environ)
        if name.startswith(PREFIX) and name not in known
    ]


def _fill(
    config: object,
    settings: Sequence[Setting],
    given: Mapping[str, object],
    environ: Mapping[str, str] | None,
) -> dict[str, str]:
    """Set every field of a frozen configuration, and return where each value came from."""
    origins: dict[str, str] = {}
    for setting in settings:
        value, origin = _resolve(setting, given[setting.field], os.environ if environ is None else environ)
        object.__setattr__(config, setting.field, value)
        origins[setting.field] = origin
    object.__setattr__(config, "_origins", origins)
    return origins


def _resolve(setting: Setting, given: object, environ: Mapping[str, str]) -> tuple[object, str]:
    if given is not None:
        try:
            return setting.parse(given), "argument"
        except ValueError as error:
            example = f"{setting.field}={_literal(setting)}"
            fail(f"{setting.field}={given!r} {error}. Set it to {setting.allowed}, for example: {example}")
    for name in filter(None, (setting.variable, setting.alias)):
        text = environ.get(name, "")
        if not text.strip():
            continue
        try:
            return setting.parse(text), name
        except ValueError as error:
            fail(
                f"{name}={text!r} {error}. Set it to {setting.allowed}, for example: export "
                f"{name}={setting.example}"
            )
    return setting.default, "default"


def _literal(setting: Setting) -> str:
    """The example as it is written in Python."""
    return repr(setting.parse(setting.example))


def _name(config: JITCheckpointConfig | PeriodicCheckpointConfig, field_name: str) -> str:
    """The user's name for a setting: LASTCALL_GRACE_SECONDS or grace."""
    origin = config.origins()[field_name]
    return field_name if origin in ("argument", "default") else origin
