"""Ranks whose tokens go to different experts train as DDP with find_unused_parameters=True.

An expert that some rank used counts zeros from the others. One that no rank used keeps grad = None, so
that weight decay and momentum leave it alone.
"""

import torch
import torch.distributed as dist

from tests.distributed.models import VOCABULARY
from tests.distributed.training import (
    same_as_replicated,
)
from tests.ranks import on_ranks

# -------------------------------------------------------------------------------------- of transformers


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=24,
            intermediate_size=36,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            num_local_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=64,
            output_router_logits=True,
            use_cache=False,
        )
    )
    model.set_experts_implementation("grouped_mm")
    return model.train()


def mixtral_loss(model, number):
    """Three tokens for eight experts; the loss holds that of the router too."""
    seed = torch.Generator().manual_seed(100 * number + dist.get_rank())
    batch = torch.randint(0, VOCABULARY, (1, 3), generator=seed)
    return model(input_ids=batch, labels=batch).loss


def counts_of_experts(model, number):
    """[rank, layer, expert]: tokens."""
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    chosen = []
    handles = [
        router.register_forward_hook(lambda module, args, output: chosen.append(output[-1]))
        for router in routers
    ]
    mixtral_loss(model, number)
    for handle in handles:
        handle.remove()
    own = torch.stack([torch.bincount(indices.flatten(), minlength=8) for indices in chosen])
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    return torch.stack(everyone)


@on_ranks(2, timeout=120)
def test_a_mixtral_whose_ranks_route_differently_trains_as_in_ddp_to_the_bit():
    torch.manual_seed(0)
    model = mixtral()
    counts = counts_of_experts(model, 0)
    assert ((counts[0] == 0) != (counts[1] == 0)).any(), "some expert has tokens on one rank alone"
    assert (counts.sum(0) == 0).any(), "some expert has no token at all"
    return same_as_replicated(model, num_steps=4, loss=mixtral_loss, find_unused=True)
