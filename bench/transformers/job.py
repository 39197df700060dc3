"""A training script as anybody writes it: a model, random data, `Trainer.train()`. It does not know of
lastcall.

`python -m bench.transformers.job SPEC`, then one line of JSON on standard input for each training; what
happens goes line by line to standard output. `SPEC` and the lines are the dataclasses below.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, TextIO

import torch

_LAYERS = 12
_EMBEDDINGS = 0.25  # of the parameters: the rest is in the layers
_BYTES_A_PARAMETER = 12  # fp32, with two moments


@dataclass(frozen=True)
class Spec:
    """What a process trains."""

    model: str = "gpt2"  # "qwen2"; "linear": next to nothing, so that a step is what Trainer itself takes
    parameters: float = 0.0  # of gpt2; 0: as small as it gets
    tiny: bool = False  # of qwen2
    length: int = 16  # tokens of a row
    rows: int = 1  # in a batch
    jit: bool = False  # TrainingArguments(enable_jit_checkpoint=True)
    # of Transformers' callback, which has no setting for it: 3 s unless patched
    kill_wait: float | None = None
    exact: bool = False  # deterministic kernels, every loss told, digests at the end

    def line(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Training:
    folder: str
    steps: int
    save_steps: int = 0  # 0: no periodic saves
    tell: bool = False  # each step, as it ends
    # seconds that a step takes at least, of an exact run: in the forward pass, where a step spends its time
    pace: float = 0.0
    resume: str | None = None
    meter_from: int = 0  # the step from which CPU and memory are measured; 0: not at all


def shape(parameters: float) -> tuple[int, int, int]:
    """Layers, width and vocabulary of a GPT-2 with about that many parameters."""
    if not parameters:
        return 2, 32, 64
    width = max(32, round(math.sqrt(parameters * (1 - _EMBEDDINGS) / 12 / _LAYERS) / 32) * 32)
    return _LAYERS, width, max(64, round((parameters - 12 * _LAYERS * width**2) / width))


def nbytes(spec: Spec) -> int:
    """Of the weights and the moments."""
    layers, width, vocabulary = shape(spec.parameters)
    count = width * (vocabulary + spec.length) + layers * (12 * width**2 + 13 * width) + 2 * width
    return count * _BYTES_A_PARAMETER


def _gpt2(spec: Spec) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, vocabulary = shape(spec.parameters)
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=layers,
            n_embd=width,
            n_head=width // 32,
            vocab_size=vocabulary,
            n_positions=spec.length,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def _qwen2(spec: Spec) -> Any:
    """The shapes of Qwen2.5-1.5B, initialised where it trains: on a CPU that takes minutes. With dropout, so
    that an exact resume needs the device's random numbers."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = (64, 160, 2, 4, 2, 512) if spec.tiny else (1536, 8960, 28, 12, 2, 151_936)
    hidden, middle, layers, heads, shared, vocabulary = sizes
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=middle,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        vocab_size=vocabulary,
        max_position_embeddings=spec.length,
        tie_word_embeddings=True,
        attention_dropout=0.1,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    config._attn_implementation = "eager"  # the fused ones are not deterministic
    with torch.device(_device()):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            return Qwen2ForCausalLM(config)
        finally:
            torch.set_default_dtype(before)


class _Linear(torch.nn.Module):
    def __init__(self, vocabulary: int = 64) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.head = torch.nn.Linear(1, vocabulary)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.head(input_ids[..., None].float() / self.vocabulary).square().mean()}


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


class _Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens, the same ones in every process."""

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        self._tokens = torch.randint(vocabulary, (count, length), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[number], "labels": self._tokens[number]}


def _arguments(spec: Spec, training: Training) -> Any:
    from transformers import TrainingArguments

    cuda = _device() == "cuda"
    saves: dict[str, Any] = {"save_strategy": "no"}
    if training.save_steps:
        saves = {"save_strategy": "steps", "save_steps": training.save_steps, "save_total_limit": 2}
    return TrainingArguments(
        output_dir=training.folder,
        max_steps=training.steps,
        per_device_train_batch_size=spec.rows,
        learning_rate=1e-4,
        optim="adamw_torch_fused",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
        bf16=spec.model == "qwen2",
        use_cpu=not cuda,
        dataloader_pin_memory=cuda,
        enable_jit_checkpoint=spec.jit,
        **saves,
    )


def _recorder(say: Any, training: Training) -> Any:
    from transformers import TrainerCallback

    from bench import meters

    class Recorder(TrainerCallback):  # type: ignore[misc]
        """When each step began and ended."""

        def __init__(self) -> None:
            self.begins: dict[int, float] = {}
            self.ends: dict[int, float] = {}
            self.meter: meters.Meter | None = None

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.begins[state.global_step] = time.monotonic()
            if training.meter_from and state.global_step == training.meter_from:
                self.meter = meters.Meter().__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.ends[state.global_step] = time.monotonic()
            if training.tell:
                say(step=state.global_step, at=self.ends[state.global_step])

    return Recorder()


def _trainer(spec: Spec, training: Training, model: Any, data: Any, say: Any) -> tuple[Any, Any]:
    from transformers import Trainer

    class Exact(Trainer):  # type: ignore[misc]
        """Tells every loss, to the last bit."""

        def compute_loss(self, *arguments: Any, **named: Any) -> Any:
            if training.pace:
                time.sleep(
                    max(0.0, recorder.begins[self.state.global_step] + training.pace - time.monotonic())
                )
            found = super().compute_loss(*arguments, **named)
            say(
                loss=float((found[0] if isinstance(found, tuple) else found).detach()).hex(),
                of=self.state.global_step + 1,
            )
            return found

    recorder = _recorder(say, training)
    kind = Exact if spec.exact else Trainer
    trainer = kind(model=model, args=_arguments(spec, training), train_dataset=data, callbacks=[recorder])
    if spec.kill_wait is not None:
        for callback in trainer.callback_handler.callbacks:
            if type(callback).__name__ == "JITCheckpointCallback":
                callback.jit_manager.kill_wait = spec.kill_wait
    return trainer, recorder


def _digest(tensors: Iterator[torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
    return whole.hexdigest()


def _digests(trainer: Any) -> dict[str, str]:
    states = trainer.optimizer.state_dict()["state"].values()
    moments = (value for state in states for value in state.values() if isinstance(value, torch.Tensor))
    return {"weights": _digest(iter(trainer.model.state_dict().values())), "moments": _digest(moments)}


def _train(spec: Spec, training: Training, model: Any, data: Any, say: Any) -> None:
    trainer, recorder = _trainer(spec, training, model, data, say)
    try:
        trainer.train(resume_from_checkpoint=training.resume)
    finally:
        if torch.cuda.is_available():
            say(allocated=torch.cuda.max_memory_allocated(), reserved=torch.cuda.max_memory_reserved())
    meter = recorder.meter
    if meter:
        meter.__exit__()
    done = {"begins": recorder.begins, "ends": recorder.ends, "step": trainer.state.global_step}
    measured = {"cpu": meter.cpu, "peak": meter.peak} if meter else {}
    say(done={**done, **measured, **(_digests(trainer) if spec.exact else {})})


def _own_line() -> TextIO:
    """Standard output is for our lines alone: Trainer prints there, too."""
    own = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return own


def main() -> None:
    out = _own_line()

    def say(**what: object) -> None:
        out.write(json.dumps(what) + "\n")

    spec = Spec(**json.loads(sys.argv[1]))
    if spec.exact:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    model = {"gpt2": _gpt2, "qwen2": _qwen2, "linear": lambda _: _Linear()}[spec.model](spec)
    data = _Rows(4096, spec.length, model.vocabulary if spec.model == "linear" else model.config.vocab_size)
    say(ready=sum(parameter.numel() for parameter in model.parameters()))
    for line in sys.stdin:
        _train(spec, Training(**json.loads(line)), model, data, say)


if __name__ == "__main__":
    main()
