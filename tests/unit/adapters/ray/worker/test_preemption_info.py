from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from ray.train.v2._internal.execution.preemption import (
    PreemptionContext,
    PreemptionInfo,
    merge_preemption_info,
)

from lastcall.adapters.ray.worker.preemption_info import PreemptionInfoWriter


@pytest.fixture
def context() -> Any:
    return SimpleNamespace(preemption_context=PreemptionContext())


@pytest.fixture
def told() -> list[tuple[float | None, dict[str, list[int]]]]:
    return []


@pytest.fixture
def writer(context: Any, told: list[Any]) -> PreemptionInfoWriter:
    writer = PreemptionInfoWriter(context)
    writer.begin(lambda left, nodes: told.append((left, nodes)))
    return writer


def test_what_ray_writes_is_heard_at_once(
    writer: PreemptionInfoWriter, context: Any, told: list[Any]
) -> None:
    context.preemption_context.preemption_info = PreemptionInfo(int((time.time() + 30) * 1000), {"node": [1]})
    ((left, nodes),) = told
    assert 25 < left <= 30 and nodes == {"node": [1]}


def test_a_drain_without_a_deadline_has_none(
    writer: PreemptionInfoWriter, context: Any, told: list[Any]
) -> None:
    context.preemption_context.preemption_info = PreemptionInfo(None, {"node": [1]})
    assert told == [(None, {"node": [1]})]


def test_a_drain_that_was_announced_before_we_came_is_heard_too(told: list[Any]) -> None:
    context = SimpleNamespace(preemption_context=PreemptionContext(PreemptionInfo(None, {"node": [0]})))
    PreemptionInfoWriter(context).begin(lambda left, nodes: told.append((left, nodes)))
    assert told == [(None, {"node": [0]})]


def test_what_we_say_is_seen_by_the_controller_and_not_heard_by_us(
    writer: PreemptionInfoWriter, context: Any, told: list[Any]
) -> None:
    writer.write(20.0, {"here": [0]})
    info = context.preemption_context.preemption_info
    assert info.preempted_ranks == [0] and info.deadline_ms > time.time() * 1000 + 15_000
    assert told == []


def test_when_all_is_done_the_deadline_is_now_and_the_nodes_stay_known(
    writer: PreemptionInfoWriter, context: Any
) -> None:
    writer.write(20.0, {"here": [0]})
    before = context.preemption_context.preemption_info
    writer.write(0.0, {})
    merged = merge_preemption_info(before, context.preemption_context.preemption_info)
    assert merged.deadline_ms <= time.time() * 1000 and merged.preempted_node_to_ranks == {"here": [0]}


def test_after_the_end_nothing_is_heard(writer: PreemptionInfoWriter, context: Any, told: list[Any]) -> None:
    writer.end()
    context.preemption_context.preemption_info = PreemptionInfo(None, {"node": [1]})
    assert told == []


def test_a_ray_without_preemption_is_left_alone() -> None:
    context = SimpleNamespace()
    writer = PreemptionInfoWriter(context)
    writer.begin(lambda left, nodes: None)
    writer.write(1.0, {})
    assert writer.degraded and vars(context) == {}
