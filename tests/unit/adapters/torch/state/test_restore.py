from __future__ import annotations

import collections
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

from helpers.models import samples as training
from helpers.models.roundtrip import FakeTracker, Saved
from lastcall import errors
from lastcall.adapters.torch.state.entries import StateSet

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=True),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True),
    "Adam, lr is a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.05), foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("rescued", [False, True])
def test_training_goes_on_exactly_with(name: str, rescued: bool) -> None:
    def build() -> training.State:
        model = training.model()
        return {"model": model, "optimizer": OPTIMIZERS[name](model.parameters())}

    training.assert_continues_exactly(build, rescued=rescued)


def _plateau(optimizer: Any) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)


def _sequential(optimizer: Any) -> Any:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.1, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


def _chained(optimizer: Any) -> Any:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.1, 3), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.ChainedScheduler(parts, optimizer=optimizer)


SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 5], 0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=20),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "ReduceLROnPlateau": _plateau,
    "SequentialLR": _sequential,
    "ChainedScheduler": _chained,
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("rescued", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_training_goes_on_exactly_under(name: str, rescued: bool) -> None:
    def build() -> training.State:
        model = training.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        return {"model": model, "optimizer": optimizer, "scheduler": SCHEDULERS[name](optimizer)}

    training.assert_continues_exactly(build, rescued=rescued)


@pytest.mark.parametrize("rescued", [False, True])
def test_training_goes_on_exactly_with_a_grad_scaler(rescued: bool) -> None:
    def build() -> training.State:
        model = training.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        return {"model": model, "optimizer": optimizer, "scaler": scaler}

    checkpoint = training.assert_continues_exactly(build, rescued=rescued)
    assert checkpoint.document["state"]["scaler"]["v"]["scale"] == 16.0


def test_a_scaler_that_has_not_scaled_yet_and_one_that_is_off_are_saved() -> None:
    scalers = {
        "fresh": torch.amp.GradScaler("cpu", init_scale=4.0),
        "off": torch.amp.GradScaler("cpu", enabled=False),
    }
    state = StateSet(scalers)
    saved = Saved(state, state.small())
    other = torch.amp.GradScaler("cpu")
    saved.restore(StateSet({"fresh": other, "off": torch.amp.GradScaler("cpu", enabled=False)}))
    assert other.get_scale() == 4.0


def test_fp32_moments_of_a_bf16_model_stay_fp32() -> None:
    class Fp32Momentum(torch.optim.SGD):
        """Keeps its momentum in fp32, as many training stacks do."""

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    buffer = self.state[p].setdefault(
                        "momentum_buffer", torch.zeros_like(p, dtype=torch.float32)
                    )
                    buffer.mul_(0.9).add_(p.grad.float())
                    p.data.copy_(p.data.float() - group["lr"] * buffer)

    def build() -> training.State:
        model = training.model(torch.bfloat16)
        return {"model": model, "optimizer": Fp32Momentum(model.parameters(), lr=0.03)}

    checkpoint = training.assert_continues_exactly(build)
    moments = {
        entry.dtype for group in checkpoint.groups if group.name == "optimizer" for entry in group.entries
    }
    assert moments == {"F32"}


def test_several_optimizers_in_a_list_and_groups_with_different_rates() -> None:
    def build() -> training.State:
        model = training.model()
        first, last = list(model[0].parameters()), list(model[-1].parameters())  # type: ignore[index]
        one = torch.optim.AdamW([{"params": first[:1], "lr": 0.1}, {"params": first[1:]}], lr=0.01)
        return {
            "model": model,
            "optimizer_a": one,
            "optimizer_b": torch.optim.SGD(last, lr=0.1, momentum=0.5),
        }

    training.assert_continues_exactly(build)
    state = build()
    optimizers = [state["optimizer_a"], state["optimizer_b"]]
    for _ in range(2):
        training.step(state)
    saved = Saved(StateSet({"model": state["model"], "optimizer": optimizers}))
    assert {group.name: group.rank for group in saved.groups} == {"model": 0, "optimizer": 2}
    fresh = build()
    saved.restore(
        StateSet({"model": fresh["model"], "optimizer": [fresh["optimizer_a"], fresh["optimizer_b"]]})
    )
    wanted, found = state["optimizer_b"].state_dict(), fresh["optimizer_b"].state_dict()
    for index, row in wanted["state"].items():
        assert torch.equal(found["state"][index]["momentum_buffer"], row["momentum_buffer"])


class Shadow:
    """An EMA as people write it themselves."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.updates = 0

    def update(self, model: torch.nn.Module) -> None:
        self.updates += 1
        for name, p in model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.updates = state["shadow"], state["updates"]


def _averaged(model: torch.nn.Module) -> tuple[Any, Any]:
    ema = AveragedModel(model, use_buffers=True)
    return ema, lambda state: ema.update_parameters(state["model"])


def _shadowed(model: torch.nn.Module) -> tuple[Any, Any]:
    ema = Shadow(model)
    return ema, lambda state: ema.update(state["model"])


def _dict(model: torch.nn.Module) -> tuple[Any, Any]:
    ema = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(state: training.State) -> None:
        for name, p in state["model"].named_parameters():
            ema[name].lerp_(p.detach(), 0.1)

    return ema, update


@pytest.mark.parametrize("make", [_averaged, _shadowed, _dict])
@pytest.mark.parametrize("rescued", [False, True])
def test_averaged_weights_go_on_exactly(make: Any, rescued: bool) -> None:
    def build() -> training.State:
        model = training.model()
        ema, after = make(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        return {"model": model, "optimizer": optimizer, "ema": ema, "after": after}

    training.assert_continues_exactly(build, rescued=rescued)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Linear(6, 6, bias=False)
        self.head = torch.nn.Linear(6, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embedding(x)))


def test_tied_weights_are_stored_once_and_stay_tied() -> None:
    def build() -> training.State:
        model = Tied()
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}

    assert training.assert_continues_exactly(build).names("model") == ["embedding.weight"]


def test_weights_that_were_tied_fill_both_when_they_no_longer_are() -> None:
    tied, untied = Tied(), Tied()
    untied.head.weight = torch.nn.Parameter(torch.zeros(6, 6))
    Saved(StateSet({"model": tied})).restore(StateSet({"model": untied}))
    assert torch.equal(untied.head.weight, tied.head.weight) and torch.equal(
        untied.embedding.weight, tied.head.weight
    )


def test_weights_that_are_tied_now_and_were_not_are_a_mismatch() -> None:
    untied, tied = Tied(), Tied()
    untied.head.weight = torch.nn.Parameter(torch.zeros(6, 6))
    with pytest.raises(
        errors.MismatchError,
        match=r"model\.head\.weight.*same parameter as "
        r"model\.embedding\.weight",
    ):
        Saved(StateSet({"model": untied})).restore(StateSet({"model": tied}))


def test_odd_layouts_come_back_exactly() -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turned = torch.nn.Parameter(torch.randn(6, 5).t())
            self.last = torch.nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
            self.scalar = torch.nn.Parameter(torch.randn(()))
            self.register_buffer("wide", torch.randn(3, 1).expand(3, 1000))
            self.register_buffer("none", torch.empty(0, 3))
            self.register_buffer("wave", torch.randn(3, dtype=torch.complex128))
            self.register_buffer("flags", torch.rand(7) > 0.5)
            self.register_buffer("tiny", torch.randn(4).to(torch.float8_e4m3fn))
            self.register_buffer("gone", torch.zeros(1), persistent=False)

    one, other = Odd(), Odd()
    for small in (False, True):
        state = StateSet({"model": one})
        saved = Saved(state, state.small() if small else None)
        saved.restore(StateSet({"model": other}))
        for name, tensor in one.state_dict().items():
            now = other.state_dict()[name]
            assert now.stride() == tensor.stride() and torch.equal(
                now.view(torch.uint8) if name == "tiny" else now,
                tensor.view(torch.uint8) if name == "tiny" else tensor,
            )
        assert saved.stored["model"]["wide"].shape == (3, 1) and "gone" not in saved.stored["model"]


def test_live_objects_keep_their_identity() -> None:
    inner, losses, seen, window = {"n": 1}, [1.0], {"a"}, collections.deque([1], maxlen=3)
    tensor, array, raw = torch.zeros(3), np.zeros(3), bytearray(b"x")
    extra = {
        "inner": inner,
        "losses": losses,
        "seen": seen,
        "window": window,
        "t": tensor,
        "a": array,
        "raw": raw,
    }
    state = StateSet({"extra": extra})
    saved = Saved(state)
    inner["n"], inner["new"] = 2, 3
    losses.append(2.0)
    seen.add("b")
    window.extend([2, 3, 4])
    tensor += 1
    array += 1
    raw += b"y"
    saved.restore(state)
    assert extra["inner"] is inner and inner == {"n": 1}
    assert extra["losses"] is losses and losses == [1.0]
    assert extra["seen"] is seen and seen == {"a"}
    assert extra["window"] is window and list(window) == [1] and window.maxlen == 3
    assert extra["t"] is tensor and tensor.tolist() == [0, 0, 0]
    assert extra["a"] is array and array.tolist() == [0, 0, 0]
    assert extra["raw"] is raw and raw == b"x"


def test_values_of_every_kind_come_back_with_their_types() -> None:
    values = {
        "numbers": (1, 2.5, 10**40, float("inf"), True, None, 1j),
        "bytes": b"\x00\xff",
        "keys": {1: "a", (2, 3): "b"},
        "sets": {1, 2},
        "frozen": frozenset({"x"}),
        "counter": collections.Counter("aab"),
        "ordered": collections.OrderedDict(b=1, a=2),
        "scalar": np.float32(1.1),
        "when": np.datetime64("2026-01-02T03:04", "s"),
        "records": np.array([(1, 2.0)], dtype=[("a", "<i2"), ("b", ">f8")]),
        "big endian": np.arange(3, dtype=">i4"),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "nested": [{"t": torch.arange(3)}, (torch.ones(2, dtype=torch.complex128), [np.arange(2)])],
    }
    state = StateSet({"extra": values, "best": 0.5, "shape": (1, torch.ones(2))})
    saved = Saved(state)
    fresh = StateSet({"extra": {}, "best": None, "shape": ()})
    loading = saved.restore(fresh)
    assert loading.values["best"] == 0.5 and fresh.values["best"] == 0.5
    assert torch.equal(fresh.values["shape"][1], torch.ones(2))  # type: ignore[index]
    found: Any = fresh.values["extra"]
    for name in (
        "numbers",
        "bytes",
        "keys",
        "sets",
        "frozen",
        "counter",
        "ordered",
        "scalar",
        "when",
        "size",
        "dtype",
    ):
        assert found[name] == values[name] and type(found[name]) is type(values[name]), name
    assert found["device"] == torch.device("cpu")
    assert found["records"].dtype == values["records"].dtype and found["records"].tolist() == [(1, 2.0)]  # type: ignore[attr-defined]
    assert found["big endian"].dtype == np.dtype(">i4") and found["big endian"].tolist() == [0, 1, 2]
    assert found["nested"][0]["t"].tolist() == [0, 1, 2] and found["nested"][1][0].dtype == torch.complex128
    assert found["nested"][1][1][0].tolist() == [0, 1]


def test_a_shared_tensor_is_shared_again() -> None:
    shared = torch.arange(4.0)
    saved = Saved(StateSet({"extra": {"a": shared, "b": shared, "c": torch.nn.Parameter(shared)}}))
    assert saved.names("extra") == ["a"]
    fresh = StateSet({"extra": {}})
    saved.restore(fresh)
    extra: Any = fresh.values["extra"]
    extra["a"][0] = 9
    assert extra["b"][0] == 9 and extra["c"][0] == 9 and isinstance(extra["c"], torch.nn.Parameter)


GENERATORS: dict[str, Any] = {
    "torch": (lambda s: torch.Generator().manual_seed(s), lambda g: torch.rand(3, generator=g).tolist()),
    "python": (random.Random, lambda g: [g.random(), g.gauss(0, 1)]),
    "numpy": (np.random.default_rng, lambda g: g.random(3).tolist()),
    "philox": (lambda s: np.random.Generator(np.random.Philox(s)), lambda g: g.random(3).tolist()),
    "legacy": (np.random.RandomState, lambda g: g.randn(3).tolist()),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_generators_go_on_where_they_were(kind: str) -> None:
    make, draw = GENERATORS[kind]
    generator = make(1)
    draw(generator)
    state = StateSet({"generator": generator, "nested": [make(7)]})
    copied = state.small()
    wanted = draw(generator)
    fresh = make(2)
    Saved(state, copied).restore(StateSet({"generator": fresh, "nested": [make(8)]}))
    assert draw(fresh) == wanted


def test_a_generator_of_another_kind_is_a_mismatch() -> None:
    saved = Saved(StateSet({"g": torch.Generator()}))
    with pytest.raises(errors.MismatchError, match=r"g: .*'torch.cpu' generator.*'python'"):
        saved.restore(StateSet({"g": random.Random()}))
    with pytest.raises(errors.MismatchError, match="does not take the saved state"):
        Saved(StateSet({"g": np.random.default_rng()})).restore(
            StateSet({"g": np.random.Generator(np.random.MT19937())})
        )


class WithExtra(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(2, 2)
        self.count = 0

    def get_extra_state(self) -> Any:
        return {"count": self.count, "t": torch.full((2,), float(self.count))}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]
        assert state["t"][0] == self.count


def test_extra_state_of_modules_is_carried() -> None:
    one, other = torch.nn.Sequential(WithExtra()), torch.nn.Sequential(WithExtra())
    one[0].count = 5
    state = StateSet({"model": one})
    copied = state.small()
    one[0].count = 6
    Saved(state, copied).restore(StateSet({"model": other}))
    assert other[0].count == 5 and torch.equal(one[0].lin.weight, other[0].lin.weight)


class Renaming(torch.nn.Module):
    """Saves under another name and derived values, as quantized and wrapped modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 2)
        self.scale = 1.0

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"w": self.inner.weight.detach(), "b": self.inner.bias.detach() * 2, "scale": self.scale}

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            self.inner.weight.copy_(state["w"])
            self.inner.bias.copy_(state["b"] / 2)
        self.scale = state["scale"]


def test_a_module_with_a_state_dict_of_its_own_is_loaded_by_it() -> None:
    one, other = Renaming(), Renaming()
    one.scale = 3.0
    state = StateSet({"model": one})
    for small in (None, state.small()):
        saved = Saved(state, small)
        assert saved.names("model") == ["b", "w"]
        saved.restore(StateSet({"model": other}))
        assert torch.equal(one.inner.weight, other.inner.weight) and torch.equal(
            one.inner.bias, other.inner.bias
        )
        assert other.scale == 3.0


def test_hooks_on_loading_are_run_with_the_saved_names_and_versions() -> None:
    one, other = training.model(), training.model()
    told = []
    other[1].register_load_state_dict_pre_hook(
        lambda module, state, prefix, metadata, *rest: told.append((prefix, metadata.get("version")))
    )
    Saved(StateSet({"model": one})).restore(StateSet({"model": other}))
    assert told == [("1.", 2)]
    assert all(
        torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_module_has_the_names_of_the_plain_one() -> None:
    plain, other = training.model(), training.model()
    saved = Saved(StateSet({"model": torch.compile(plain, backend="eager")}))
    saved.restore(StateSet({"model": other}))
    assert torch.equal(plain[0].weight, other[0].weight)


def test_loaders_are_saved_and_loaded_by_their_trackers_wherever_they_are() -> None:
    top, nested = object(), object()
    trackers = {id(top): FakeTracker(3), id(nested): FakeTracker(4)}
    state = StateSet({"data": top, "extra": {"loaders": [nested]}}, trackers)
    copied = state.small()
    trackers[id(top)].position = 7
    saved = Saved(state, copied)
    assert saved.document["state"]["data"] == {
        "$": "loader",
        "v": {"position": 3, "seeds": {"$": "tuple", "items": [1, 2]}},
    }
    saved.restore(state)
    assert (trackers[id(top)].position, trackers[id(nested)].position) == (3, 4)


def test_gradients_come_back_and_others_go() -> None:
    model = training.model()
    state = StateSet({"model": model, "optimizer": torch.optim.SGD(model.parameters())})
    assert state.gradients() is None
    model[0](torch.randn(2, 6)).square().sum().backward()
    wanted = model[0].weight.grad.clone()
    saved = Saved(state, grads=True)
    assert saved.names("grads") == ["model.0.bias", "model.0.weight"]
    fresh = training.model()
    other = StateSet({"model": fresh, "optimizer": torch.optim.SGD(fresh.parameters())})
    fresh(torch.randn(3, 6)).sum().backward()
    saved.restore(other)
    assert torch.equal(fresh[0].weight.grad, wanted) and fresh[4].weight.grad is None
    with pytest.raises(errors.MismatchError, match=r"gradients of 2 parameters.*model\.0\.bias"):
        saved.restore(StateSet({"net": training.model()}), lenient=True)


def test_parameters_that_only_an_optimizer_knows_keep_their_gradients() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    state = StateSet({"optimizer": torch.optim.SGD([parameter]), "w": parameter})
    parameter.grad = torch.arange(3.0)
    saved = Saved(state, grads=True)
    parameter.grad = None
    saved.restore(state)
    assert parameter.grad is not None and parameter.grad.tolist() == [0, 1, 2]
