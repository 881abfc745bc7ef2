"""A conversation with a saved model in the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
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
    answerer = Answerer(folder, options.max_tokens, options.temperature)
    system: Messages = [{"role": "system", "content": options.system}] if options.system else []
    if options.prompt is not None:
        answerer.answer([*system, {"role": "user", "content": options.prompt}])
        return
    print(HELP)
    messages = list(system)
    for line in _lines():
        if line == "/new":
            messages = list(system)
        elif line:
            messages.append({"role": "user", "content": line})
            messages.append({"role": "assistant", "content": answerer.answer(messages)})


def _lines() -> Iterator[str]:
    while True:
        try:
            yield input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return


class Answerer:
    """A model with its tokenizer, loaded by transformers alone.

    Args:
        folder: of `save_pretrained`.
        max_tokens: the longest answer.
        temperature: of sampling; 0 takes the most probable token.

    Raises:
        ImportError: transformers is not installed.
        ValueError: transformers cannot load the folder.
    """

    def __init__(self, folder: Path, max_tokens: int, temperature: float) -> None:
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
            from transformers.utils import logging
        except ImportError:
            raise ImportError("zeroshard chat needs transformers: pip install zeroshard[hf]") from None
        logging.disable_progress_bar()
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # whatever the files make it raise
            raise ValueError(f"'{folder}': transformers cannot load it: {error}") from None
        self._model = model.to(device).eval()
        self._streamer = TextStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)
        sampled = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        self._how, self._max_tokens = {"use_cache": True, **sampled}, max_tokens
        self._longest = getattr(self._model.config, "max_position_embeddings", None)
        self._room = None if self._longest is None else max(1, self._longest - max_tokens)

    @torch.no_grad()
    def answer(self, messages: Messages) -> str:
        """Print and return the answer to the last of the messages.

        The oldest ones go if there is no room. The answer ends at the last position of the model.
        """
        ids = self._encode(messages)
        num_system = sum(message["role"] == "system" for message in messages)
        while self._room is not None and ids.shape[1] > self._room and len(messages) > num_system + 2:
            messages = messages[:num_system] + messages[num_system + 2 :]  # a question and its answer
            ids = self._encode(messages)
        mask = torch.ones_like(ids)
        left = self._max_tokens if self._longest is None else max(1, self._longest - ids.shape[1])
        num = min(self._max_tokens, left)
        written = self._model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=num, streamer=self._streamer, **self._how
        )
        return str(self._tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)).strip()

    def _encode(self, messages: Messages) -> torch.Tensor:
        """Return the prompt [1, N]: by the chat template, or the last message for a model without one."""
        if self._tokenizer.chat_template:
            encoded = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            encoded = self._tokenizer(messages[-1]["content"], return_tensors="pt")
        ids: torch.Tensor = encoded["input_ids"]
        return ids.to(self._model.device)
