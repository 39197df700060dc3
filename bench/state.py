"""The states that are saved: parameters and AdamW moments, fp32, filled with noise (a digest or a disk cannot
skip any of it).

`gpt` has the shapes of GPT-2 medium, scaled in width: at 4.26 GB it is GPT-2 medium, 1,168 tensors with the
moments and step counters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

_LAYERS = 24
_WIDTH, _VOCABULARY, _POSITIONS = 1024, 50257, 1024  # GPT-2 medium
_SMALL_TENSORS = 5000


@dataclass
class State:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    described: str

    def nested(self) -> dict[str, object]:
        """As a training script would hand it to torch.save."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor under a flat name; the live ones, not copies."""
        return flatten(self.nested())

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def trained(self) -> list[torch.Tensor]:
        """What an optimizer step changes."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return [p.data for p in parameters] + [
            t for values in self.optimizer.state.values() for t in values.values()
        ]

    def touch(self) -> None:
        """Stand in for a training step: every trained byte range changes, and is hot afterwards, as it is in
        a real run."""
        for tensor in self.trained():
            tensor.add_(1.0 if tensor.ndim == 0 else 1e-3)

    def scribble(self) -> None:
        for tensor in self.tensors().values():
            tensor.zero_()

    def digests(self) -> dict[str, str]:
        import xxhash  # comes with lastcall, which a machine that only measures the peers may lack

        return {
            name: xxhash.xxh3_128_hexdigest(
                local(tensor.detach()).cpu().reshape(-1).view(torch.uint8).numpy()
            )
            for name, tensor in self.tensors().items()
        }


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor is in this process: DTensors draw no random numbers on a CPU, and have no bytes."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def flatten(nested: dict[str, object]) -> dict[str, torch.Tensor]:
    model, optimizer = nested["model"], nested["optimizer"]
    assert isinstance(model, dict) and isinstance(optimizer, dict)
    flat = {f"model.{name}": tensor for name, tensor in model.items()}
    for number, values in optimizer["state"].items():
        flat |= {f"optimizer.{number}.{key}": tensor for key, tensor in values.items()}
    return flat


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)


class _Gpt(nn.Module):
    def __init__(self, width: int, rank: int = 0) -> None:
        super().__init__()
        self.wte = nn.Embedding(max(1, round(_VOCABULARY * width / _WIDTH)), width)
        self.wpe = nn.Embedding(_POSITIONS, width)
        self.h = nn.ModuleList(_Block(width) for _ in range(_LAYERS))
        self.ln_f = nn.LayerNorm(width)
        pairs = [(rank, width), (3 * width, rank)] * (_LAYERS if rank else 0)
        self.lora = nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in pairs)


def _width_for(parameters: float) -> int:
    """The width, a multiple of 8, at which _Gpt has about that many parameters."""
    square = 12 * _LAYERS + _VOCABULARY / _WIDTH
    linear = 13 * _LAYERS + _POSITIONS + 2
    width = (-linear + math.sqrt(linear**2 + 4 * square * parameters)) / (2 * square)
    return max(8, round(width / 8) * 8)


def gpt(gigabytes: float, device: str = "cpu") -> State:
    return filled(outline(gigabytes).to_empty(device=device), "model and AdamW, fp32")


def outline(gigabytes: float) -> _Gpt:
    """Parameter, two moments: 12 bytes a parameter. Without memory, since the default initialisation of 355 M
    parameters takes longer than the benchmark."""
    with torch.device("meta"):
        return _Gpt(_width_for(gigabytes * 1e9 / 12))


def small(gigabytes: float) -> State:
    """5,000 tensors of uneven sizes, most of them no multiple of a page."""
    count = _SMALL_TENSORS // 4  # each parameter brings two moments and a step counter
    mean = gigabytes * 1e9 / 12 / count
    sizes = [max(1, int(mean * (0.5 + (number * 0.618034) % 1))) for number in range(count)]
    model = nn.ParameterList(nn.Parameter(torch.empty(size)) for size in sizes)
    return filled(model, "small tensors with AdamW, fp32")


def frozen(gigabytes: float) -> State:
    """98 % of the bytes are frozen weights; the rest is LoRA with its moments."""
    width = _width_for(gigabytes * 1e9 * 0.98 / 4)
    rank = max(1, round(gigabytes * 1e9 * 0.02 / 12 / (_LAYERS * 4 * width)))
    with torch.device("meta"):
        model = _Gpt(width, rank)
    model = model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("lora."))
    return filled(model, "frozen weights and LoRA with AdamW, fp32")


def filled(model: nn.Module, described: str) -> State:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    with torch.no_grad():
        for parameter in model.parameters():
            local(parameter).normal_(std=0.02)
        for parameter in trained:  # as a first step would make them, without its gradients
            first, second = torch.empty_like(parameter), torch.empty_like(parameter)
            local(first).normal_()
            local(second).uniform_()
            optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": first, "exp_avg_sq": second}
    state = State(model, optimizer, described)
    tensors = state.tensors()
    state.described = f"{state.nbytes / 1e9:.2f} GB in {len(tensors):,} tensors ({described})"
    return state
