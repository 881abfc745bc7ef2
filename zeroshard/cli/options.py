"""The commands and their options, with nothing but the standard library, so that help comes at once.

A command is a class: its fields are the arguments, and its docstring is the help. A field without a default
must be given by its place; the others are options. Annotations have the type, and the arguments for
`add_argument` of argparse that do not follow from the type.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from zeroshard.tables import parse_size

_COUNT = re.compile(r"(?P<number>\d[\d_,]*(\.\d+)?(e\+?\d{1,2})?)\s*(?P<unit>[KMBT])?", re.IGNORECASE)


def size(text: str) -> int:
    """Return the bytes of a size such as 1000, 500MB or 2GiB. Raises ArgumentTypeError."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def budget(text: str) -> int:
    """Return the bytes of a budget such as 60GB. Raises ArgumentTypeError, for a share as well."""
    if (found := size(text)) > 1:
        return found
    raise ArgumentTypeError(
        f"expected bytes such as 60GB, got {text!r}: an estimate knows no device that this is a share of"
    )


def count(text: str) -> int:
    """Return a whole number above 0. Raises ArgumentTypeError."""
    if text.isdecimal() and int(text):
        return int(text)
    raise ArgumentTypeError(f"expected a whole number above 0, got {text!r}")


def parse_model(text: str) -> int | Path:
    """Return the number that 7B, 125M, 7e9 or 135_000_000 means, or the path of a file.

    Raises:
        ArgumentTypeError: there is no such path, or the number is no whole number above 0.
    """
    if match := _COUNT.fullmatch(text.strip()):
        factor = 1000 ** " KMBT".index((match["unit"] or " ").upper())
        number = Decimal(match["number"].replace(",", "")) * factor
        if number < 1 or number != int(number):
            raise ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
        return int(number)
    if Path(text).exists():
        return Path(text)
    raise ArgumentTypeError(
        "expected a number of parameters such as 7B, or a config.json of transformers or its folder, got "
        f"{text!r}: zeroshard.estimate takes any model"
    )


def _how(**given: Any) -> tuple[tuple[str, Any], ...]:
    """Return what `add_argument` gets in addition to the type; a union of types needs a hash of it."""
    return tuple(given.items())


_RANKS = ("--ranks", "--world-size")
Number: TypeAlias = Annotated[int, _how(metavar="N", type=count)]
Size: TypeAlias = Annotated[int, _how(metavar="SIZE", type=size)]
Duration: TypeAlias = Annotated[float, _how(metavar="TIME")]
Directory: TypeAlias = Annotated[Path, _how(metavar="DIR")]


class ExportOptions(NamedTuple):
    """Write the model of a checkpoint as transformers does.

    Write safetensors and config, for from_pretrained() of transformers.

    Args:
        checkpoint: a folder of checkpoints (the latest is taken), FOLDER/TAG, or the directory of one
        directory: output folder, made if it is not there
        dtype: dtype of the parameters, such as bf16 (default: as they were trained)
        max_shard_size: largest size of a file, such as 500MB or 2GiB (default: 5GB)
        no_verify: do not compare checksums

    Examples:
        zeroshard export checkpoints out
        zeroshard export checkpoints/step-300 out --dtype bf16
    """

    checkpoint: Annotated[Path, _how(metavar="CHECKPOINT")]
    directory: Directory
    dtype: str | None = None
    max_shard_size: Size | None = None
    no_verify: bool = False


class InspectOptions(NamedTuple):
    """Show the origin and content of a checkpoint, and check that it is intact.

    Print a summary, the first tensors, and a verdict. The exit code is 1 if the
    checkpoint is damaged, and the error names the file.

    Args:
        checkpoint: a folder of checkpoints (the latest is taken), FOLDER/TAG, or the directory of one
        json: print JSON for programs, with every tensor
        no_verify: do not compare checksums

    Examples:
        zeroshard inspect checkpoints
        zeroshard inspect checkpoints/step-300 --no-verify
        zeroshard inspect checkpoints --json
    """

    checkpoint: Annotated[Path, _how(metavar="CHECKPOINT")]
    json: bool = False
    no_verify: bool = False


class EstimateOptions(NamedTuple):
    """Compute the memory that training a model takes on each rank.

    Print the bytes that each rank holds and sends, for an optimizer of Adam's
    kind. With --memory, list the settings that fit.

    Args:
        model: number of parameters, such as 7B, 125M or 7e9, for a typical language model of that size; or a
            config.json of transformers, or the folder of one
        ranks: all ranks (default: 8)
        precision: of forward and backward (default: fp32)
        optimizer_bits: bits of each of Adam's two states (default: 32)
        stage: ZeRO stage (default: all, side by side)
        config: config of zeroshard, .json or .toml, in place of --stage, --precision, --tp, --pp,
            --microbatches, --recompute and --memory-budget
        tp: tensor ranks that divide each layer (default: none, 1)
        pp: ranks of the pipeline of a model, not a number (default: none, 1)
        microbatches: micro-batches of a pipeline's batch
        recompute: recompute the activations of units; auto: of as few as --memory-budget allows
        memory_budget: bytes that a rank may use of its device, such as 60GB, for --recompute auto
        cluster: as for `zeroshard plan`: then activations may go over its link to the host
        tokens: tokens of a micro-batch of a rank, samples x length, to count activations (default: none are)
        length: tokens of a sample (default: all)
        lora: train adapters of this rank in a model, not a number; needs peft
        weight_bits: bits of its frozen weights; needs bitsandbytes
        memory: list the settings that take at most 0.9 of a device of this size, which `zeroshard doctor`
            shows: 79GiB for an H100 of 80 GB
        host: host memory of a node of 8 ranks, for offload, of which settings take at most 0.9
        nvme: disk space of such a node, for offload

    Examples:
        zeroshard estimate 7B --precision bf16
        zeroshard estimate 7B --stage 3 --ranks 32 --optimizer-bits 8
        zeroshard estimate 7B --precision bf16 --tp 4 --tokens 8192
        zeroshard estimate 7B --precision bf16 --tokens 8192 --recompute auto --memory-budget 60GB
        zeroshard estimate 7B --tokens 8192 --recompute auto --memory-budget 60GB --cluster 8xH100
        zeroshard estimate base-model --precision bf16
        zeroshard estimate base-model/config.json --config zeroshard.toml
        zeroshard estimate 13B --memory 79GiB --host 1TiB --ranks 8 --precision bf16 --tokens 8192
        zeroshard estimate base-model --lora 16 --weight-bits 4 --precision bf16 --tokens 2048
    """

    model: Annotated[int | Path, _how(metavar="MODEL", type=parse_model)]
    ranks: Annotated[int, _how(flags=_RANKS, metavar="N", type=count)] = 8
    precision: Literal["bf16", "fp16", "fp32"] | None = None
    optimizer_bits: Literal[8, 32] | None = None
    stage: Literal[0, 1, 2, 3] | None = None
    config: Annotated[Path, _how(metavar="FILE")] | None = None
    tp: Number | None = None
    pp: Number | None = None
    microbatches: Number | None = None
    recompute: Literal["none", "unit", "auto"] | None = None
    memory_budget: Annotated[int, _how(metavar="SIZE", type=budget)] | None = None
    cluster: Annotated[str, _how(metavar="NAME")] | None = None
    tokens: Number = 0
    length: Number = 0
    lora: Number | None = None
    weight_bits: Literal[4, 8] | None = None
    memory: Size | None = None
    host: Size = 0
    nvme: Size = 0


class MeshOptions(NamedTuple):
    """Show the place of each rank on the axes of the mesh.

    Ranks that differ on one axis alone are a group, and exchange along it. They are counted
    along the tensor axis first, then along the data-parallel axes, along the pipeline axis last.
    The data-parallel axes get the factor of --ranks that --tp and --pp leave.

    Args:
        ranks: all ranks
        tp: ranks of a tensor group (default: 1)
        pp: ranks of a pipeline group (default: 1)
        shard_group_size: data-parallel ranks of a shard group, for hybrid sharding (default: all of them)

    Examples:
        zeroshard mesh --ranks 32 --tp 4 --pp 4
        zeroshard mesh --ranks 16 --shard-group-size 8
    """

    ranks: Annotated[int, _how(flags=_RANKS, metavar="N", type=count, required=True)]
    tp: Number = 1
    pp: Number = 1
    shard_group_size: Number | None = None


class PlanOptions(NamedTuple):
    """Find the fastest configuration of a model on a cluster, or compare schedules of a pipeline.

    With a model, predict all configurations, print the first five with the
    reasons, draw the step of the best, and write its config. With --schedule,
    simulate the schedules and print the time of a batch, the share of it in which
    ranks wait, the activations and the versions of weights that each rank holds.
    These times are in any unit.

    Args:
        model: number of parameters, such as 7B, for a Llama of about that size; or a config.json of
            transformers, or the folder of one
        cluster: 8xH100, 64xH100, 8x4090 or 2xCPU; or a file with what `zeroshard doctor --json` prints, with
            "network" and "between" added: bytes per second that a rank sends to others of its node, and to
            other nodes. A node has as many ranks as the file has devices
        tokens: tokens of a step, of all ranks together
        length: tokens of a sample (default: 2048)
        ranks: all ranks (default: as the cluster has them)
        precision: of forward and backward (default: bf16, on CPUs fp32)
        optimizer_bits: bits of each of Adam's two states (default: 32); twice, with 8 and 32, to choose from
            both. Fewer bits change the numbers of a training
        out: file for the config (default: plan.json)
        schedule: gpipe, 1f1b, interleaved, zb-h1, zbv or varuna; asynchronous: pipedream, 2bw, pipemare, pb,
            spectrain, lwp or paci; or a file with a list for each rank; several times to compare them
        stages: ranks of the pipeline
        microbatches: micro-batches of a batch
        chunks: runs of layers on each rank (default: 2 for interleaved and zbv, else 1)
        forward: duration of a forward of a micro-batch through a rank's layers (default: 1)
        backward: duration of a backward, half of it for the weights (default: 2)
        transfer: duration of a transfer between two ranks (default: 0)
        recompute: recompute activations before each backward, with this duration (default: no recompute, but
            varuna always does, with the duration of a forward)
        list: print the actions alone, as such a file has them

    Examples:
        zeroshard plan 300M --cluster 8x4090 --tokens 262144
        zeroshard plan --schedule 1f1b --stages 4 --microbatches 8
        zeroshard plan --schedule 1f1b --schedule interleaved --schedule zb-h1 --pp 4 --microbatches 8
        zeroshard plan --schedule gpipe --schedule varuna --stages 4 --microbatches 5 --recompute 1
        zeroshard plan --schedule 1f1b --schedule pipedream --schedule 2bw --stages 4 --microbatches 16
        zeroshard plan --schedule 1f1b --stages 4 --microbatches 8 --list
    """

    model: Annotated[int | Path | None, _how(metavar="MODEL", type=parse_model, nargs="?")]
    cluster: Annotated[str, _how(metavar="NAME")] | None = None
    tokens: Number | None = None
    length: Number = 2048
    ranks: Number | None = None
    precision: Literal["bf16", "fp32"] | None = None
    optimizer_bits: Annotated[Sequence[int], _how(action="append", type=int, choices=(8, 32))] | None = None
    out: Annotated[Path, _how(metavar="FILE")] = Path("plan.json")
    schedule: Annotated[Sequence[str], _how(action="append", metavar="NAME", type=str)] | None = None
    stages: Annotated[int, _how(flags=("--stages", "--pp"), metavar="P", type=count)] | None = None
    microbatches: Annotated[int, _how(metavar="M", type=count)] | None = None
    chunks: Annotated[int, _how(metavar="V", type=count)] | None = None
    forward: Duration = 1.0
    backward: Duration = 2.0
    transfer: Duration = 0.0
    recompute: Duration | None = None
    list: bool = False


class DoctorOptions(NamedTuple):
    """Show versions, devices, and the features whose packages are here.

    Print facts for a plan or a report of a bug. Nothing is sent anywhere else.

    Args:
        json: measure the machine, and print its rates as JSON: operations per second by dtype, and bytes per
            second of its memory and of the link to the host
        disk: a folder on a disk that is measured, too, as with --json

    Examples:
        zeroshard doctor
        zeroshard doctor --json
    """

    json: bool = False
    disk: Path | None = None


COMMANDS: Mapping[str, tuple[str, type]] = {
    "export": ("checkpoints", ExportOptions),
    "inspect": ("checkpoints", InspectOptions),
    "estimate": ("planning", EstimateOptions),
    "mesh": ("planning", MeshOptions),
    "plan": ("pipelines", PlanOptions),
    "doctor": ("doctor", DoctorOptions),
}
"""The module of each command in this folder, with a function of its name, and its options.

The module is imported when the command runs: torch alone takes a second or two to import, and the parts of it
that write checkpoints as long again.
"""
