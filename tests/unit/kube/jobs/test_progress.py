from __future__ import annotations

import pytest

from helpers.kube.fake_kubectl import message
from lastcall.kube.jobs import progress


@pytest.mark.parametrize(
    "text", ["", "progress {}", "run /a\nprogress {", "run /a\n[]\nnull\n{\n", "\x00\xff"]
)
def test_what_a_container_prints_may_be_anything(text: str) -> None:
    assert all(run.directory == "/a" and run.progress == {} for run in progress.parse(text))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", None),
        ("out of memory", None),
        ("[1]", None),
        ('{"state": 1}', None),
        ('{"state": ["saved"]}', None),
        (message("running"), None),
        (message("saved"), ("saved", "saved")),
        (message("saved", "checkpoint-3", exact=False), ("saved", "saved checkpoint-3 (not exact)")),
        (
            '{"state": "saved", "checkpoint": {"path": "c", "kind": "jit", "exact": [1]}}',
            ("saved", "saved c"),
        ),
        (
            '{"state": "saved", "checkpoint": {"path": "c", "kind": "periodic", "step": 3}}',
            ("saved", "saved"),
        ),
        (
            '{"state": "saved", "checkpoint": {"path": "c", "step": 3}, "currentStep": 3}',
            ("saved", "saved c"),
        ),
        ('{"state": "saved", "checkpoint": ["c"]}', ("saved", "saved")),
        (message("not saved", because="no space"), ("not saved", "not saved: no space")),
        (
            message("finished", "checkpoint-9"),
            ("finished", "finished; newest checkpoint: checkpoint-9 (exact)"),
        ),
        (message("failed"), ("failed", "failed")),
    ],
)
def test_how_a_run_ended_is_read_from_the_message_of_its_container(
    text: str, found: tuple[str, str] | None
) -> None:
    assert progress.ending(text) == found
