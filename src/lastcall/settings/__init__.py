"""The settings of a run: the one place that reads the environment.

`table` has one row for each setting, `configurations` the two classes that a user passes and how their values
are found, `environment` what else the environment says. Imports errors and parsing only.
"""

from lastcall.settings.configurations import (
    DEFAULT_SAVE_STEPS,
    JITCheckpointConfig,
    Mode,
    PeriodicCheckpointConfig,
    SaveStrategy,
    changed,
    fail,
    misplaced,
)
from lastcall.settings.environment import (
    INTERNAL,
    LAUNCH,
    PREFIX,
    S3_NAMES,
    TERMINATION_LOG,
    Attempt,
    StatusServer,
    attempt,
    hands_over,
    host_of_rank_0,
    launcher_store,
    of_torchrun,
    proof_folder,
    registry_folder,
    s3_connection,
    status_server,
    stop_file,
    termination_log,
    torchrun_id,
    unknown_variables,
)
from lastcall.settings.table import JIT, PERIODIC, Setting

__all__ = [
    "DEFAULT_SAVE_STEPS",
    "INTERNAL",
    "JIT",
    "LAUNCH",
    "PERIODIC",
    "PREFIX",
    "S3_NAMES",
    "TERMINATION_LOG",
    "Attempt",
    "JITCheckpointConfig",
    "Mode",
    "PeriodicCheckpointConfig",
    "SaveStrategy",
    "Setting",
    "StatusServer",
    "attempt",
    "changed",
    "fail",
    "hands_over",
    "host_of_rank_0",
    "launcher_store",
    "misplaced",
    "of_torchrun",
    "proof_folder",
    "registry_folder",
    "s3_connection",
    "status_server",
    "stop_file",
    "termination_log",
    "torchrun_id",
    "unknown_variables",
]
