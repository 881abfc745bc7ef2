r"""Train a causal language model with zeroshard, and see the memory of a rank.

    python examples/finetune.py                                            # one rank
    torchrun --nproc-per-node 2 examples/finetune.py                       # two ranks, on CPUs or GPUs
    torchrun --nproc-per-node 8 examples/finetune.py --model PATH_OR_HUB_ID --data text.jsonl --precision bf16
    torchrun --nproc-per-node 2 --max-restarts 3 examples/finetune.py \
        --checkpoint-dir DIR --save-every 100 --resume auto

When a rank is lost, the last command goes on from the newest checkpoint. Without --model the model is a small
Llama with random weights that reads bytes. Without --data the text is the documentation that comes with
Python.
"""

from __future__ import annotations

import argparse
import math
import os
import pkgutil
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import zeroshard
from report import MIB, held_bytes, memory_table, resident_bytes, save_plot
from text import ByteTokenizer, Tokenizer, read_text, split_blocks

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun
HEAD_DIM = 32  # of the small Llama
PROMPT_TOKENS, SAMPLE_TOKENS, TEMPERATURE = 40, 200, 0.7
OPTIMIZERS = {"adamw": partial(torch.optim.AdamW, fused=True), "adamw8bit": zeroshard.optim.AdamW8bit}
COLUMNS = (BarColumn(10), MofNCompleteColumn(), TextColumn("{task.fields[state]}"))


class History(NamedTuple):
    """A training run up to some step. Each checkpoint has it, so a resumed run reports all of its steps."""

    evaluation: float  # loss before the first step
    losses: list[float]  # one per step, mean over all ranks
    seconds: float  # of training


# ------------------------------------------------------------------------------------------------ setup


def optimizer_class(name: str) -> Any:
    """Return the class of an optimizer that an option names; it is called as AdamW is."""
    try:
        return OPTIMIZERS.get(name) or pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"expected {', '.join(OPTIMIZERS)} or the path of a class, got {name!r}: {error}"
        ) from None


def at_least(minimum: int) -> Any:
    """Return an argparse type: an integer of at least `minimum`."""

    def parse(text: str) -> int:
        if int(text) < minimum:
            raise argparse.ArgumentTypeError(f"expected an integer >= {minimum}, came {text}")
        return int(text)

    parse.__name__ = "integer"
    return parse


def parse_args() -> argparse.Namespace:
    """Read the command line; options of the zeroshard config are None where they aren't given."""
    parser = argparse.ArgumentParser(description="Train a causal language model with zeroshard.")
    engine = parser.add_argument_group("engine (over what --config says)")
    engine.add_argument("--config", metavar="FILE", help="zeroshard config, .json or .toml")
    engine.add_argument("--stage", type=int, choices=range(4), help="what is sharded (default 3: all)")
    engine.add_argument("--precision", choices=("fp32", "bf16"), help="of forward and backward")
    engine.add_argument("--accumulate", type=at_least(1), metavar="N", help="micro-batches per step (1)")
    engine.add_argument("--clip", type=float, metavar="NORM", help="largest gradient norm (1.0); 0: any")
    engine.add_argument("--batch-size", type=at_least(1), metavar="N", help="blocks per rank (4)")
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=at_least(2), default=500, metavar="N", help="(%(default)s)")
    training.add_argument(
        "--optimizer",
        type=optimizer_class,
        default="adamw",
        metavar="adamw|adamw8bit|CLASS",
        help="with states in 32 or 8 bits, or a class such as bitsandbytes.optim.AdamW8bit (%(default)s)",
    )
    training.add_argument("--lr", type=float, default=3e-3, help="highest learning rate (%(default)s)")
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--data", metavar="FILE", help='text, or .jsonl with a "text" in each line')
    training.add_argument("--seq-len", type=at_least(2), default=128, metavar="N", help="tokens in a block")
    training.add_argument("--plot", default="loss.png", metavar="FILE", help="(%(default)s)")
    checkpoints = parser.add_argument_group("checkpoints")
    checkpoints.add_argument("--checkpoint-dir", metavar="DIR", help="where the last step is saved")
    checkpoints.add_argument("--save-every", type=at_least(1), metavar="N", help="and every N-th step")
    checkpoints.add_argument("--keep-last", type=at_least(1), metavar="N", help="checkpoints that stay (all)")
    checkpoints.add_argument(
        "--resume",
        metavar="auto|TAG|no",
        default="no",
        help="go on from the latest checkpoint if there is one, or from that with this tag (%(default)s)",
    )
    model = parser.add_argument_group("model")
    model.add_argument("--model", help="path or hub id of a causal language model")
    model.add_argument("--hidden", type=at_least(1), default=128, help="width of the small Llama")
    model.add_argument("--layers", type=at_least(1), default=4, help="blocks of the small Llama")
    args = parser.parse_args()
    if args.hidden % HEAD_DIM:
        parser.error(f"--hidden: expected a multiple of {HEAD_DIM}, came {args.hidden}")
    if args.lr <= 0 or (args.clip or 0) < 0:
        parser.error(f"expected --lr > 0 and --clip >= 0, came {args.lr} and {args.clip}")
    if args.checkpoint_dir is None and (args.save_every or args.keep_last or args.resume != "no"):
        parser.error("--save-every, --keep-last and --resume: expected --checkpoint-dir with them")
    if not Path(args.plot).parent.is_dir():
        parser.error(f"--plot: no directory '{Path(args.plot).parent}'")
    return args


def build_config(args: argparse.Namespace) -> zeroshard.Config:
    """Return the zeroshard config: of the file, or this example's defaults, with the flags on top."""
    config = zeroshard.Config(micro_batch_size=4, clip_grad_norm=1.0)
    if args.config is not None:
        config = zeroshard.Config.from_file(args.config)
    if args.clip == 0:
        config, args.clip = replace(config, clip_grad_norm=None), None
    flags = {
        "stage": args.stage,
        "precision": args.precision and zeroshard.Precision(param_dtype=args.precision),
        "gradient_accumulation_steps": args.accumulate,
        "clip_grad_norm": args.clip,
        "micro_batch_size": args.batch_size,
        "checkpoint": args.keep_last and replace(config.checkpoint, keep_last=args.keep_last),
    }
    return replace(config, **{key: value for key, value in flags.items() if value is not None})


def build_model(args: argparse.Namespace) -> tuple[nn.Module, Tokenizer]:
    """Return the model that --model names, or a small Llama with random weights, and its tokenizer."""
    if args.model is not None:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, use_cache=False)
        tokenizer: Any = AutoTokenizer.from_pretrained(args.model)
        return model, tokenizer
    sizes = LlamaConfig(
        vocab_size=256,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 5 // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // HEAD_DIM,
        max_position_embeddings=args.seq_len,
        use_cache=False,
    )
    return LlamaForCausalLM(sizes), ByteTokenizer()


def warmup_cosine(optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """A learning rate that rises over the first 5% of `steps`, and then falls to 5% along a cosine."""
    warmup = max(1, steps // 20)

    def factor(step: int) -> float:
        cosine = 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / steps))
        return min(1.0, (step + 1) / warmup) * (0.05 + 0.95 * cosine)

    return LambdaLR(optimizer, factor)


# --------------------------------------------------------------------------------------------- training


def over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Return the 1-D `values` of every rank, one row each. All ranks must call it."""
    if not dist.is_initialized():
        return values[None]
    rows = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, values)
    return torch.stack(rows)


def device_of(engine: zeroshard.Engine) -> torch.device:
    """Return the device that the engine has put the model on."""
    return next(engine.parameters()).device


def forever(dataloader: Iterable[list[torch.Tensor]]) -> Iterator[torch.Tensor]:
    """Yield batches of token ids, epoch after epoch."""
    while True:
        for (ids,) in dataloader:
            yield ids


@torch.no_grad()
def evaluate(engine: zeroshard.Engine, blocks: torch.Tensor) -> float:
    """Return the mean loss over `blocks`; all ranks take equally many forwards."""
    engine.eval()
    blocks = blocks[RANK::WORLD_SIZE][: len(blocks) // WORLD_SIZE].to(device_of(engine))
    batches = blocks.split(engine.config.micro_batch_size)
    losses = torch.stack([engine(input_ids=ids, labels=ids).loss * len(ids) for ids in batches])
    engine.train()
    return over_ranks(losses.sum()[None] / len(blocks)).mean().item()


def resume(engine: zeroshard.Engine, folder: str, tag: str) -> History | None:
    """Go on from the checkpoint that `tag`, the value of --resume, asks for; None if there is none."""
    if tag == "no" or (tag == "auto" and not Path(folder, "latest").is_file()):
        return None
    return History(**engine.load_checkpoint(folder, None if tag == "auto" else tag))


def train(
    engine: zeroshard.Engine,
    batches: Iterator[torch.Tensor],
    history: History,
    args: argparse.Namespace,
    console: Console,
) -> tuple[History, zeroshard.MemoryReport]:
    """Take the optimizer steps that are left; save checkpoints and report progress on the way.

    Return the whole history, and the memory while the gradients exist: before the last optimizer step.
    """
    accumulate, steps, first = engine.config.gradient_accumulation_steps, args.steps, len(history.losses)
    losses = torch.zeros(steps, device=device_of(engine))  # of this rank, from `first` on
    shown = console.is_terminal and not console.quiet
    begin, tokens, memory = first, 0, engine.memory_report()
    start = begin_time = time.perf_counter()

    def history_until(step: int) -> History:  # all ranks must call it
        means = over_ranks(losses[first:step]).mean(0).tolist()
        seconds = history.seconds + time.perf_counter() - start
        return history._replace(losses=history.losses + means, seconds=seconds)

    with Progress(*COLUMNS, console=console, disable=not shown) as progress:
        task = progress.add_task("training", total=steps, completed=first, state="")
        for step in range(first, steps):
            is_last = step == steps - 1
            tell = (step + 1) % max(1, steps // 20) == 0 or is_last
            for _ in range(accumulate):
                ids = next(batches)
                loss = engine(input_ids=ids, labels=ids).loss
                engine.backward(loss)
                losses[step] += loss.detach() / accumulate
                tokens += ids.numel() * WORLD_SIZE
                if tell:
                    memory = engine.memory_report()  # before step() frees the gradients
                engine.step()
            progress.update(task, completed=step + 1)
            if tell:
                state = describe(losses[begin : step + 1], tokens, time.perf_counter() - begin_time, memory)
                begin, tokens, begin_time = step + 1, 0, time.perf_counter()
                progress.update(task, state=state)
                if not shown:
                    console.print(f"step {step + 1}/{steps}: {state}", highlight=False, soft_wrap=True)
            if args.checkpoint_dir and (is_last or (args.save_every and (step + 1) % args.save_every == 0)):
                client_state = history_until(step + 1)._asdict()
                engine.save_checkpoint(args.checkpoint_dir, client_state=client_state, blocking=is_last)
    return history_until(steps), memory


def describe(losses: torch.Tensor, tokens: int, seconds: float, memory: zeroshard.MemoryReport) -> str:
    """Return mean loss, speed, and the memory of the rank that holds most. All ranks must call it."""
    own = [losses.mean().item(), held_bytes(memory) / MIB, resident_bytes() / MIB]
    ranks = over_ranks(torch.tensor(own, device=losses.device))
    loss, model, rss = ranks[:, 0].mean(), ranks[:, 1].max(), ranks[:, 2].max()
    return f"loss {loss:.3f}, {tokens / seconds:,.0f} tokens/s, model {model:,.1f} MiB, RSS {rss:,.0f} MiB"


@torch.no_grad()
def generate(engine: zeroshard.Engine, prompt: list[int], length: int, context: int, seed: int) -> list[int]:
    """Sample `length` tokens after `prompt`. All ranks must call it alike; they get the same tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    engine.eval()
    for _ in range(length):
        window = torch.tensor([ids[-context:]], device=device_of(engine))
        logits = engine(input_ids=window).logits[0, -1].float().cpu()
        probabilities = torch.softmax(logits / TEMPERATURE, dim=-1)
        ids.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return ids[len(prompt) :]


# ------------------------------------------------------------------------------------------------- main


def main() -> None:
    """Evaluate, train, evaluate again, and show the results."""
    args = parse_args()
    torch.manual_seed(args.seed)
    try:
        config = build_config(args)
        text = read_text(args.data)
        model, tokenizer = build_model(args)
        blocks = split_blocks(tokenizer.encode(text), args.seq_len, WORLD_SIZE)
    except (OSError, ValueError) as error:
        sys.exit(f"finetune.py: {error}")
    num_params = sum(parameter.numel() for parameter in model.parameters())
    optimizer = args.optimizer(model.parameters(), args.lr, (0.9, 0.95), weight_decay=0.1)
    engine, _, dataloader, _ = zeroshard.initialize(
        model,
        optimizer,
        config,
        training_data=TensorDataset(blocks.train),
        lr_scheduler=warmup_cosine(optimizer, args.steps),
    )
    assert dataloader is not None  # there is training data

    console = Console(quiet=RANK != 0)  # so that rank 0 alone speaks
    unit = "token" if args.model else "byte"
    device = device_of(engine)
    setting = f"stage {config.stage}, ranks: {WORLD_SIZE}"
    console.print(f"{setting}, {num_params:,} parameters on {device.type}; memory is per rank")
    try:
        history = resume(engine, args.checkpoint_dir, args.resume)
    except ValueError as error:
        sys.exit(f"finetune.py: {error}")
    if history is not None:
        console.print(f"going on after step {len(history.losses)}, from {args.checkpoint_dir}")
    history = history or History(evaluate(engine, blocks.held_out), [], 0.0)
    console.print(f"evaluation loss before: {history.evaluation:.3f} nats per {unit}")
    history, memory = train(engine, forever(dataloader), history, args, console)
    after = evaluate(engine, blocks.held_out)
    console.print(f"evaluation loss after: {after:.3f} nats per {unit}, {history.seconds:.1f} s of training")

    prompt = blocks.held_out[0, :PROMPT_TOKENS].tolist()
    sample = generate(engine, prompt, SAMPLE_TOKENS, args.seq_len, args.seed)
    written = Text.assemble((tokenizer.decode(prompt), "bold"), tokenizer.decode(sample))
    console.print(Panel(written, title="a sample, after a held-out prompt"))
    console.print(memory_table(memory, num_params, f"Memory, {setting}"))
    if RANK == 0:
        drawn = save_plot(args.plot, history.losses, (history.evaluation, after), unit)
        console.print(f"loss curve: {args.plot}" if drawn else "no loss curve: matplotlib isn't installed")


if __name__ == "__main__":
    main()
