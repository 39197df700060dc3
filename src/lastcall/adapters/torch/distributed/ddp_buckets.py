"""Which gradients share a bucket of DistributedDataParallel, and in which order: brought back with the rest.

A wrapper begins with one layout of its buckets, and makes another after its first backward, in the order in
which the gradients came. A ring adds up the ranks' numbers in an order that depends on where in its bucket a
number lies. So with three ranks or more, a resumed step in the first layout has other bits than the same step
of a run that was not interrupted (measured with gloo; with two, a + b is b + a).

Discarded: to send zeros through the wrapper's hooks in the saved order, and have it rebuild. The user's hooks
on parameters would run (an optimizer inside backward() would step), a static graph would count it as an
iteration, and sparse gradients would not fit. Instead the wrapper gets a new Reducer, made as DDP makes one
when it is unpickled, with the saved layout to begin with. After its first backward it rebuilds into the same.

Not brought back: a static graph at step 1. It takes note of the order in its second backward.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

log = logging.getLogger("lastcall")
dist: Any = torch.distributed  # most of what is needed here is not declared

Layout = list[list[int]]  # the numbers of the parameters in each bucket, as DDP counts them
_NEEDED = (
    "_build_params_for_reducer",
    "_build_debug_param_to_name_mapping",
    "_get_ddp_logging_data",
    "_has_rebuilt_buckets",
)
_HELPER = ["parameters", "expect_sparse_gradient", "param_to_name_mapping", "static_graph"]


class Layouts:
    """The layouts of a run's wrappers, as far as they are known. `look` is for the training thread between
    two steps: it takes the reducer's lock, which a backward holds while it waits for other ranks. The rest is
    for any thread."""

    def __init__(self, wrappers: Sequence[DistributedDataParallel] = ()) -> None:
        self.wrappers = tuple(wrappers)
        self._known: list[Layout | None] = [None] * len(self.wrappers)
        self._open = [place for place, wrapper in enumerate(self.wrappers) if unfit(wrapper) == ""]

    @property
    def settled(self) -> bool:
        """Whether nothing that is known will change any more."""
        return not self._open

    def look(self) -> None:
        for place in list(self._open):
            found = order(self.wrappers[place])
            if found is not None:
                self._known[place] = found
                if self.wrappers[place]._has_rebuilt_buckets:
                    self._open.remove(place)

    def document(self) -> list[Layout | None]:
        """JSON for the document of the run; empty while there is nothing to say."""
        return list(self._known) if any(self._known) else []

    def put_back(self, saved: object) -> None:
        """Give each wrapper the layout that the first rank of its group has saved. Every rank of the group
        must call it, whatever it has saved itself (it is one small broadcast a wrapper): a rank with a layout
        of its own would add up other gradients."""
        kept = saved if isinstance(saved, list) else []
        for place in list(self._open):
            wrapper: Any = self.wrappers[place]
            parameters, sparse = wrapper._build_params_for_reducer()
            mine = _checked(kept[place] if place < len(kept) else None, len(parameters))
            try:
                layout = _of_first(wrapper, len(parameters), mine)
            except RuntimeError as error:
                # another rank is gone: the first step will say so where it can be dealt with
                log.warning("the ranks could not agree on the buckets of %s: %s", _name(wrapper), error)
                return
            if layout is None:
                log.info("%s starts with new buckets: the checkpoint has none that fit", _name(wrapper))
                continue
            _install(wrapper, parameters, sparse, layout)
            self._known[place] = layout


def sorted_by(
    wrappers: Iterable[DistributedDataParallel], tensors: Iterable[torch.Tensor]
) -> tuple[DistributedDataParallel, ...]:
    """The wrappers in the order in which all ranks have them: that of their first parameters in the state.
    Those that have none there are left out, and so are those that share it, which nothing tells apart."""
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    found: dict[int, list[DistributedDataParallel]] = {}
    for wrapper in wrappers:
        place = min((places[id(p)] for p in wrapper._module_parameters if id(p) in places), default=None)
        if place is not None:
            found.setdefault(place, []).append(wrapper)
    return tuple(found[place][0] for place in sorted(found) if len(found[place]) == 1)


def order(wrapper: Any) -> Layout | None:
    """The layout that the next backward will have, or None where it is still the first one. No collective.
    See Layouts.look()."""
    wrapper.logger.set_runtime_stats_and_log()  # otherwise it learns of a rebuild one forward later
    told = wrapper._get_ddp_logging_data()
    if wrapper._has_rebuilt_buckets:
        layout = [_numbers(one) for one in told.get("rebuilt_per_bucket_param_indices", "").split(",")]
        return _checked(layout, sum(map(len, layout)))
    came = _numbers(told.get("prev_iteration_grad_ready_order_indices", "").replace(",", " "))
    if not came:
        return None
    parameters, sparse = wrapper._build_params_for_reducer()
    if _checked([came], len(parameters)) is None:
        return None
    # The first backward is over, and the next forward will rebuild.
    arranged, _ = dist._compute_bucket_assignment_by_size(
        [parameters[number] for number in came], _limits(wrapper), sparse, came
    )
    return [list(bucket) for bucket in arranged]


def unfit(wrapper: Any) -> str:
    """Why a wrapper's buckets are left to it; empty if they are not. The same on all ranks."""
    if getattr(wrapper, "reducer", None) is None or getattr(wrapper, "_use_python_reducer", False):
        return "it has no reducer of its own"
    if wrapper.find_unused_parameters and not wrapper.static_graph:
        return "it keeps its first buckets"
    if wrapper._comm_hooks or "comm_hook" in wrapper._get_ddp_logging_data():
        return "its communication hook may know the buckets"
    if not all(hasattr(wrapper, name) for name in _NEEDED) or not hasattr(
        wrapper.reducer, "_remove_autograd_hooks"
    ):
        return "this version of torch makes them in another way"
    if list(inspect.signature(wrapper._ddp_init_helper).parameters) != _HELPER:
        return "this version of torch makes them in another way"
    return ""


def _limits(wrapper: Any) -> list[int]:
    """How large the buckets may become, as the Reducer has it for a rebuild."""
    each = getattr(wrapper, "bucket_bytes_cap_list", ())
    first = (
        dist._DEFAULT_FIRST_BUCKET_BYTES
        if getattr(wrapper, "bucket_bytes_cap_default", False)
        else wrapper.bucket_bytes_cap
    )
    return list(each) or [first, wrapper.bucket_bytes_cap]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split()]


def _checked(layout: object, count: int) -> Layout | None:
    """A layout if it is one of so many parameters: each is in one bucket."""
    if not isinstance(layout, list) or not all(isinstance(bucket, list) and bucket for bucket in layout):
        return None
    flat = [number for bucket in layout for number in bucket]
    fits = all(type(number) is int for number in flat) and sorted(flat) == list(range(count))
    return layout if fits and count > 0 else None


def _of_first(wrapper: Any, count: int, mine: Layout | None) -> Layout | None:
    """What the first rank of the group has, in as many numbers whatever it is."""
    message = torch.zeros(2 * count, dtype=torch.int64)
    if mine is not None:
        message[:count] = torch.tensor([number for bucket in mine for number in bucket])
        message[count : count + len(mine)] = torch.tensor([len(bucket) for bucket in mine])
    message = message.to(wrapper.device)
    dist.broadcast(message, dist.get_global_rank(wrapper.process_group, 0), wrapper.process_group)
    told = message.tolist()
    layout, at = [], 0
    for size in told[count:]:
        layout.append(told[at : at + size])
        at += size
    return _checked([bucket for bucket in layout if bucket], count)


def _install(wrapper: Any, parameters: list[torch.Tensor], sparse: list[bool], layout: Layout) -> None:
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    wrapper.reducer._remove_autograd_hooks()
    wrapper.reducer = wrapper.logger = None  # first: its buckets are as large as the model
    with _assigned(layout, wrapper.bucket_bytes_cap) as taken:
        wrapper._ddp_init_helper(parameters, sparse, names, wrapper.static_graph)
    wrapper._has_rebuilt_buckets = False
    if wrapper.static_graph:
        wrapper._static_graph_delay_allreduce_enqueued = False
        wrapper.reducer._set_static_graph()
        wrapper.logger._set_static_graph()
    if not taken:
        log.warning(
            "%s starts with new buckets: this version of torch makes them in another way", _name(wrapper)
        )


@contextmanager
def _assigned(layout: Layout, limit: int) -> Iterator[list[bool]]:
    """DDP asks for a layout of the parameters in their order, and turns the buckets around: the last layer's
    gradients come first."""
    usual = dist._compute_bucket_assignment_by_size
    taken: list[bool] = []

    def assign(*_: object, **__: object) -> tuple[Layout, list[int]]:
        taken.append(True)
        return layout[::-1], [limit] * len(layout)

    dist._compute_bucket_assignment_by_size = assign
    try:
        yield taken
    finally:
        dist._compute_bucket_assignment_by_size = usual


def _name(wrapper: DistributedDataParallel) -> str:
    return type(wrapper.module).__qualname__
