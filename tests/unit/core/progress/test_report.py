"""What the progress page says of a run, from its events."""

from __future__ import annotations

from lastcall.core.progress.report import RunState


def test_f15_a_periodic_save_during_the_kill_wait_is_no_answer_to_the_notice() -> None:
    """F15: the page says "saved" only once the notice is answered."""
    standing = RunState()
    standing.tell(0.0, "start", {"incarnation": 1})
    standing.tell(1.0, "notice", {"source": "signal", "reason": "SIGTERM"})
    standing.tell(2.0, "save-begins", {"save": "periodic"})
    standing.tell(3.0, "committed", {"save": "periodic", "path": "checkpoint-40", "step": 40, "exact": True})
    assert standing.state == "running" and standing.checkpoint is not None
    standing.tell(4.0, "committed", {"save": "jit", "path": "checkpoint-42", "step": 42, "exact": True})
    assert standing.state == "saved"
