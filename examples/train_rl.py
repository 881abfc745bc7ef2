"""Train the small Llama by its own samples: export weights, sample, score, step, and again.

    python examples/train_rl.py                                         # one rank
    torchrun --nproc-per-node 2 examples/train_rl.py

An inference server takes the weights that `engine.named_full_parameters()` streams, a unit at a time. Here it
is a plain copy of the model on each rank; vLLM and SGLang take names and tensors the same way. The reward of
a sample is its share of lowercase letters. The step is REINFORCE (Williams 1992) with the mean reward of all
ranks as the baseline.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import LlamaForCausalLM

import zeroshard
from llama import parser, small_llama

RANK = int(os.environ.get("RANK", 0))  # set by torchrun
SAMPLES, TOKENS = 32, 16  # of a rank in an iteration


class Server:
    """Samples from a model whose weights come from elsewhere."""

    def __init__(self, model: LlamaForCausalLM, device: torch.device) -> None:
        self._model = model.to(device).eval()
        self._parameters = dict(self._model.named_parameters())
        self._device = device

    @torch.no_grad()
    def update(self, engine: zeroshard.Engine) -> None:
        """Take the weights of an engine, each as soon as it comes; called on all ranks."""
        for name, values in engine.named_full_parameters():
            self._parameters[name].copy_(values)

    @torch.no_grad()
    def sample(self, num_samples: int, num_tokens: int) -> torch.Tensor:
        """Return samples that begin with a space: [num_samples, 1 + num_tokens] token ids."""
        prompts = torch.full((num_samples, 1), ord(" "), device=self._device)
        lengths = {"min_new_tokens": num_tokens, "max_new_tokens": num_tokens}
        return self._model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, **lengths
        )


def rewards(samples: torch.Tensor) -> torch.Tensor:
    """Return the share of lowercase letters in each sample: [num_samples]."""
    tokens = samples[:, 1:]
    return ((tokens >= ord("a")) & (tokens <= ord("z"))).float().mean(1)


def mean(values: torch.Tensor) -> torch.Tensor:
    """Return the mean over the values of all ranks: 0-dim."""
    total = values.mean()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def policy_loss(engine: zeroshard.Engine, samples: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Return the mean over samples of -advantage * log probability: 0-dim."""
    logits = engine(input_ids=samples[:, :-1], use_cache=False).logits
    negative = F.cross_entropy(logits.transpose(1, 2), samples[:, 1:], reduction="none")
    return (advantages[:, None] * negative).mean()


def main() -> None:
    args = parser(__doc__, steps=40).parse_args()
    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine = zeroshard.initialize(model, optimizer, {"stage": args.stage, "clip_grad_norm": 1.0}).engine
    server = Server(small_llama(), engine.device)
    torch.manual_seed(1 + RANK)  # ranks sample by themselves
    for step in range(args.steps):
        server.update(engine)
        samples = server.sample(SAMPLES, TOKENS)
        scores = rewards(samples)
        reward = mean(scores)
        engine.backward(policy_loss(engine, samples, scores - reward))
        engine.step()
        if RANK == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(f"step {step}: reward {reward.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
