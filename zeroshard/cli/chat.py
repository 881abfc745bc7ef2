"""A conversation with a saved model in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from zeroshard.cli.options import ChatOptions

HELP = "Ctrl-D ends, /new begins a new conversation."
Messages = list[dict[str, str]]


def chat(options: ChatOptions) -> None:
    """Run `zeroshard chat`: answer one question, or each line of the standard input."""
    folder = options.directory
    if not (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file():
        raise ValueError(f"'{folder}': expected a folder of save_pretrained, found no config.json in it")
    answer = load_answerer(options)
    system: Messages = [{"role": "system", "content": options.system}] if options.system else []
    if options.prompt is not None:
        answer([*system, {"role": "user", "content": options.prompt}])
        return
    print(HELP)
    messages = list(system)
    for line in _lines():
        if line == "/new":
            messages = list(system)
        elif line:
            messages.append({"role": "user", "content": line})
            messages.append({"role": "assistant", "content": answer(messages)})


def _lines() -> Iterator[str]:
    while True:
        try:
            yield input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return


def load_answerer(options: ChatOptions) -> Callable[[Messages], str]:
    """Return a function that prints and returns the answer to the last of some messages.

    The model and its tokenizer are loaded by transformers alone. An answer has at most half of the tokens
    that the model takes, and the oldest tokens go if there is no room. A model without a chat template gets
    the last message as it is.

    Raises:
        ImportError: transformers is not installed.
        ValueError: transformers cannot load the folder.
    """
    try:
        from transformers import TextStreamer, pipeline
        from transformers.utils import logging
    except ImportError:
        raise ImportError("zeroshard chat needs transformers: pip install zeroshard[hf]") from None
    logging.disable_progress_bar()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        model: Any = pipeline("text-generation", model=str(options.directory), device=device)
    except Exception as error:  # whatever the files make it raise
        raise ValueError(f"'{options.directory}': transformers cannot load it: {error}") from None
    streamer = TextStreamer(model.tokenizer, skip_prompt=True, skip_special_tokens=True)
    num_tokens = min(options.max_tokens, model.tokenizer.model_max_length // 2)
    sampled = {"do_sample": bool(options.temperature), "temperature": options.temperature or None}

    def answer(messages: Messages) -> str:
        (written,) = model(
            messages if model.tokenizer.chat_template else messages[-1]["content"],
            streamer=streamer,
            max_new_tokens=num_tokens,
            handle_long_generation="hole",
            add_special_tokens=True,
            return_full_text=False,
            use_cache=True,
            **sampled,
        )
        return str(written["generated_text"]).strip()

    return answer
