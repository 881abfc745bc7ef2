"""Training of Llama shapes on one GPU with offload: tokens/s, TFLOP/s, and the largest shape that fits.

    python benchmarks/offload_gpu.py --sizes 1B,7B --folder /mnt/nvme
    python benchmarks/offload_gpu.py --sizes largest
    python benchmarks/offload_gpu.py --device cpu --sizes tiny    (tries the code, measures nothing)

Main parameters are bf16 and states 8-bit, 4 bytes for each parameter together. The setting of a size is the
first of `offload_fit.py` that fits on this machine, as `zeroshard.estimate` counts. "largest" is the largest
size of a list whose states fit in the memory that is free now. Each size is trained in a process of its own.

TFLOP/s count 6 operations for each parameter of the blocks and the head and token, and attention; what is
recomputed is not counted. The weights are uniform with the standard deviation of Llama's, and repeat after 16
million elements: random numbers for billions of them would take minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.table import Table
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

import record
import zeroshard
from medians import median_of
from offload_fit import BF16, GIGABYTE, SETTINGS, Machine, fits

SHAPES = {
    # name: hidden, intermediate, layers, heads, key-value heads
    "tiny": (64, 176, 2, 4, 2),
    "1B": (2048, 5504, 20, 16, 16),
    "3B": (3072, 8192, 26, 24, 24),
    "7B": (4096, 11008, 32, 32, 32),
    "13B": (5120, 13824, 40, 40, 40),
    "20B": (6144, 16384, 44, 48, 48),
    "24B": (6656, 17920, 44, 52, 52),
    "30B": (6656, 17920, 58, 52, 52),
    "40B": (8192, 22016, 48, 64, 8),
    "70B": (8192, 28672, 80, 64, 8),
}
LEAST_SECONDS = 20.0
"""Steps are taken at least for so long, after the first one."""


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument(
        "--sizes", default="1B,7B,13B", help=f"comma-separated, of {', '.join(SHAPES)}, largest"
    )
    parser.add_argument(
        "--setting", choices=tuple(SETTINGS), help="of offload_fit.py; default the first that fits"
    )
    parser.add_argument("--batch", type=int, default=4, help="sequences in a step")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--steps", type=int, default=5, help="timed steps at most, after one that is not")
    parser.add_argument("--folder", type=Path, help="for files; without it only host memory is used")
    parser.add_argument("--name", default="offload_gpu", help="of the JSON file in benchmarks/results")
    parser.add_argument("--size", choices=tuple(SHAPES), help=argparse.SUPPRESS)  # of a process
    args = parser.parse_args()
    if unknown := set(args.sizes.split(",")) - {*SHAPES, "largest"}:
        parser.error(f"Expected sizes among {', '.join(SHAPES)} and largest, got {', '.join(unknown)}")
    return args


def llama(name: str, args: argparse.Namespace) -> LlamaConfig:
    """The config of a size."""
    hidden, intermediate, layers, heads, kv_heads = SHAPES[name]
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=args.vocabulary,
        max_position_embeddings=args.sequence,
        use_cache=False,
    )


def machine(args: argparse.Namespace) -> Machine:
    """The memory of this machine that is free now."""
    host = psutil.virtual_memory().available
    device = torch.cuda.mem_get_info()[0] if args.device == "cuda" else host
    disk = shutil.disk_usage(args.folder).free if args.folder else 0
    return Machine(device / GIGABYTE, host / GIGABYTE, disk / GIGABYTE)


def config_of(letter: str, folder: Path | None) -> dict[str, Any]:
    """The config of a setting."""
    offload = SETTINGS[letter]
    if "nvme" in offload.values():
        offload = offload | {"nvme_path": str(folder)}
    return {
        "stage": 3,
        "precision": BF16,
        "offload": offload,
        "recompute": "unit",
        "units": ["LlamaDecoderLayer"],
    }


def choose(name: str, args: argparse.Namespace) -> tuple[str, dict[str, float]] | None:
    """Return the first setting that fits and the bytes that it needs, or None."""
    here = machine(args)
    with torch.device("meta"):
        model = LlamaForCausalLM(llama(name, args))
    for letter in [args.setting] if args.setting else SETTINGS:
        is_on_host = args.device == "cpu"
        config = config_of(letter, args.folder or Path("/none"))
        found = zeroshard.estimate(model, 1, config, optimizer_bits=8, host_computes=is_on_host)
        need = (found.peak + activation_bytes(name, args), found.host, found.nvme)
        if fits(need, here):
            return letter, dict(zip(("device", "host", "nvme"), need, strict=True))
    return None


def activation_bytes(name: str, args: argparse.Namespace) -> int:
    """Bytes of activations with recompute="unit": inputs of all units, one unit, and the logits.

    A block saves about 34 bytes for each element of its input with bf16 (Korthikanti et al. 2022, equation 2,
    without attention scores); the MLP of Llama has one product more, so 48 here. Logits are there in bf16, in
    fp32, and as their fp32 gradient.
    """
    hidden, _, layers, _, _ = SHAPES[name]
    tokens = args.batch * args.sequence
    return tokens * (hidden * (2 * layers + 48) + args.vocabulary * (2 + 4 + 4))


def flops_per_token(name: str, num_matmul: int, sequence: int) -> float:
    """Operations of forward and backward: 6 for each parameter of a product, and causal attention."""
    hidden, _, layers, _, _ = SHAPES[name]
    return 6 * num_matmul + 6 * layers * hidden * sequence


def llama_model(name: str, args: argparse.Namespace) -> LlamaForCausalLM:
    """Build a model with values of a table, whose length no row of a matrix divides."""
    bound = 0.02 * math.sqrt(3)
    with zeroshard.deferred_init(), no_init_weights():
        # Deferred, too: what is recorded keeps a copy of each part of another tensor, as large as the model.
        table = torch.empty((1 << 24) - 3).uniform_(-bound, bound, generator=torch.Generator().manual_seed(0))
        model = LlamaForCausalLM(llama(name, args))
        for parameter in model.parameters():
            if parameter.dim() > 1:
                with torch.no_grad():
                    for part in parameter.view(-1).split(table.numel()):
                        part.copy_(table[: part.numel()])
            else:
                nn.init.ones_(parameter)
    return model


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train one size in this process; return its row."""
    chosen = choose(args.size, args)
    assert chosen is not None, "the process that started this one found a setting"
    letter, need = chosen
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    start = time.perf_counter()
    model = llama_model(args.size, args)
    num_params = sum(p.numel() for p in model.parameters())
    num_matmul = num_params - args.vocabulary * SHAPES[args.size][0]  # without the lookup of tokens
    config = config_of(letter, args.folder) | {"device": args.device}
    engine = zeroshard.initialize(model, lambda ps: zeroshard.optim.AdamW8bit(ps, lr=1e-5), config).engine
    built = time.perf_counter() - start
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(args.vocabulary, (args.batch, args.sequence), generator=generator).to(device)
    seconds: list[float] = []
    losses: list[float] = []
    while len(seconds) <= args.steps and (len(seconds) < 3 or sum(seconds[1:]) < LEAST_SECONDS):
        start = time.perf_counter()
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    step, report = median_of(seconds[1:]), engine.memory_report()
    per_second = tokens.numel() / step.value
    return {
        "size": args.size,
        "setting": letter,
        "num_params": num_params,
        "tokens_per_s": per_second,
        "tflop_per_s": per_second * flops_per_token(args.size, num_matmul, args.sequence) / 1e12,
        "step_s": step.value,
        "build_s": built,
        "estimated": need,
        "device_peak": report.peak_allocated,
        "host": report.host,
        "nvme": report.nvme,
        "peak_rss": report.peak_rss,
        "losses": losses,
        "seconds": seconds,
    }


def sizes_of(args: argparse.Namespace) -> list[str]:
    """The sizes that are asked for; "largest" is the last one of the list that fits."""
    names = []
    for name in args.sizes.split(","):
        fitting = [size for size in SHAPES if choose(size, args)] if name == "largest" else [name]
        names += fitting[-1:]
    return list(dict.fromkeys(names))


def main() -> int:
    """Measure all sizes, or be the process of one."""
    args = parse()
    if args.size:
        print(json.dumps(train(args)))
        return 0
    console = record.console()
    rows, skipped = [], {}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for name in sizes_of(args):
            if choose(name, args) is None:
                skipped[name] = "no setting fits in the memory that is free"
                console.print(f"without {name}: {skipped[name]}")
                continue
            command = [sys.executable, __file__, *sys.argv[1:], "--size", name]
            command += ["--folder", folder] if args.folder else []
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                skipped[name] = f"it ended with status {done.returncode}"
                continue
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            console.print(f"{name}: {rows[-1]['step_s']:.2f} s a step, {rows[-1]['build_s']:.0f} s to build")
    table = Table(
        "size", "setting", "parameters", "tokens/s", "TFLOP/s", "device GB", "host GB", "nvme GB",
        title=f"{args.batch} x {args.sequence} tokens",
    )  # fmt: skip
    for row in rows:
        held = (row["device_peak"] or 0, row["host"], row["nvme"])
        table.add_row(
            row["size"],
            row["setting"],
            f"{row['num_params'] / 1e9:.2f} B",
            f"{row['tokens_per_s']:.0f}",
            f"{row['tflop_per_s']:.1f}",
            *(f"{count / GIGABYTE:.2f}" for count in held),
        )
    console.print(table)
    settings = {key: value for key, value in vars(args).items() if key not in ("folder", "size")}
    path = record.write(args.name, rows, settings=settings, skipped=skipped)
    console.print(f"wrote {path.relative_to(record.RESULTS.parent.parent)}")
    return int(not rows)


if __name__ == "__main__":
    sys.exit(main())
