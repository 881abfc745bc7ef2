"""Train the small Llama in a loop of Lightning Fabric; ZeroShardFabricStrategy shards the model.

python examples/train_fabric.py                                     # one rank
torchrun --nproc-per-node 2 examples/train_fabric.py
"""

from __future__ import annotations

import itertools
import os

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from blocks import collator
from llama import parser, read_text, small_llama
from zeroshard.integrations.fabric import ZeroShardFabricStrategy

LOCAL_WORLD_SIZE = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # set by torchrun
NUM_HOSTS = int(os.environ.get("WORLD_SIZE", 1)) // LOCAL_WORLD_SIZE


def main() -> None:
    args = parser(__doc__, steps=61).parse_args()
    strategy = ZeroShardFabricStrategy({"stage": args.stage})
    fabric = Fabric(strategy=strategy, devices=LOCAL_WORLD_SIZE, num_nodes=NUM_HOSTS)
    fabric.launch()
    model = small_llama()
    loader = DataLoader(read_text().train, batch_size=4, shuffle=True, collate_fn=collator(model))
    loader = fabric.setup_dataloaders(loader)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for step, batch in enumerate(itertools.islice(batches, args.steps)):
        loss = model(**batch).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            fabric.print(f"step {step}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
