"""The command line of finetune.py."""

from __future__ import annotations

import argparse
import os
import pkgutil
from functools import partial
from pathlib import Path
from typing import Any

import torch

import zeroshard
from llama import HEAD_DIM
from text import TEXTS

OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, fused=True),
    "adamw8bit": zeroshard.optim.AdamW8bit,
    "muon": zeroshard.optim.Muon,
}
SMALL = {"seq_len": 256, "lr": 3e-3, "steps": 96}
"""Defaults for the small Llama, which begins with random weights."""
PRETRAINED = {"seq_len": 1024, "lr": 2e-5, "epochs": 1.0, "output": "finetuned"}
"""Defaults with --model."""
LORA_LR = 2e-4


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
            raise argparse.ArgumentTypeError(f"expected an integer >= {minimum}, got {text}")
        return int(text)

    parse.__name__ = "integer"
    return parse


def build_parser() -> argparse.ArgumentParser:
    """Return the parser. Options of the zeroshard config are None where they aren't given."""
    parser = argparse.ArgumentParser(description="Fine-tune a causal language model with zeroshard.")
    model = parser.add_argument_group("model")
    model.add_argument("--model", help="folder or hub id of a causal language model with safetensors")
    model.add_argument("--lora", type=at_least(1), metavar="RANK", help="train adapters of this rank alone")
    model.add_argument(
        "--quantize", choices=("nf4", "fp4", "int8"), help="keep frozen weights in 4 or 8 bits, with --lora"
    )
    model.add_argument("--hidden", type=at_least(1), default=128, help="width of the small Llama")
    model.add_argument("--layers", type=at_least(1), default=4, help="blocks of the small Llama")
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data",
        default="python",
        metavar="PATH",
        help='text, JSONL with "text" or "messages", or a folder of such files; '
        f"or the documentation of {' or '.join(TEXTS)} (%(default)s)",
    )
    data.add_argument("--seq-len", type=at_least(2), metavar="N", help="tokens in a block (256; 1024)")
    data.add_argument("--held-out", type=float, default=0.05, metavar="SHARE", help="(%(default)s)")
    data.add_argument("--no-packing", action="store_true", help="one document in a block")
    training = parser.add_argument_group("training (where two defaults stand, the second is for --model)")
    length = training.add_mutually_exclusive_group()
    length.add_argument("--steps", type=at_least(2), metavar="N", help="optimizer steps (96; --epochs 1)")
    length.add_argument("--epochs", type=float, metavar="E", help="instead of --steps")
    training.add_argument(
        "--optimizer",
        type=optimizer_class,
        default="adamw",
        metavar="adamw|adamw8bit|muon|CLASS",
        help="with states in 32 or 8 bits; orthogonal steps of hidden matrices, also those of LoRA, and "
        "AdamW for the rest; or a class such as bitsandbytes.optim.AdamW8bit (%(default)s)",
    )
    training.add_argument("--lr", type=float, help="highest learning rate (3e-3; 2e-5, 2e-4 with --lora)")
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--eval-every", type=at_least(1), metavar="N", help="steps (a fifth of all)")
    engine = parser.add_argument_group("engine (over what --config says)")
    engine.add_argument("--config", metavar="FILE", help="zeroshard config, .json or .toml")
    engine.add_argument("--stage", type=int, choices=range(4), help="what is sharded (default 3: all)")
    engine.add_argument("--precision", choices=("fp32", "bf16"), help="of forward and backward")
    engine.add_argument("--tp", type=at_least(1), metavar="N", help="ranks that divide each layer (1)")
    engine.add_argument("--recompute", action="store_true", help="save memory: forward again in backward")
    engine.add_argument(
        "--memory-budget", metavar="SIZE", help="of a rank, such as 60GB: recompute what must be"
    )
    engine.add_argument("--accumulate", type=at_least(1), metavar="N", help="micro-batches per step (1)")
    engine.add_argument("--clip", type=float, metavar="NORM", help="largest gradient norm (1.0); 0: any")
    engine.add_argument("--batch-size", type=at_least(1), metavar="N", help="blocks per rank (4)")
    result = parser.add_argument_group("result")
    result.add_argument("--output", metavar="DIR", help="folder for the model (none; finetuned)")
    result.add_argument("--ask", metavar="TEXT", help="a question for the model, before and after training")
    result.add_argument(
        "--questions",
        metavar="FILE",
        help='JSONL with "messages", a question and its answer in each line: the model is asked before and '
        "after training, and its answers are compared",
    )
    result.add_argument(  # not --log, which torchrun takes for one of its own
        "--metrics",
        action="append",
        default=[],
        metavar="TARGET",
        help="also send metrics to jsonl:FILE, tensorboard:FOLDER, wandb:PROJECT, mlflow:URI or terminal; "
        "may be given several times",
    )
    result.add_argument(
        "--metrics-every", type=at_least(1), default=10, metavar="N", help="steps (%(default)s)"
    )
    result.add_argument("--plot", default="loss.png", metavar="FILE", help="(%(default)s)")
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
    return parser


def check_paths(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse results that could not be written after hours of training."""
    if not Path(args.plot).parent.is_dir():
        parser.error(f"--plot: no directory '{Path(args.plot).parent}'")
    if Path(args.plot).is_dir():
        parser.error(f"--plot: expected a file, got the directory '{args.plot}'")
    for option, value in (("--output", args.output), ("--checkpoint-dir", args.checkpoint_dir)):
        path = Path(value or ".").absolute()
        there = next(folder for folder in (path, *path.parents) if folder.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            parser.error(f"{option}: expected a directory that can be written to, got '{there}'")
    if args.output and args.model and Path(args.output).resolve() == Path(args.model).resolve():
        parser.error(f"--output: expected another folder than --model, got '{args.output}' for both")


def parse_args() -> argparse.Namespace:
    """Read the command line, with the defaults of the model that it asks for."""
    parser = build_parser()
    args = parser.parse_args()
    args.unit = "token" if args.model else "byte"
    defaults: dict[str, Any] = dict(PRETRAINED if args.model else SMALL)
    if args.lora:
        defaults["lr"] = LORA_LR
    if args.steps or args.epochs:
        defaults.pop("steps", None), defaults.pop("epochs", None)
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.hidden % HEAD_DIM:
        parser.error(f"--hidden: expected a multiple of {HEAD_DIM}, got {args.hidden}")
    if args.lora and not args.model:
        parser.error("--lora: expected --model with it")
    if args.quantize and not args.lora:
        parser.error("--quantize: expected --lora with it, since weights of 4 or 8 bits are not trained")
    if args.lr <= 0 or (args.clip or 0) < 0 or (args.epochs or 1) <= 0:
        parser.error(
            f"expected --lr > 0, --clip >= 0 and --epochs > 0, got {args.lr}, {args.clip}, {args.epochs}"
        )
    if not 0 < args.held_out < 1:
        parser.error(f"--held-out: expected a share between 0 and 1, got {args.held_out}")
    if args.checkpoint_dir is None and (args.save_every or args.keep_last or args.resume != "no"):
        parser.error("--save-every, --keep-last and --resume: expected --checkpoint-dir with them")
    check_paths(parser, args)
    return args
