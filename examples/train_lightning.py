"""Train the small Llama with a Trainer of Lightning; ZeroShardStrategy shards the module.

python examples/train_lightning.py                                  # one rank
torchrun --nproc-per-node 2 examples/train_lightning.py
"""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from blocks import collator
from llama import parser, read_text, small_llama
from zeroshard.integrations.lightning import ZeroShardStrategy

LOCAL_WORLD_SIZE = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # set by torchrun
NUM_HOSTS = int(os.environ.get("WORLD_SIZE", 1)) // LOCAL_WORLD_SIZE


class SmallLlama(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = small_llama()

    def training_step(self, batch: dict[str, Any], number: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        if self.global_rank == 0 and self.global_step % 10 == 0:
            print(f"step {self.global_step}: loss {loss.item():.3f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    args = parser(__doc__, steps=61).parse_args()
    module = SmallLlama()
    loader = DataLoader(read_text().train, batch_size=4, shuffle=True, collate_fn=collator(module.model))
    trainer = Trainer(
        strategy=ZeroShardStrategy({"stage": args.stage, "clip_grad_norm": 1.0}),
        devices=LOCAL_WORLD_SIZE,
        num_nodes=NUM_HOSTS,
        max_steps=args.steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)


if __name__ == "__main__":
    main()
