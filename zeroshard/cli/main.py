"""The command line; errors become one line and an exit code.

Arguments need nothing but the standard library, so help comes at once.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, NoReturn

from zeroshard.version import installed_version

USAGE, FAILURE = 2, 1
"""Exit codes: impossible arguments; a file that cannot be read or written."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code."""
    options = build_parser().parse_args(arguments)
    try:
        module, _, function = COMMANDS[options.command].run.partition(".")
        getattr(import_module(f"zeroshard.cli.{module}"), function)(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe; Python would complain at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, ImportError) as error:
        return _fail(error, USAGE)
    except (RuntimeError, OSError) as error:
        return _fail(error, FAILURE)
    return 0


def _fail(error: Exception, code: int) -> int:
    print(f"zeroshard: {' '.join(str(error).split())}", file=sys.stderr)
    return code


_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGT]?i?B)?", re.IGNORECASE)
_IMPORT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_COUNT = re.compile(r"(?P<number>\d[\d_,]*(\.\d+)?(e\+?\d{1,2})?)\s*(?P<unit>[KMBT])?", re.IGNORECASE)


class _Parser(ArgumentParser):
    """A parser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"zeroshard: {message} (see {self.prog} --help)\n")


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 1000, 500MB or 2GiB. Raises ArgumentTypeError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ArgumentTypeError(f"expected a size such as 5GB, got {text!r}")
    unit = (match["unit"] or "B").upper()
    return int(float(match["number"]) * (1024 if "I" in unit else 1000) ** "BKMGT".index(unit[0]))


def parse_model(text: str) -> int | Path | str:
    """Return the number that 7B, 125M, 7e9 or 135_000_000 means, an import path, or the path of a file.

    Raises:
        ArgumentTypeError: there is no such path, or the number is no whole number above 0.
    """
    if _COUNT.fullmatch(text.strip()):
        return parse_count(text)
    if Path(text).exists():
        return Path(text)
    if _IMPORT.fullmatch(text):
        return text
    raise ArgumentTypeError(
        "expected a number of parameters such as 7B, a config.json of transformers or its folder, or an "
        f"import path such as my_package.models:build, got {text!r}"
    )


def parse_count(text: str) -> int:
    """Return the number that 7B, 125M, 7e9 or 135_000_000 means.

    Raises:
        ArgumentTypeError: it is no whole number above 0.
    """
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        raise ArgumentTypeError(f"expected a number such as 300B or 3e11, got {text!r}")
    factor = 1000 ** " KMBT".index((match["unit"] or " ").upper())
    number = Decimal(match["number"].replace(",", "")) * factor
    if number < 1 or number != int(number):
        raise ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(number)


def parse_duration(text: str) -> float:
    """Return a duration such as 1 or 0.25. Raises ArgumentTypeError."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ArgumentTypeError(f"expected a duration such as 1 or 0.25, got {text!r}")
    return number


def parse_ranks(text: str) -> list[int]:
    """Return the numbers of ranks of a list such as 8 or 1,2,4,8. Raises ArgumentTypeError."""
    parts = text.replace(" ", "").split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ArgumentTypeError(f"expected numbers of ranks such as 8 or 1,2,4,8, got {text!r}")
    return sorted({int(part) for part in parts})


def build_parser() -> ArgumentParser:
    """Return the parser of the command line; its result names the command in `command`."""
    parser = _Parser(
        prog="zeroshard",
        description="Export and inspect checkpoints, estimate memory, show groups of ranks, "
        "plan pipelines: one process, no GPU. The doctor looks at this machine.",
        epilog="zeroshard COMMAND --help shows the options of a command, and examples.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"zeroshard {installed_version()}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, command in COMMANDS.items():
        added = subparsers.add_parser(
            name,
            help=command.help,
            description=command.description,
            epilog="\n  ".join(["examples:", *command.examples]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add(added)
    return parser


def _add_export(parser: ArgumentParser) -> None:
    _add_checkpoint(parser)
    add = parser.add_argument
    add("directory", metavar="DIR", type=Path, help="output folder, made if it is not there")
    add("--tokenizer", metavar="FOLDER", type=Path, help="folder of a tokenizer to save there too")
    add("--dtype", help="dtype of the parameters, such as bf16 (default: as they were trained)")
    most = "largest size of a file, such as 500MB or 2GiB (default: 5GB)"
    add("--max-shard-size", metavar="SIZE", type=parse_size, help=most)


def _add_inspect(parser: ArgumentParser) -> None:
    _add_checkpoint(parser)
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def _add_estimate(parser: ArgumentParser) -> None:
    add = parser.add_argument
    model = (
        "number of parameters, such as 7B, 125M or 7e9, for a typical language model of that size; "
        "or a config.json of transformers, or the folder of one; or the import path of a function that "
        "builds the model, package.module:function"
    )
    add("model", metavar="MODEL", type=parse_model, help=model)
    ranks = "numbers of ranks, such as 1,2,4,8 (default: 8)"
    add("--ranks", "--world-size", metavar="N[,N...]", type=parse_ranks, default=[8], help=ranks)
    add("--precision", choices=("bf16", "fp16", "fp32"), help="of forward and backward (default: fp32)")
    add("--optimizer-bits", type=int, choices=(8, 32), help="bits of each of Adam's two states (default: 32)")
    add("--stage", type=int, choices=range(4), help="ZeRO stage (default: all, side by side)")
    replaced = "--stage, --precision, --tp, --pp, --microbatches and --recompute"
    config = f"config of zeroshard, .json or .toml, in place of {replaced}"
    add("--config", metavar="FILE", type=Path, help=config)
    add("--tp", metavar="N", type=int, help="tensor ranks that divide each layer (default: none, 1)")
    add("--pp", metavar="N", type=int, help="ranks of the pipeline (default: none, 1)")
    add("--microbatches", metavar="M", type=int, help="micro-batches of a pipeline's batch")
    add("--recompute", choices=("none", "unit"), help="recompute the activations of units")
    tokens = "tokens of a micro-batch of a rank, samples x length, to count activations (default: none are)"
    add("--tokens", metavar="N", type=int, default=0, help=tokens)
    add("--length", metavar="N", type=int, default=0, help="tokens of a sample (default: all)")
    attention = "eager keeps the scores, for a number of parameters (default: fused)"
    add("--attention", choices=("fused", "eager"), help=attention)
    add("--lora", metavar="RANK", type=int, help="train adapters of this rank; needs peft")
    add("--weight-bits", type=int, choices=(4, 8), help="bits of the frozen weights; needs bitsandbytes")
    memory = parser.add_mutually_exclusive_group()
    gpu = "list the settings that fit it, such as h100 or a100-40"
    memory.add_argument("--gpu", metavar="NAME", help=gpu)
    memory.add_argument("--memory", metavar="SIZE", type=parse_size, help="the same for a size such as 80GiB")
    add("--host", metavar="SIZE", type=parse_size, help="host memory of a node, for offload")
    add("--nvme", metavar="SIZE", type=parse_size, help="disk space of a node, for offload")
    add("--ranks-per-node", metavar="N", type=int, help="ranks that share them (default: 8)")
    add("--train-tokens", metavar="N", type=parse_count, help="tokens of the whole training, for its time")
    add("--tflops", metavar="X", type=float, help="10**12 operations per second that a rank reaches")


def _add_mesh(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", "--world-size", metavar="N", type=int, required=True, help="all ranks")
    add("--tp", metavar="N", type=int, default=1, help="ranks of a tensor group (default: 1)")
    add("--pp", metavar="N", type=int, default=1, help="ranks of a pipeline group (default: 1)")
    size = "data-parallel ranks of a shard group, for hybrid sharding (default: all of them)"
    add("--shard-group-size", metavar="N", type=int, help=size)


def _add_plan(parser: ArgumentParser) -> None:
    add = parser.add_argument
    schedule = (
        "gpipe, 1f1b, interleaved, zb-h1, zbv or varuna; asynchronous: pipedream, 2bw, pipemare, pb, "
        "spectrain, lwp or paci; or a file with a list for each rank; several times to compare them"
    )
    add("--schedule", metavar="NAME", action="append", required=True, help=schedule)
    add("--stages", "--pp", metavar="P", type=int, help="ranks of the pipeline")
    add("--microbatches", metavar="M", type=int, help="micro-batches of a batch")
    steps = "micro-batches of each step of asynchronous schedules (default: the fewest that each allows)"
    add("--per-step", metavar="K", type=int, help=steps)
    chunks = "runs of layers on each rank (default: 2 for interleaved and zbv, else 1)"
    add("--chunks", metavar="V", type=int, help=chunks)
    for name, default, of in (
        ("forward", 1.0, "forward of a micro-batch through a rank's layers"),
        ("backward", 2.0, "backward, half of it for the weights"),
        ("transfer", 0.0, "transfer between two ranks"),
    ):
        duration = f"duration of a {of} (default: {default:g})"
        add(f"--{name}", metavar="TIME", type=parse_duration, default=default, help=duration)
    recompute = (
        "recompute activations before each backward, with this duration (default: no recompute, "
        "but varuna always does, with the duration of a forward)"
    )
    add("--recompute", metavar="TIME", type=parse_duration, help=recompute)
    plot = "show a chart of the actions over time; with a file, as a picture"
    add("--plot", metavar="FILE", nargs="?", const="-", help=plot)
    add("--list", action="store_true", help="print the actions alone, as such a file has them")


def _add_doctor(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--disk", metavar="PATH", type=Path, help="folder of a disk whose speed is measured, with 256 MiB")
    add("--device", help="cpu, cuda or cuda:1, as in a config (default: the one of the rank)")
    add("--json", action="store_true", help="print JSON for programs")


def _add_chat(parser: ArgumentParser) -> None:
    add = parser.add_argument
    folder = "folder of a model and its tokenizer, as transformers saves"
    add("directory", metavar="DIR", type=Path, help=folder)
    add("prompt", metavar="TEXT", nargs="?", help="one question; without it a conversation")
    add("--system", metavar="TEXT", help="what the model is told first")
    add("--max-tokens", type=int, default=300, metavar="N", help="of an answer (default: 300)")
    probable = "of sampling; 0 takes the most probable (default: 0.7)"
    add("--temperature", type=float, default=0.7, help=probable)


def _add_checkpoint(parser: ArgumentParser) -> None:
    folder = "a folder of checkpoints (the latest is taken), FOLDER/TAG, or the directory of one"
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help=folder)
    parser.add_argument("--no-verify", action="store_true", help="do not compare checksums")


class _Command(NamedTuple):
    """A command; `run` is "module.function" in this folder, imported when the command runs.

    torch alone takes a second or two to import, and the parts of it that write checkpoints as long again.
    """

    run: str
    help: str
    description: str
    add: Callable[[ArgumentParser], None]
    examples: tuple[str, ...]
    """At the end of the help."""


COMMANDS: Mapping[str, _Command] = {
    "export": _Command(
        "checkpoints.export",
        "write the model of a checkpoint as transformers does",
        "Write safetensors, config and tokenizer, for from_pretrained() of transformers.",
        _add_export,
        (
            "zeroshard export checkpoints out",
            "zeroshard export checkpoints/step-300 out --tokenizer base-model --dtype bf16",
        ),
    ),
    "inspect": _Command(
        "checkpoints.inspect",
        "show the origin and content of a checkpoint, and check that it is intact",
        "Print a summary, every tensor, and a verdict. The exit code is 1 if the\n"
        "checkpoint is damaged, and the error names the file.",
        _add_inspect,
        (
            "zeroshard inspect checkpoints",
            "zeroshard inspect checkpoints/step-300 --no-verify",
            "zeroshard inspect checkpoints --json",
        ),
    ),
    "estimate": _Command(
        "planning.plan",
        "compute the memory that training a model takes on each rank",
        "Print the bytes that each rank holds and sends, for an optimizer of Adam's kind.\n"
        "With --gpu or --memory, list the settings that fit.",
        _add_estimate,
        (
            "zeroshard estimate 7B --precision bf16",
            "zeroshard estimate 7B --precision bf16 --ranks 1,2,4,8",
            "zeroshard estimate 7B --stage 3 --ranks 8,16,32 --optimizer-bits 8",
            "zeroshard estimate 7B --precision bf16 --tp 4 --tokens 8192",
            "zeroshard estimate base-model --precision bf16",
            "zeroshard estimate base-model/config.json --config zeroshard.toml",
            "zeroshard estimate my_package.models:build --stage 3",
            "zeroshard estimate 13B --gpu h100 --host 1TiB --ranks 8 --precision bf16 --tokens 8192",
            "zeroshard estimate 7B --lora 16 --weight-bits 4 --precision bf16 --tokens 2048",
            "zeroshard estimate 175B --ranks 1024 --stage 3 --tflops 140 --train-tokens 300B",
        ),
    ),
    "mesh": _Command(
        "planning.show_groups",
        "show the groups of ranks that exchange along each axis of the mesh",
        "Print every tensor, data and pipeline group. Ranks are counted along the tensor\n"
        "axis first, then along the data-parallel axes, along the pipeline axis last. The\n"
        "data-parallel axes get the factor of --ranks that --tp and --pp leave.",
        _add_mesh,
        ("zeroshard mesh --ranks 32 --tp 4 --pp 4", "zeroshard mesh --ranks 16 --shard-group-size 8"),
    ),
    "plan": _Command(
        "pipelines.plan_pipeline",
        "compare schedules of a pipeline by time, bubbles and activations",
        "Simulate the schedules and print the time of a batch, the share of it in which ranks\n"
        "wait, the activations and the versions of weights that each rank holds. Times are in any unit.",
        _add_plan,
        (
            "zeroshard plan --schedule 1f1b --stages 4 --microbatches 8 --plot",
            "zeroshard plan --schedule 1f1b --schedule interleaved --schedule zb-h1 --pp 4 --microbatches 8",
            "zeroshard plan --schedule gpipe --schedule varuna --stages 4 --microbatches 5 --recompute 1",
            "zeroshard plan --schedule 1f1b --schedule pipedream --schedule 2bw --stages 4 --microbatches 16",
            "zeroshard plan --schedule 1f1b --stages 4 --microbatches 8 --list",
        ),
    ),
    "doctor": _Command(
        "doctor.examine",
        "show versions, devices, limits, and the features that work here",
        "Print facts for a plan or a report of a bug. Under torchrun the collectives between the\n"
        "ranks are timed too: torchrun --nproc-per-node 2 -m zeroshard doctor. Nothing is sent\n"
        "anywhere else.",
        _add_doctor,
        ("zeroshard doctor", "zeroshard doctor --disk . --json"),
    ),
    "chat": _Command(
        "chat.chat",
        "talk to a saved model in the terminal",
        "The model is loaded by transformers alone. Ctrl-D ends, /new begins a new conversation.",
        _add_chat,
        (
            "zeroshard chat finetuned",
            "zeroshard chat finetuned 'Where is the key of the archive?' --temperature 0",
        ),
    ),
}
