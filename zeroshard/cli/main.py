"""The command line; errors become one line and an exit code."""

from __future__ import annotations

import argparse
import gc
import inspect
import os
import re
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib import import_module
from types import NoneType
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from zeroshard.cli.options import COMMANDS
from zeroshard.version import installed_version

USAGE, FAILURE = 2, 1
"""Exit codes: impossible arguments; a file that cannot be read or written."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code."""
    given = vars(build_parser().parse_args(arguments))
    command = given.pop("command")
    module, options = COMMANDS[command]
    gc.disable()  # imports free next to nothing, and collections take a quarter of `estimate FOLDER`
    try:
        getattr(import_module(f"zeroshard.cli.{module}"), command)(options(**given))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe; Python would complain at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, ImportError, RuntimeError, OSError) as error:
        remedy = f": pip install {error.name}" if isinstance(error, ModuleNotFoundError) else ""
        print(f"zeroshard: {' '.join(str(error).split())}{remedy}", file=sys.stderr)
        return USAGE if isinstance(error, ValueError | ImportError) else FAILURE
    finally:
        if arguments is None:  # the process ends, whose last collections would take a second for the imports
            gc.freeze()
        gc.enable()
    return 0


class _Parser(ArgumentParser):
    """A parser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"zeroshard: {message} (see {self.prog} --help)\n")


def build_parser() -> ArgumentParser:
    """Return the parser of the command line; its result names the command in `command`."""
    parser = _Parser(
        prog="zeroshard",
        description="Export and inspect checkpoints, estimate memory, show places of ranks, "
        "plan pipelines: one process, no GPU. The doctor looks at this machine.",
        epilog="zeroshard COMMAND --help shows the options of a command, and examples.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"zeroshard {installed_version()}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, (_, options) in COMMANDS.items():
        summary, _, rest = (inspect.getdoc(options) or "").partition("\n\n")
        rest, _, examples = rest.partition("\n\nExamples:\n")
        description, _, arguments = rest.partition("\n\nArgs:\n")
        added = subparsers.add_parser(
            name,
            help=summary,
            description=description,
            epilog="examples:\n" + re.sub("^ +", "  ", examples, flags=re.MULTILINE),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        helps = dict(re.findall(r"^    (\w+): (.*(?:\n     .*)*)", arguments, re.MULTILINE))
        for field, annotation in get_type_hints(options, include_extras=True).items():
            _add(added, field, annotation, options, helps.get(field))
    return parser


def _add(parser: ArgumentParser, field: str, annotation: Any, options: Any, text: str | None) -> None:
    """Add the argument of a field; argparse breaks the text of the help into lines."""
    given: dict[str, Any] = {"help": text}
    kind = get_args(annotation)[0] if NoneType in get_args(annotation) else annotation
    if get_origin(kind) is Annotated:
        kind, more = get_args(kind)
        given |= {"type": kind} | dict(more)
    elif get_origin(kind) is Literal:
        given |= {"choices": get_args(kind), "type": type(get_args(kind)[0])}
    else:
        given |= {"action": "store_true"} if kind is bool else {"type": kind}
    name = field
    if field in options._field_defaults:
        name = f"--{field.replace('_', '-')}"
        given["default"] = options._field_defaults[field]
    parser.add_argument(*given.pop("flags", (name,)), **given)
