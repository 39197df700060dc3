"""protect(model=..., optimizer=...) in a train function."""

from __future__ import annotations

import logging
from typing import Any

from lastcall.adapters.ray.saves import fallback

log = logging.getLogger("lastcall")


def protect(**state: Any) -> None:
    """Name what is saved when a notice comes and the script has no save of its own; what the last incarnation
    saved is restored now.

    `state`: anything with state_dict and load_state_dict, tensors, and dicts or lists of plain values, which
    are changed in place: keep the epoch in one (progress = {"epoch": 0}), so that it is restored.
    """
    wrong = [name for name, value in state.items() if not _fits(value)]
    if wrong:
        raise TypeError(
            f"{', '.join(wrong)} cannot be restored in place. Pass objects with state_dict and "
            "load_state_dict, tensors, dicts or lists: progress={'epoch': 0} instead of epoch=0"
        )
    try:
        ours = fallback.current()
    except RuntimeError:
        raise RuntimeError(
            "protect() belongs in the function that Ray Train runs: call it there, after the model is made"
        ) from None
    if ours is None:
        log.warning("This run is not protected: set RAY_TRAIN_JIT_CHECKPOINT_ENABLED=1 where the driver runs")
        return
    ours.name(state)


def _fits(value: object) -> bool:
    return (
        isinstance(value, dict | list)
        or hasattr(value, "copy_")
        or (hasattr(value, "state_dict") and hasattr(value, "load_state_dict"))
    )
