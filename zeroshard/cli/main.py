"""The command line; errors become one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from zeroshard.cli.arguments import FAILURE, USAGE, build_parser
from zeroshard.cli.commands import load_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code."""
    options = build_parser().parse_args(arguments)
    try:
        load_command(options.command)(options)
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
