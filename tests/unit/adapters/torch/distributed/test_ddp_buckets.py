"""DDP's buckets after a restore. With real ranks: whether the bits are those of a run that was not
interrupted. With one: the rest."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from helpers.processes.forkserver import environment
from lastcall.adapters.torch.distributed import ddp_buckets
from lastcall.adapters.torch.distributed.ddp_buckets import Layouts

RANKS = 3
SMALL = 0.0003


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What each rank saw, of all cases: they are started once."""
    script = Path(__file__).with_name("bucket_ranks.py")
    done = subprocess.run(
        [sys.executable, script, str(RANKS)], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", ["one bucket", "several buckets", "gradients in buckets"])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(
    ranks: list[dict[str, Any]], case: str
) -> None:
    whole = ranks[0][case]["whole"]
    assert all(found[case]["whole"] == whole for found in ranks)
    assert ranks[0][case]["back"] == {"1": whole, "2": whole, "4": whole}
    assert ranks[0][case]["without"] != whole, "there was nothing to bring back: the test proves nothing"


def test_a_static_graph_is_brought_back_from_its_second_step_on(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["static graph"]
    assert found["back"]["2"] == found["back"]["4"] == found["whole"]


def test_buckets_that_never_change_are_not_saved(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["unused parameters"]
    assert found["settled"] and found["document"] == []
    assert set(found["back"].values()) == {found["whole"]}


def test_all_ranks_obey_the_first_whatever_they_have_saved(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        saved, from_first, from_second = found["only first"]
        assert len(saved[0]) > 1
        assert from_first == saved
        assert from_second == []


# ---- one rank ----------------------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrapped(**options: Any) -> Any:
    net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    return DistributedDataParallel(net, **{"bucket_cap_mb": SMALL, **options})


def train(wrapper: Any, steps: int) -> None:
    for _ in range(steps):
        wrapper(torch.ones(2, 8)).sum().backward()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    "options", [{}, {"bucket_cap_mb": None}, {"bucket_cap_mb": 0.001}, {"static_graph": True}]
)
def test_the_layout_is_known_before_it_is_made(options: dict[str, Any]) -> None:
    wrapper = wrapped(**options)
    train(wrapper, 2 if "static_graph" in options else 1)
    before = ddp_buckets.order(wrapper)
    assert not wrapper._has_rebuilt_buckets
    train(wrapper, 1)
    assert wrapper._has_rebuilt_buckets
    assert before == ddp_buckets.order(wrapper) is not None


@pytest.mark.usefixtures("group")
def test_a_layout_is_looked_for_until_it_has_been_made() -> None:
    wrapper = wrapped()
    layouts = Layouts([wrapper])
    layouts.look()
    assert layouts.document() == [] and not layouts.settled
    train(wrapper, 1)
    layouts.look()
    assert layouts.document() and not layouts.settled
    train(wrapper, 1)
    layouts.look()
    assert layouts.document() and layouts.settled


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("view", [False, True])
def test_gradients_randomness_and_hooks_of_the_user_are_left_alone(view: bool) -> None:
    wrapper = wrapped(gradient_as_bucket_view=view)
    heard: list[object] = []
    for parameter in wrapper.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
        parameter.register_hook(heard.append)
        parameter.register_post_accumulate_grad_hook(heard.append)
    randomness = torch.get_rng_state()
    saved = [[[5, 0], [1, 4], [2, 3]]]
    layouts = Layouts([wrapper])
    layouts.put_back(saved)
    assert layouts.document() == saved
    assert all(bool((parameter.grad == 3.0).all()) for parameter in wrapper.parameters())
    assert torch.equal(torch.get_rng_state(), randomness) and not heard
    train(wrapper, 1)
    assert len(heard) == 12
    assert all(bool((parameter.grad != 3.0).any()) for parameter in wrapper.parameters())


@pytest.mark.usefixtures("group")
def test_a_checkpoint_right_after_the_restore_has_the_buckets_again() -> None:
    saved = [[[5, 4, 3], [2, 1, 0]]]
    layouts = Layouts([wrapped()])
    layouts.put_back(saved)
    layouts.look()
    assert layouts.document() == saved


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    "saved",
    [
        [],
        None,
        "x",
        [None],
        [[[0, 1]]],
        [[[0, 1, 2, 3, 4, 4]]],
        [[[0, 1, 2, 3, 4, "5"]]],
        [[[0, 1, 2, 3, 4, 5], []]],
        [[5]],
    ],
)
def test_a_layout_that_does_not_fit_is_left_out(saved: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lastcall")
    wrapper = wrapped()
    reducer, layouts = wrapper.reducer, Layouts([wrapper])
    layouts.put_back(saved)
    assert wrapper.reducer is reducer and layouts.document() == []
    assert "Sequential starts with new buckets: the checkpoint has none that fit" in caplog.text


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("builtin", [False, True])
def test_a_wrapper_with_a_communication_hook_is_left_alone(builtin: bool) -> None:
    wrapper = wrapped()
    if builtin:
        wrapper._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    else:
        wrapper.register_comm_hook(None, default_hooks.allreduce_hook)
    reducer, layouts = wrapper.reducer, Layouts([wrapper])
    layouts.put_back([[[5, 4, 3], [2, 1, 0]]])
    assert layouts.settled and wrapper.reducer is reducer


@pytest.mark.usefixtures("group")
def test_ranks_that_cannot_agree_keep_their_buckets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("Connection closed by peer")

    wrapper = wrapped()
    reducer = wrapper.reducer
    monkeypatch.setattr(dist, "broadcast", broken)
    Layouts([wrapper]).put_back([[[5, 4, 3], [2, 1, 0]]])
    assert wrapper.reducer is reducer and "Connection closed by peer" in caplog.text


@pytest.mark.usefixtures("group")
def test_wrappers_are_in_the_order_of_the_state() -> None:
    first, second, third, twice = wrapped(), wrapped(), wrapped(), wrapped()
    again = DistributedDataParallel(twice.module)
    state = [*second.parameters(), *twice.parameters(), *first.parameters()]
    assert ddp_buckets.sorted_by([third, again, first, second, twice], state) == (second, first)
