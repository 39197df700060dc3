"""The two configurations that a user passes, and how a value gets into one: the explicit argument, else the
environment, else the default. Text and proper values go through the same parser, so that a configuration file
which only knows text works too, and "false" is never true.

The sentence under each field says what it does: `python tools/settings_table.py --write` copies it into
docs/reference/settings.md.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn

from lastcall import errors
from lastcall.settings import table
from lastcall.settings.table import Setting

SaveStrategy = Literal["no", "steps", "epoch"]
Mode = Literal["min", "max"]

DEFAULT_SAVE_STEPS = 500  # what Transformers uses


def fail(message: str) -> NoReturn:
    """Raise ConfigError. The message is written here: Python prints nothing for an uncaught SystemExit with a
    code."""
    if sys.stderr is not None:
        sys.stderr.write(f"lastcall: {message}\n")
    raise errors.ConfigError(message)


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
        _fill(self, table.JIT, locals(), environ)
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
        origins = _fill(self, table.PERIODIC, locals(), environ)
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
    for setting in table.JIT:
        if setting.field in values:
            value, origin = _resolve(setting, values[setting.field], {})
            object.__setattr__(other, setting.field, value)
            object.__setattr__(other, "_origins", {**other._origins, setting.field: origin})
    return other


def misplaced(name: str, value: object) -> str | None:
    """How to pass a setting that was given to protect() as if it were state; None if there is no setting of
    this name."""
    for rows, config in (
        (table.JIT, "config=lastcall.JITCheckpointConfig"),
        (table.PERIODIC, "periodic=lastcall.PeriodicCheckpointConfig"),
    ):
        for setting in rows:
            if name.lower() in (
                setting.field,
                setting.variable.lower(),
                setting.variable.lower().removeprefix("lastcall_"),
            ):
                return f"{config}({setting.field}={value!r:.100})"
    return None


def _fill(
    config: object,
    settings: Sequence[Setting],
    given: Mapping[str, object],
    environ: Mapping[str, str] | None,
) -> dict[str, str]:
    """Set every field of a frozen configuration, and return where each value came from. `given` may have
    other names, too: those that its caller has in its `locals()`."""
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
