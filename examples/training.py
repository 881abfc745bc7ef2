"""The training loop of finetune.py: steps, evaluation on held-out text, checkpoints."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console

import report
import zeroshard
from blocks import Blocks, collator, evaluation_batches


class History(NamedTuple):
    """A training run up to some step. Each checkpoint has it, so a resumed run reports all of its steps."""

    evaluations: list[tuple[int, float]]  # steps taken, and the loss on the held-out text
    losses: list[float]  # one per step, mean over all ranks
    digest: str  # of the text


def over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Return the 1-D `values` of every rank, one row each. All ranks must call it."""
    if not dist.is_initialized():
        return values[None]
    rows = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, values)
    return torch.stack(rows)


@torch.no_grad()
def evaluate(engine: zeroshard.Engine, blocks: Blocks) -> float:
    """Return the mean loss over all labels of `blocks`; all ranks take equally many forwards."""
    engine.eval()
    total = torch.zeros(2, dtype=torch.float64, device=engine.device)
    batches = evaluation_batches(
        blocks,
        engine.config.micro_batch_size,
        rank=engine.dp_rank,
        num_ranks=engine.dp_world_size,
        collate_fn=collator(engine),
        device=total.device,
    )
    for batch, num_labels in batches:
        loss = engine(**batch).loss.double()
        if num_labels:  # a rank that has no block left takes a forward for the others' sake
            total += torch.stack([loss * num_labels, torch.full_like(loss, num_labels)])
    engine.train()
    loss_sum, num_labels = over_ranks(total).sum(0).tolist()
    return float(loss_sum / num_labels)


class Trainer:
    """Takes the optimizer steps of a run, and tells how it goes.

    Args:
        engine: the engine.
        dataloader: this rank's batches; each iteration is an epoch.
        held_out: the blocks for evaluation.
        args: the options of finetune.py.
        steps: the number of optimizer steps of the whole run.
        console: where rank 0 tells.
        evaluation: the seconds of an evaluation, as far as they are known.
    """

    def __init__(
        self,
        engine: zeroshard.Engine,
        dataloader: Iterable[dict[str, Any]],
        held_out: Blocks,
        args: Namespace,
        steps: int,
        console: Console,
        evaluation: float,
    ) -> None:
        self._engine, self._dataloader, self._held_out = engine, dataloader, held_out
        self._args, self._steps, self._evaluation = args, steps, evaluation
        self._eval_every = args.eval_every or max(1, steps // 5)
        self._log = zeroshard.StepLog(
            engine, *args.metrics, every=args.metrics_every, num_steps=steps, config=vars(args)
        )
        self._progress = report.TrainingProgress(console, steps, args.unit, self._eval_every)
        engine.reset_memory_report()  # an answer before training had gathered the whole model
        self._memory = engine.memory_report()

    def train(self, history: History) -> tuple[History, zeroshard.MemoryReport]:
        """Take the steps that are left.

        Returns:
            The whole history, and the memory while the gradients exist: before the last optimizer step.
        """
        first = len(history.losses)
        losses = torch.zeros(self._steps, device=self._engine.device)  # of this rank, from `first` on
        batches, begin = self._forever(), first
        with self._progress as progress, self._log as log:
            progress.begin(first, self._evaluation)
            for step in range(first, self._steps):
                num_tokens = self._step(batches, losses, step, is_told=progress.is_due(step))
                progress.count(num_tokens * self._engine.dp_world_size)
                done = step + 1
                if self._is_due(done, self._eval_every):
                    begin_evaluation = time.perf_counter()
                    with log.pause():
                        evaluation = (done, evaluate(self._engine, self._held_out))
                    log.note(held_out_loss=evaluation[1])
                    progress.evaluated(time.perf_counter() - begin_evaluation)
                    history = history._replace(evaluations=[*history.evaluations, evaluation])
                saves = self._args.checkpoint_dir and self._is_due(done, self._args.save_every)
                if progress.is_due(step) or saves:
                    means = over_ranks(losses[begin:done]).mean(0).tolist()
                    history = history._replace(losses=history.losses + means)
                    begin = done
                if progress.is_due(step):
                    progress.tell(done, history, self._engine)
                if saves:
                    is_last = done == self._steps
                    state = history._asdict()
                    self._engine.save_checkpoint(
                        self._args.checkpoint_dir, client_state=state, blocking=is_last
                    )
        return history, self._memory

    def _is_due(self, done: int, every: int | None) -> bool:
        """True after each `every`-th step, and after the last one."""
        return done == self._steps or (every is not None and done % every == 0)

    def _forever(self) -> Iterator[dict[str, Any]]:
        while True:
            yield from self._dataloader

    def _step(self, batches: Iterator[dict[str, Any]], losses: torch.Tensor, step: int, is_told: bool) -> int:
        """Take an optimizer step, and add its loss; return the number of this rank's tokens."""
        accumulate, num_tokens = self._engine.config.gradient_accumulation_steps, 0
        for _ in range(accumulate):
            batch = next(batches)
            loss = self._engine(**batch).loss
            self._engine.backward(loss)
            losses[step] += loss.detach() / accumulate
            num_tokens += batch["input_ids"].numel()
            if is_told:
                self._memory = self._engine.memory_report()  # before step() frees the gradients
            self._engine.step()
            self._log.step(loss, batch["input_ids"].numel())
        return num_tokens
