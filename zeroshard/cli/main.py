"""The arguments; errors become one line and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from zeroshard.cli import commands
from zeroshard.hf.weights import MAX_SHARD_BYTES
from zeroshard.version import installed_version

USAGE, FAILURE = 2, 1
"""Exit codes: impossible arguments; a file that cannot be read or written."""


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"zeroshard: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
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


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="zeroshard",
        description="Export, inspect and convert checkpoints, estimate memory: one process, no GPU.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"zeroshard {installed_version()}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    export = subparsers.add_parser(
        "export",
        help="write the model of a checkpoint as transformers does",
        description="Write safetensors, config and tokenizer, for from_pretrained() of transformers.",
    )
    _add_checkpoint(export)
    export.add_argument("directory", metavar="DIR", type=Path, help="output folder, made if it is not there")
    export.add_argument(
        "--tokenizer", metavar="FOLDER", type=Path, help="folder of a tokenizer to save there too"
    )
    export.add_argument(
        "--dtype", help="dtype of the parameters, such as bf16 (default: as they were trained)"
    )
    export.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        type=commands.parse_size,
        default=MAX_SHARD_BYTES,
        help="largest size of a file, such as 500MB or 2GiB (default: 5GB)",
    )
    export.set_defaults(run=commands.export)
    convert = subparsers.add_parser(
        "convert",
        help="rewrite a checkpoint of format 1 in the present format",
        description="Format 1 had pickles. Nothing of them runs; the files of tensors become hard links.",
    )
    _add_path(convert)
    convert.add_argument("directory", metavar="FOLDER", type=Path, help="for checkpoints; made if needed")
    convert.set_defaults(run=commands.convert)
    inspect = subparsers.add_parser(
        "inspect",
        help="show the content and origin of a checkpoint, and check that it is intact",
        description="Exit code 1 and the name of the file if it is damaged.",
    )
    _add_checkpoint(inspect)
    inspect.set_defaults(run=commands.inspect)
    estimate = subparsers.add_parser(
        "estimate",
        help="compute the memory that training a model takes on each rank",
        description="Bytes per rank and on the wire, for an optimizer of Adam's kind.",
    )
    estimate.add_argument("num_params", metavar="NUM_PARAMS", type=float, help="such as 7e9")
    estimate.add_argument("--world-size", type=int, required=True, help="number of ranks")
    estimate.add_argument(
        "--optimizer-bits", type=int, default=32, help="bits of an optimizer state: 8 or 32 (default: 32)"
    )
    config = estimate.add_mutually_exclusive_group()
    config.add_argument("--stage", type=int, default=3, help="0 to 3 (default: 3)")
    config.add_argument("--config", metavar="FILE", type=Path, help="config of zeroshard, .json or .toml")
    estimate.set_defaults(run=commands.estimate)
    return parser


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    _add_path(parser)
    parser.add_argument("--no-verify", action="store_true", help="do not compare checksums")


def _add_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        type=Path,
        help="a folder of checkpoints (the latest is taken), FOLDER/TAG, or the directory of one",
    )
