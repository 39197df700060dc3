from __future__ import annotations

import ctypes
import threading

import pytest
import torch

from helpers.models import samples as training
from helpers.models.roundtrip import Saved, read, write
from lastcall.adapters.torch.randomness import rng
from lastcall.adapters.torch.state.entries import StateSet
from lastcall.adapters.torch.tensors import cuda, tensors

pytestmark = pytest.mark.cuda
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

LAYOUTS = {
    "contiguous": lambda: torch.randn(70, 50, device="cuda"),
    "transposed": lambda: torch.randn(33, 17, device="cuda").t(),
    "channels_last": lambda: torch.randn(3, 4, 5, 6, device="cuda").to(memory_format=torch.channels_last),
    "slice": lambda: torch.randn(40, 9, device="cuda")[::3, 1::2],
    "zero-dimensional": lambda: torch.tensor(3.5, device="cuda"),
    "empty": lambda: torch.empty(0, 4, device="cuda"),
    "bool": lambda: (torch.randn(9, 11, device="cuda") > 0).t(),
    "complex128": lambda: torch.randn(5, 6, dtype=torch.complex128, device="cuda").t(),
    "conjugate view": lambda: torch.randn(5, 6, dtype=torch.complex64, device="cuda").conj(),
    "float8": lambda: torch.randn(64, device="cuda").to(torch.float8_e4m3fn),
    "parameter": lambda: torch.nn.Parameter(torch.randn(5, 6, device="cuda")),
    "inside a larger storage": lambda: torch.randn(100, device="cuda")[10:60],
}


def bytes_of(tensor: torch.Tensor) -> bytes:
    host = tensor.detach().resolve_conj().cpu().contiguous()
    return ctypes.string_at(host.data_ptr(), host.nbytes) if host.nbytes else b""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("piece", [1 << 20, 13])
def test_bytes_go_both_ways_in_c_order(layout: str, piece: int) -> None:
    tensor = LAYOUTS[layout]()
    wanted = bytes_of(tensor)
    torch.cuda.synchronize()
    assert read(tensors.source(tensor), piece) == wanted
    with torch.no_grad():
        tensor.zero_() if tensor.dtype != torch.float8_e4m3fn else tensor.view(torch.uint8).zero_()
    cuda.settle()
    write(tensors.target(tensor), wanted, piece)
    assert bytes_of(tensor) == wanted


def test_a_copy_waits_for_the_fence_and_not_for_what_comes_after_it() -> None:
    tensor = torch.zeros(1000, device="cuda")
    other = torch.zeros(1, device="cuda")
    source = tensors.source(tensor)
    torch.cuda._sleep(200_000_000)
    tensor.fill_(1.0)
    cuda.fence()
    busy = torch.cuda.Event()
    torch.cuda._sleep(20_000_000_000)
    other.fill_(1.0)
    busy.record()
    assert read(source) == torch.ones(1000).numpy().tobytes()
    assert not busy.query(), "the copy waited for work that was launched after the fence"
    torch.cuda.synchronize()


def test_threads_read_at_the_same_time() -> None:
    tensor = torch.arange(4_000_000, device="cuda")
    cuda.fence()
    source, wanted, found = tensors.source(tensor), bytes_of(tensor), []
    threads = [threading.Thread(target=lambda: found.append(read(source, 1 << 18))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [wanted] * 4


@pytest.mark.parametrize("rescued", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_training_on_a_gpu_goes_on_exactly(rescued: bool, fused: bool) -> None:
    def build() -> training.State:
        model = training.model().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)
        return {
            "model": model,
            "optimizer": optimizer,
            "scaler": torch.amp.GradScaler("cuda", init_scale=8.0),
        }

    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        states.append(build())
    one, other = states
    net = one["model"]
    sets = [StateSet(state) for state in states]
    for _ in range(3):
        _step(one)
    cuda.settle()
    copied = sets[0].small() if rescued else None
    if rescued:
        net(torch.randn(5, 6, device="cuda"))  # BatchNorm moves on
    checkpoint = Saved(sets[0], copied)
    for each in sets:
        checkpoint.restore(each)
    ends = []
    for state, each in zip(states, sets, strict=True):
        torch.manual_seed(3)
        for _ in range(3):
            _step(state)
        torch.cuda.synchronize()
        ends.append(Saved(each))
    assert ends[0].text == ends[1].text and ends[0].data == ends[1].data
    assert other["optimizer"].state[next(other["model"].parameters())]["exp_avg"].is_cuda


def _step(state: training.State) -> None:
    state["optimizer"].zero_grad()
    loss = state["model"](torch.randn(5, 6, device="cuda")).square().mean()
    state["scaler"].scale(loss).backward()
    state["scaler"].step(state["optimizer"])
    state["scaler"].update()


def test_the_randomness_of_the_device_is_carried() -> None:
    randomness = rng.Randomness()
    torch.cuda.manual_seed_all(5)
    torch.rand(10, device="cuda")
    document = randomness.to_document(randomness.capture())
    wanted = torch.rand(10, device="cuda").tolist()
    randomness.restore(randomness.from_document(document))
    assert torch.rand(10, device="cuda").tolist() == wanted
