"""The remedy fits the reason, whatever the words of the command are."""

import pytest

from lastcall.kube.inject import exit_codes


def warning(text: str) -> str | None:
    return exit_codes.lost({"command": ["bash", "-c", text]}, ())


@pytest.mark.parametrize("text", ["python train.py | tee log", "python train.py | cat | tee log"])
def test_a_pipe_needs_pipefail(text: str) -> None:
    found = warning(text)
    assert found is not None and "start it with: set -o pipefail;" in found


@pytest.mark.parametrize(
    "text",
    ["python train.py; echo pipe", "python train.py || echo pipeline done", "python train.py & echo pipe"],
)
def test_the_word_pipe_in_a_command_is_no_pipe(text: str) -> None:
    found = warning(text)
    assert found is not None and "end it with: exec python ..." in found


def test_a_code_that_is_kept_gets_no_warning() -> None:
    assert warning("set -o pipefail; python train.py | tee log") is None
    assert exit_codes.lost({"command": ["python", "train.py"]}, ()) is None
    assert exit_codes.lost({"command": ["python", 7]}, ()) is None


def test_a_long_command_does_not_push_the_remedy_out() -> None:
    found = warning(f"python train.py | tee {'x' * 500}")
    assert found is not None and "set -o pipefail" in found and len(found) < 300
