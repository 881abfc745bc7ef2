"""Train a Switch transformer (Fedus et al. 2021): each token goes to one expert, which takes only so many.

    torchrun --nproc-per-node 2 examples/switch.py --steps 60 --stage 3 --experts grouped_mm
    torchrun --nproc-per-node 2 examples/switch.py --lora 8      # adapters of experts and attention alone

The layers are those of transformers' Mixtral, with its stacked experts, [experts, rows, columns], which its
`experts_implementation` computes: one after another ("eager"), or all at once ("grouped_mm"). Routing is the
paper's: an expert takes the first `ceil(tokens / experts * capacity_factor)` tokens of a rank's batch that
choose it, in their order. Others pass by, through the residual connection. A batch has no padding.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

import zeroshard

SPAN = 8


def capacity(num_tokens: int, num_experts: int, factor: float) -> int:
    """The tokens that an expert takes (equation 3)."""
    return math.ceil(num_tokens / num_experts * factor)


def within_capacity(chosen: Tensor, num_experts: int, most: int) -> Tensor:
    """[tokens], bool: True for the first `most` tokens of each expert; `chosen` is [tokens]."""
    choices = F.one_hot(chosen, num_experts)
    place = choices.cumsum(0).gather(1, chosen[:, None]).squeeze(1)  # 1 for the first one
    return place <= most


def balance(logits: Tensor) -> Tensor:
    """The auxiliary loss of a layer (equation 4), without its factor: 1 if tokens are spread evenly."""
    num_experts = logits.shape[-1]
    shares = F.one_hot(logits.argmax(-1), num_experts).float().mean(0)
    return num_experts * (shares * logits.float().softmax(-1).mean(0)).sum()


class SwitchBlock(MixtralSparseMoeBlock):  # type: ignore[misc]
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.factor = config.capacity_factor

    def forward(self, hidden_states: Tensor) -> Tensor:
        tokens = hidden_states.flatten(0, -2)
        noise = self.jitter_noise if self.training else 0.0
        routed = tokens * torch.empty_like(tokens).uniform_(1 - noise, 1 + noise) if noise else tokens
        logits, _, _ = self.gate(routed)
        weight, chosen = logits.float().softmax(-1).max(-1)
        num_experts = logits.shape[-1]
        most = capacity(len(tokens), num_experts, self.factor)
        kept = within_capacity(chosen, num_experts, most).nonzero().squeeze(1)
        found = self.experts(tokens[kept], chosen[kept, None], weight[kept, None].to(tokens.dtype))
        return torch.zeros_like(tokens).index_copy(0, kept, found).view_as(hidden_states)


class SwitchForCausalLM(MixtralForCausalLM):  # type: ignore[misc]
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = SwitchBlock(config)
        self.post_init()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers looks for the experts in the file of the class

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **options: Any) -> Any:
        out = super().forward(input_ids, output_router_logits=True, **options)
        out.aux_loss = self.router_aux_loss_coef * sum(balance(logits) for logits in out.router_logits)
        if labels is not None:
            out.loss = self.loss_function(out.logits, labels, self.vocab_size) + out.aux_loss
        return out


def build(experts: str = "grouped_mm", **sizes: Any) -> SwitchForCausalLM:
    """A model of some 1 M parameters, unless other sizes are given."""
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "router_aux_loss_coef": 0.01,
        "capacity_factor": 1.25,
        "use_cache": False,
        "experts_implementation": experts,
    }
    return SwitchForCausalLM(MixtralConfig(**(options | sizes)))


def add_adapters(model: nn.Module, rank: int) -> Any:
    """LoRA on attention and on the stacked experts."""
    from peft import LoraConfig, get_peft_model

    experts = ["experts.gate_up_proj", "experts.down_proj"]
    return get_peft_model(
        model, LoraConfig(r=rank, target_modules=["q_proj", "v_proj"], target_parameters=experts)
    )


def batch(step: int, rank: int, vocabulary: int, size: int = 8, length: int = 32) -> Tensor:
    """[size, length]: sequences that repeat a span of their own."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    span = torch.randint(0, vocabulary, (size, SPAN), generator=generator)
    return span.repeat(1, -(-length // SPAN))[:, :length]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--experts", default="grouped_mm", choices=["eager", "batched_mm", "grouped_mm"])
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters; 0 trains all parameters")
    args = parser.parse_args()
    model: Any = build(args.experts)
    if args.lora:
        model = add_adapters(model, args.lora)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    engine = zeroshard.initialize(model, optimizer, {"stage": args.stage}).engine
    for step in range(args.steps):
        tokens = batch(step, engine.dp_rank, 64).to(engine.device)
        out = engine(tokens, labels=tokens)
        engine.backward(out.loss)
        engine.step()
        if engine.global_rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {out.loss.item():.3f}, balance {out.aux_loss.item():.4f}")
    engine.close()


if __name__ == "__main__":
    main()
