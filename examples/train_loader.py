"""Train the small Llama over a DataLoader of your own, and go on from a checkpoint in the middle of an epoch.

    python examples/train_loader.py                                     # one rank
    torchrun --nproc-per-node 2 examples/train_loader.py --checkpoint-dir DIR

The loader is torchdata's StatefulDataLoader, which finds its place by its own state: the same on all ranks,
as they take equally many batches. Started again with the same folder and number of ranks, the run goes on
with the batch that would have come.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import zeroshard
from blocks import collator
from llama import parser, read_text, small_llama


def main() -> None:
    options = parser(__doc__, steps=61)
    options.add_argument("--checkpoint-dir", type=Path, metavar="DIR", help="where every tenth step is saved")
    args = options.parse_args()
    model, blocks = small_llama(), read_text().train
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine = zeroshard.initialize(model, optimizer, {"stage": args.stage, "clip_grad_norm": 1.0}).engine
    sampler: DistributedSampler = DistributedSampler(blocks, engine.dp_world_size, engine.dp_rank)
    loader = StatefulDataLoader(blocks, batch_size=4, sampler=sampler, collate_fn=collator(model))
    place = {"epoch": 0}
    if args.checkpoint_dir and (args.checkpoint_dir / "latest").is_file():
        place = engine.load_checkpoint(args.checkpoint_dir)
        loader.load_state_dict(place["loader"])
    for epoch in itertools.count(place["epoch"]):
        sampler.set_epoch(epoch)
        for batch in loader:  # the first time, what is left of the epoch
            step = engine.global_step
            if step >= args.steps:
                return
            inputs = {n: v.to(engine.device) if torch.is_tensor(v) else v for n, v in batch.items()}
            loss = engine(**inputs).loss
            engine.backward(loss)
            engine.step()
            if step % 10 == 0 and engine.global_rank == 0:
                print(f"step {step}: loss {loss.item():.3f}", flush=True)
            if step % 10 == 0 and args.checkpoint_dir:
                place = {"epoch": epoch, "loader": loader.state_dict()}
                engine.save_checkpoint(args.checkpoint_dir, client_state=place)


if __name__ == "__main__":
    main()
