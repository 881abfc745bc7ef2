"""The names that blocks of some pages take as given: `model`, `dataset`, `folder` and so on.

A guide that shows a whole script needs nothing of this. Others show the lines that matter, for any model. For
such a page a generator yields, before each of its blocks, the names that the block uses and no earlier block
has made. `tests/test_pages.py` runs them in the current folder, which is empty at first and the same for all
ranks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import zeroshard

Names = dict[str, Any]
VOCABULARY, WIDTH = 64, 32


class Bytes:
    """A tokenizer that knows some bytes."""

    eos_token_id = 0

    def encode(self, text: str) -> list[int]:
        return [1 + byte % (VOCABULARY - 1) for byte in text.encode()]


class Attention(nn.Module):
    """Attention of heads of 8 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(hidden).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.up, self.down = Attention(), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(hidden)
        return hidden + self.down(self.up(hidden).relu())


class Decoder(nn.Module):
    """A language model of our own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Classifier(nn.Module):
    """Some layers in `encoder.layers`, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(12))
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.encoder.layers:
            inputs = layer(inputs)
        return self.head(inputs)


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def whole(model: nn.Module | None = None) -> Names:
    """A model with its optimizer, a config, a loss and data."""
    model = model or build_model()
    torch.manual_seed(1)
    inputs = torch.randn(16, 8)
    return {
        "model": model,
        "optimizer": make_optimizer(model.parameters()),
        "make_optimizer": make_optimizer,
        "config": {"stage": 3, "micro_batch_size": 4},
        "dataset": TensorDataset(inputs, inputs[:, :3].argmax(1)),
        "loss_fn": nn.functional.cross_entropy,
        "torch": torch,
        "zeroshard": zeroshard,
    }


def sharded() -> Names:
    """The same with an engine of it and its batches."""
    names = whole()
    made = zeroshard.initialize(
        names["model"],
        names["optimizer"],
        names["config"],
        training_data=names["dataset"],
        loss_fn=names["loss_fn"],
    )
    return {**names, "engine": made.engine, "dataloader": made.dataloader, "batches": list(made.dataloader)}


def llama() -> Names:
    """A Llama of transformers, the folder that rank 0 has written it to, and classes that load it."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "use_cache": False}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    if dist.get_rank() == 0:
        model.save_pretrained("model")
    dist.barrier()
    names = {
        name: getattr(transformers, name, None) for name in ("AutoModelForCausalLM", "BitsAndBytesConfig")
    }
    return {**whole(model), **names, "folder": "model"}


# ------------------------------------------------------------------------------------------------- the pages


def checkpoints() -> Iterator[Names]:
    yield sharded()
    yield {**whole(), "num_epochs": 2, "Path": Path}
    engine = sharded()["engine"]
    for _ in range(2):
        engine.save_checkpoint("checkpoints", "step-200")
    yield {"build_model": build_model}


def data() -> Iterator[Names]:
    names = llama()
    if dist.get_rank() == 0:
        Path("corpus").mkdir()
        for number in range(4):
            Path("corpus", f"{number}.txt").write_text(f"{number} and some more text. " * 200)
    dist.barrier()
    yield {**names, "tokenizer": Bytes()}
    ranks = {"rank": dist.get_rank(), "num_ranks": dist.get_world_size(), "device": torch.device("cpu")}
    yield ranks


def offload() -> Iterator[Names]:
    yield {"build_model": build_model}


def tensor_parallel() -> Iterator[Names]:
    names = llama()
    yield names
    yield {"DistributedSampler": DistributedSampler}
    yield {"model": Decoder(), "config": zeroshard.Config(stage=3, mesh=zeroshard.Mesh(tp=2))}
    yield {}


def pipeline_parallel() -> Iterator[Names]:
    names = llama()
    torch.manual_seed(2)
    tokens = torch.randint(VOCABULARY, (8, 16))
    yield {**names, "batches": [(tokens, tokens)]}
    yield {"DistributedSampler": DistributedSampler}
    yield {}
    Path("own.csv").write_text("0F0,0F1,0B0,0B1,0F2,0F3,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n")
    yield {}
    yield whole(Classifier())


def reference() -> Iterator[Names]:
    names = whole()
    scheduler = torch.optim.lr_scheduler.ConstantLR(names["optimizer"])
    yield {**names, "lr_scheduler": scheduler}
    model = nn.ModuleDict({"layer": nn.ModuleDict({"qkv_proj": nn.Linear(8, 24), "out": nn.Linear(8, 8)})})
    yield {"model": model}
    yield sharded()
    yield whole()
    sent: Names = {}
    yield {"send_to_server": sent.__setitem__}
    yield sharded()


def integrations() -> Iterator[Names]:
    fabric, stateful = (
        importlib.import_module(f"{name}") for name in ("lightning.fabric", "torchdata.stateful_dataloader")
    )
    names = {**whole(), "F": nn.functional}
    yield {**names, "Fabric": fabric.Fabric, "loader": DataLoader(names["dataset"], 4)}
    kinds = {"DistributedSampler": DistributedSampler, "StatefulDataLoader": stateful.StatefulDataLoader}
    ranks = {"rank": dist.get_rank(), "num_ranks": dist.get_world_size()}
    yield {**whole(), **kinds, **ranks, "num_epochs": 2}
    # tests/examples/test_examples.py runs Ray itself
    train = SimpleNamespace(get_checkpoint=lambda: None, report=lambda *_, **__: None)
    ray = {"ray": SimpleNamespace(train=train), "storage": Path("run").absolute(), "Checkpoint": str}
    yield {**whole(), **ray, "CheckpointUploadMode": SimpleNamespace(NO_UPLOAD=None)}
    sent: Names = {}
    server = SimpleNamespace(update=sent.__setitem__, sample=lambda: (torch.randn(4, 8), torch.rand(4)))
    yield {**sharded(), "num_iterations": 2, "server": server}


GIVEN: dict[str, Callable[[], Iterator[Names]]] = {
    "checkpoints.md": checkpoints,
    "data.md": data,
    "integrations.md": integrations,
    "offload.md": offload,
    "tensor_parallel.md": tensor_parallel,
    "pipeline_parallel.md": pipeline_parallel,
    "reference.md": reference,
}
"""The generator of each page that takes names as given."""
