r"""Fine-tune a causal language model on your text, with its states sharded over the ranks.

    python examples/finetune.py                                            # one rank, a small model
    torchrun --nproc-per-node 2 examples/finetune.py                       # two ranks, on CPUs or GPUs
    torchrun --nproc-per-node 8 examples/finetune.py \
        --model PATH_OR_HUB_ID --data text.jsonl --precision bf16 --output finetuned
    torchrun --nproc-per-node 2 examples/finetune.py --tp 2                # each layer over two ranks
    torchrun --nproc-per-node 2 --max-restarts 3 examples/finetune.py \
        --checkpoint-dir DIR --save-every 100 --resume auto

When a rank is lost, the last command goes on from the newest checkpoint. Without --model the model is a small
Llama with random weights that reads bytes. docs/data.md tells which text --data takes.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from argparse import Namespace
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from rich.console import Console
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
)
from transformers.utils import logging

import report
import zeroshard
from blocks import Blocks, TextDatasets, check_separation, collator, text_datasets
from llama import CACHE, small_llama
from options import OPTIMIZERS, parse_args
from text import TEXTS, ByteTokenizer
from training import History, Trainer, evaluate

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun
FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")  # of a model on the hub
PROMPT_TOKENS, SAMPLE_TOKENS, ANSWER_TOKENS, TEMPERATURE = 40, 200, 120, 0.7

# ------------------------------------------------------------------------------------------------ setup


def build_config(args: Namespace) -> zeroshard.Config:
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
        "mesh": args.tp and replace(config.mesh, tp=args.tp),
        "recompute": "auto" if args.memory_budget else "unit" if args.recompute else None,
        "memory_budget": args.memory_budget,
        "checkpoint": args.keep_last and replace(config.checkpoint, keep_last=args.keep_last),
    }
    return replace(config, **{key: value for key, value in flags.items() if value is not None})


def pretrained(args: Namespace, folder: str, config: zeroshard.Config) -> nn.Module:
    """Return a pretrained model, whose weights each rank reads in part, with adapters if --lora asks."""
    options = {"quantization_config": bits(args)} if args.quantize else {}
    model = zeroshard.from_pretrained(
        AutoModelForCausalLM, folder, config, dtype=torch.float32, **options
    ).train()
    if args.seq_len > num_positions(model):
        raise ValueError(
            f"--seq-len: expected at most {num_positions(model)}, as the model has, got {args.seq_len}"
        )
    if args.lora is None:
        return model
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ImportError("--lora: expected the package peft: pip install peft") from None
    adapters = LoraConfig(
        r=args.lora, lora_alpha=2 * args.lora, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    with zeroshard.deferred_init():
        adapted: nn.Module = get_peft_model(model, adapters)
    return adapted


def bits(args: Namespace) -> BitsAndBytesConfig:
    """Return what --quantize means: QLoRA's double quantization with 4 bits, rows with 8 bits."""
    if args.quantize == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=args.quantize,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if args.precision == "bf16" else torch.float32,
    )


def num_positions(model: Any) -> int:
    """Return the number of positions that a model is made for; sys.maxsize if its config names none."""
    return getattr(model.config, "max_position_embeddings", None) or sys.maxsize


def read_data(args: Namespace, tokenizer: Any) -> TextDatasets:
    """Return the blocks to train on and those held out."""
    source = TEXTS[args.data](CACHE) if args.data in TEXTS else args.data
    with report.reading() as progress:
        return text_datasets(
            source,
            tokenizer,
            seq_len=args.seq_len,
            held_out=args.held_out,
            pack=not args.no_packing,
            progress=progress,
        )


def read_questions(file: str) -> list[tuple[str, str]]:
    """Return the questions of a file of conversations, and the right answers.

    Raises:
        ValueError: a line is no conversation of two messages.
    """
    pairs = []
    for number, line in enumerate(Path(file).read_text(encoding="utf-8").splitlines(), 1):
        try:
            question, right = (message["content"] for message in json.loads(line)["messages"])
        except (KeyError, TypeError, ValueError):
            raise ValueError(
                f'--questions: expected "messages" with a question and its answer in line {number} of {file}'
            ) from None
        pairs.append((question, right))
    return pairs


def count_steps(args: Namespace, config: zeroshard.Config, num_blocks: int) -> int:
    """Return the number of optimizer steps that --steps or --epochs asks for.

    Raises:
        ValueError: an epoch has no batch, because the only one is too small and `drop_last` leaves it out.
    """
    num_readers = max(1, WORLD_SIZE // (config.mesh.tp * config.mesh.pp))  # ranks with blocks of their own
    batches = math.ceil(num_blocks / num_readers) / config.micro_batch_size  # of an epoch, the last in part
    micro_batches = math.floor(batches) if config.loader.drop_last else math.ceil(batches)
    if not micro_batches:
        raise ValueError(
            f"loader.drop_last: expected at least {config.micro_batch_size} blocks of text for each of "
            f"{num_readers} ranks, got {num_blocks} in all"
        )
    if args.steps is not None:
        return int(args.steps)
    return max(2, round(args.epochs * micro_batches / config.gradient_accumulation_steps))


def build_optimizer(args: Namespace, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that --optimizer names, over the trained parameters.

    Matrices of LoRA go to Muon too: else it would have none. Its steps have the size of AdamW's steps, so one
    learning rate serves both.
    """
    build = OPTIMIZERS.get(args.optimizer, args.optimizer)
    if build is zeroshard.optim.Muon:
        groups = zeroshard.optim.muon_groups(model, adamw={"betas": (0.9, 0.95)})
        return zeroshard.optim.Muon(groups, args.lr, adjust_lr_fn="match_rms_adamw")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    made: torch.optim.Optimizer = build(trained, args.lr, (0.9, 0.95), weight_decay=0.1)
    return made


def warmup_cosine(optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """A learning rate that rises over the first 5% of `steps`, and then falls to 5% along a cosine."""
    warmup = max(1, steps // 20)

    def factor(step: int) -> float:
        cosine = 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / steps))
        return min(1.0, (step + 1) / warmup) * (0.05 + 0.95 * cosine)

    return LambdaLR(optimizer, factor)


def check_folders(args: Namespace) -> None:
    """Write to the folders of the results on rank 0, and end all ranks if a folder cannot be written to."""
    told: list[str | None] = [None]
    folders = {"--output": args.output, "--checkpoint-dir": args.checkpoint_dir, "--plot": args.plot}
    for option, name in folders.items() if RANK == 0 else ():
        try:
            if name is not None:
                folder = Path(name).parent if option == "--plot" else Path(name)
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder) as file:
                    file.write(bytes(1))
        except OSError as error:
            told = [f"{option}: expected a folder that can be written to: {error}"]
    if dist.is_initialized():
        dist.broadcast_object_list(told)
    if told[0] is not None:
        sys.exit(f"finetune.py: {told[0]}")


def resume(engine: zeroshard.Engine, args: Namespace, digest: str, console: Console) -> History | None:
    """Go on from the checkpoint that --resume asks for, and tell so; None if there is none.

    Warn if the text, whose `digest` this is, is not the one of the checkpoint.
    """
    folder, tag = args.checkpoint_dir, args.resume
    if folder is None or tag == "no" or (tag == "auto" and not Path(folder, "latest").is_file()):
        return None
    history = History(**engine.load_checkpoint(folder, None if tag == "auto" else tag))
    console.print(f"going on after step {len(history.losses)}, from {folder}")
    if history.digest != digest:
        console.print("the text is NOT the one that the checkpoint was trained on", style="yellow")
    return history


# ------------------------------------------------------------------------------------------ what it says


def write(
    engine: zeroshard.Engine, tokenizer: Any, prompts: list[list[int]], length: int, sample: bool
) -> list[str]:
    """Return what the model writes after each prompt, up to its last position: nothing if a prompt fills all.

    All ranks must call it; rank 0 alone writes to the end, with those that compute its layers.
    """
    longest = max(map(len, prompts))
    length = min(length, num_positions(engine.module) - longest)
    if length < 1:
        return [""] * len(prompts)
    gaps = [longest - len(prompt) for prompt in prompts]  # at the left, so that all answers begin together
    ids = torch.tensor([[0] * gap + prompt for gap, prompt in zip(gaps, prompts, strict=True)])
    mask = torch.tensor([[0] * gap + [1] * (longest - gap) for gap in gaps])
    how = {"do_sample": sample, "temperature": TEMPERATURE} if sample else {"do_sample": False}
    engine.eval()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        written = engine.generate(
            input_ids=ids.to(engine.device),
            attention_mask=mask.to(engine.device),
            max_new_tokens=length if engine.dp_rank == 0 else 1,
            use_cache=True,
            **how,
        )
    engine.train()
    rows = written[:, longest:].tolist()
    return [tokenizer.decode(list(takewhile(lambda id: id != tokenizer.eos_token_id, row))) for row in rows]


def answers(engine: zeroshard.Engine, tokenizer: Any, questions: list[str], length: int) -> list[str]:
    """Return the model's answers, as its chat template asks for them, or its continuations of the questions.

    The most probable token is taken each time. All ranks must call it.
    """
    if getattr(tokenizer, "chat_template", None):
        chats = [[{"role": "user", "content": question}] for question in questions]
        prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True)["input_ids"]
    else:
        prompts = [tokenizer.encode(question) for question in questions]
    return [text.strip() for text in write(engine, tokenizer, prompts, length, sample=False)]


def ask(engine: zeroshard.Engine, tokenizer: Any, args: Namespace) -> list[str]:
    """Return the answers to --questions, and to --ask. All ranks must call it."""
    found = []
    if args.questions:
        questions, right = zip(*args.questions, strict=True)
        length = max(len(tokenizer.encode(text)) for text in right) + 1  # with the end
        found = answers(engine, tokenizer, list(questions), length)
    if args.ask:
        found += answers(engine, tokenizer, [args.ask], ANSWER_TOKENS)
    return found


def show_results(
    console: Console,
    args: Namespace,
    engine: zeroshard.Engine,
    tokenizer: Any,
    held_out: Blocks,
    before: list[str],
) -> None:
    """Show the answers, or else how the model continues a held-out text. All ranks must call it.

    Args:
        before: the answers before training.
    """
    after = ask(engine, tokenizer, args)
    if args.questions:
        console.print(report.answers_table(args.questions, before, after))
    if args.ask:
        report.show_answer(console, "after training", args.ask, after[-1])
    if after:
        return
    prompt = held_out[0]["input_ids"][: min(PROMPT_TOKENS, args.seq_len // 2)].tolist()
    length = min(SAMPLE_TOKENS, args.seq_len - len(prompt))
    (text,) = write(engine, tokenizer, [prompt], length, sample=True)
    report.show_sample(console, tokenizer.decode(prompt), text)


def main() -> None:
    """Evaluate, train, evaluate again, and show the results."""
    args = parse_args()
    logging.disable_progress_bar()
    torch.manual_seed(args.seed)
    console = Console(quiet=RANK != 0, highlight=False, markup=False)  # so that rank 0 alone speaks
    try:
        config = build_config(args)
        folder = args.model
        if folder and not Path(folder).is_dir():
            folder = snapshot_download(folder, allow_patterns=FILES)
        args.questions = read_questions(args.questions) if args.questions else []
        args.saved_dtype = AutoConfig.from_pretrained(folder).dtype if folder else None
        tokenizer: Any = AutoTokenizer.from_pretrained(folder) if folder else ByteTokenizer()
        train, held_out = read_data(args, tokenizer)
        steps = count_steps(args, config, len(train))
        sizes = args.hidden, args.layers, args.seq_len, args.seed
        model = pretrained(args, folder, config) if folder else small_llama(*sizes)
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"finetune.py: {error}")
    optimizer = build_optimizer(args, model)
    engine, _, dataloader, _ = zeroshard.initialize(
        model,
        optimizer,
        config,
        training_data=train,
        collate_fn=collator(model, train),
        lr_scheduler=warmup_cosine(optimizer, steps),
    )
    assert dataloader is not None  # there is training data
    check_folders(args)  # nobody trains for hours, and then cannot save
    report.show_run(console, args, engine, train, held_out, steps)
    try:
        if not args.no_packing:
            check_separation(engine, collator(model))
    except ValueError as error:
        sys.exit(f"finetune.py: {error}: give --no-packing")
    try:
        history = resume(engine, args, train.digest, console)
    except ValueError as error:
        sys.exit(f"finetune.py: {error}")
    begin = time.perf_counter()
    history = history or History([(0, evaluate(engine, held_out))], [], train.digest)
    evaluation, first = time.perf_counter() - begin, len(history.losses)
    console.print(f"held-out loss before training: {history.evaluations[0][1]:.3f} nats per {args.unit}")
    before = ask(engine, tokenizer, args)
    if args.ask:
        when = f"after step {first}" if first else "before training"
        report.show_answer(console, when, args.ask, before[-1])

    try:
        trainer = Trainer(engine, dataloader, held_out, args, steps, console, evaluation)
    except (RuntimeError, ValueError) as error:  # of --metrics
        sys.exit(f"finetune.py: {error}")
    history, memory = trainer.train(history)
    console.print(f"held-out loss after training: {history.evaluations[-1][1]:.3f} nats per {args.unit}")
    if args.output:  # first of all: nothing that follows may lose the model
        engine.save_pretrained(args.output, tokenizer if folder else None, dtype=args.saved_dtype)
    show_results(console, args, engine, tokenizer, held_out, before)
    if first < steps:  # else there were no gradients to measure
        console.print(report.memory_table(memory, engine, WORLD_SIZE))
    if RANK == 0:
        is_drawn = report.save_plot(args.plot, history, args.unit)
        console.print(
            f"loss curve: {args.plot}" if is_drawn else "no loss curve: matplotlib is not installed"
        )
    if args.output:
        console.print(f"the model: {args.output}")


if __name__ == "__main__":
    main()
