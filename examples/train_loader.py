"""Train the small Llama over a DataLoader of your own, and go on from a checkpoint in the middle of an epoch.

    python examples/train_loader.py                                     # one rank
    torchrun --nproc-per-node 2 examples/train_loader.py --checkpoint-dir DIR

The loader is torchdata's StatefulDataLoader, which finds its place by its own state: the same on all ranks,
as they take equally many batches. Started again with the same folder and number of ranks, the run goes on
with the batch that would have come.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import zeroshard
from blocks import collator
from llama import parser, read_text, small_llama

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun


def main() -> None:
    options = parser(__doc__, steps=61)
    options.add_argument("--checkpoint-dir", type=Path, metavar="DIR", help="where every tenth step is saved")
    args = options.parse_args()
    model, blocks = small_llama(), read_text().train
    sampler: DistributedSampler = DistributedSampler(blocks, WORLD_SIZE, RANK)  # of all ranks alike
    loader = StatefulDataLoader(blocks, batch_size=4, sampler=sampler, collate_fn=collator(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    config = {"stage": args.stage, "clip_grad_norm": 1.0}
    engine = zeroshard.initialize(model, optimizer, config).engine
    epoch = 0
    if args.checkpoint_dir and (args.checkpoint_dir / "latest").is_file():
        place = engine.load_checkpoint(args.checkpoint_dir)
        epoch = place["epoch"]
        loader.load_state_dict(place["loader"])
    while engine.global_step < args.steps:
        sampler.set_epoch(epoch)
        for batch in loader:  # the first time, what is left of the epoch
            step = engine.global_step
            loss = engine(**{name: values.to(engine.device) for name, values in batch.items()}).loss
            engine.backward(loss)
            engine.step()
            if step % 10 == 0:
                if RANK == 0:
                    print(f"step {step}: loss {loss.item():.3f}", flush=True)
                if args.checkpoint_dir:
                    place = {"epoch": epoch, "loader": loader.state_dict()}
                    engine.save_checkpoint(args.checkpoint_dir, client_state=place)
            if engine.global_step >= args.steps:
                break
        epoch += 1


if __name__ == "__main__":
    main()
