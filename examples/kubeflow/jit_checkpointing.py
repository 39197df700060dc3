# ruff: noqa: E402
# %% [markdown]
# # Just-in-time checkpoints with `TransformersTrainer`
#
# A language model is fine-tuned in a TrainJob, paused in the middle, resumed, checked, tried, and cleaned up.
# The training function knows nothing of checkpoints. Run the cells in a workbench that has the claim `shared`
# (ReadWriteMany) mounted in its home folder, or the whole as a script; `LOCAL=1` does the same without a
# cluster, in the SDK's local process backend.
#
# | variable | default | |
# |---|---|---|
# | `CLAIM` | `shared` | the claim; here it is the folder of that name in the home folder |
# | `MODEL` | a tiny random one | for example `Qwen/Qwen2.5-1.5B-Instruct` |
# | `NODES` | 2 | pods |
# | `LOCAL` | | 1: no cluster |

# %%
import os
import subprocess
import sys
import time
from pathlib import Path

from kubeflow.trainer import LocalProcessBackendConfig, TrainerClient

from lastcall.kubeflow import PeriodicCheckpointConfig, TransformersTrainer

CLAIM = os.environ.get("CLAIM", "shared")
MODEL = os.environ.get("MODEL", "")
NODES = int(os.environ.get("NODES", "2"))
LOCAL = os.environ.get("LOCAL", "") == "1"

HERE = Path.home() / CLAIM  # where this machine sees the claim
THERE = HERE if LOCAL else Path("/mnt/kubeflow-checkpoints")  # where the pods see it
CHECKPOINTS = HERE / "checkpoints" / "jit-checkpointing"
client = TrainerClient(LocalProcessBackendConfig()) if LOCAL else TrainerClient()

# %% [markdown]
# ## Stage the model and the data
# Pods without a network find both on the volume.

# %%
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

SENTENCES = [
    f"Boat number {number} leaves the harbour at {number % 24} o'clock, `on time`, for ${number}."
    for number in range(200)
]

if MODEL:
    tokenizer, model = (
        AutoTokenizer.from_pretrained(MODEL),
        AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto"),
    )
else:
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer, pairs.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    pairs.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], show_progress=False)
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=pairs, eos_token="<end>", bos_token="<end>", pad_token="<end>"
    )
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=2, n_head=2, **ends)
    )
tokenizer.save_pretrained(HERE / "model")
model.save_pretrained(HERE / "model")
(HERE / "sentences.txt").write_text("\n".join(SENTENCES))
sorted(path.name for path in HERE.iterdir())

# %% [markdown]
# ## The training function
# As anybody would write it. Its `output_dir` gives way to the trainer's, also for the `final` model.


# %%
def train(model: str, sentences: str, epochs: float) -> None:
    import os

    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        Trainer,
        TrainingArguments,
    )

    tokenizer = AutoTokenizer.from_pretrained(model)
    with open(sentences) as file:
        rows = [{"input_ids": tokenizer(line)["input_ids"][:64]} for line in file.read().splitlines()]
    args = TrainingArguments(
        output_dir="checkpoints",
        num_train_epochs=epochs,
        per_device_train_batch_size=4,
        logging_steps=5,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype="auto"),
        args=args,
        train_dataset=rows,
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    trainer.save_model(os.path.join(args.output_dir, "final"))


# %% [markdown]
# ## Submit
# SIGTERM saves a checkpoint; every 20 steps there is one anyway, and the last two are kept.

# %%
trainer = TransformersTrainer(
    func=train,
    func_args={"model": str(THERE / "model"), "sentences": str(THERE / "sentences.txt"), "epochs": 3},
    num_nodes=1 if LOCAL else NODES,
    resources_per_node=None if LOCAL else {"nvidia.com/gpu": 1, "cpu": "4", "memory": "16Gi"},
    packages_to_install=["transformers", "accelerate"],
    enable_jit_checkpoint=True,
    output_dir=f"pvc://{CLAIM}/checkpoints/jit-checkpointing",
    periodic_checkpoint_config=PeriodicCheckpointConfig(
        save_strategy="steps", save_steps=20, save_total_limit=2
    ),
)
job = client.train(trainer=trainer, runtime="torch-distributed")
print("submitted", job)

# %% [markdown]
# ## Pause
# On a cluster the TrainJob is suspended (`lastcall kube pause trainjob/NAME` or the dashboard do the same):
# its pods get SIGTERM, save and go. Without one, `lastcall pause` asks the run in its folder.


# %%
def suspend(name: str, value: bool) -> None:
    where = ("trainer.kubeflow.org", "v1alpha1", client.backend.namespace, "trainjobs", name)
    client.backend.custom_api.patch_namespaced_custom_object(*where, {"spec": {"suspend": value}})


def lastcall(*words: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "lastcall", *map(str, words)], check=True)


# it has begun to train, and made its first periodic checkpoint
while not list(CHECKPOINTS.glob("checkpoint-*")):
    assert client.get_job(job).status != "Failed", "\n".join(client.get_job_logs(job))
    time.sleep(1)
if LOCAL:
    lastcall("pause", CHECKPOINTS, "--wait")
else:
    suspend(job, True)
lastcall("ls", CHECKPOINTS)

# %% [markdown]
# ## Resume
# The pods come back and go on from the step that was saved.

# %%
if LOCAL:
    lastcall("resume", CHECKPOINTS)
    job = client.train(trainer=trainer, runtime="torch-distributed")
else:
    suspend(job, False)
finished = client.wait_for_job_status(job, {"Complete", "Failed"}, timeout=3600)
print("\n".join(line for line in client.get_job_logs(job) if "[Kubeflow]" in line))
assert finished.status == "Complete", "\n".join(client.get_job_logs(job))

# %% [markdown]
# ## Verify
# Every byte of every checkpoint has a digest. `final/` is what the function itself saved.

# %%
lastcall("verify", CHECKPOINTS)
names = sorted(path.name for path in CHECKPOINTS.iterdir() if not path.name.startswith("."))
assert "final" in names and not list(CHECKPOINTS.rglob("checkpoint-is-incomplete.txt"))
print(names)

# %% [markdown]
# ## Test the model

# %%
tuned = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "final")
words = tokenizer("Boat number", return_tensors="pt")
print(
    tokenizer.decode(
        tuned.generate(**words, max_new_tokens=12, do_sample=False, pad_token_id=tokenizer.eos_token_id)[0]
    )
)

# %% [markdown]
# ## Clean up
# The job goes; what it has learned stays on the volume.

# %%
client.delete_job(job)
