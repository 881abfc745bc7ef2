"""Models that another library distributes are refused, with the remedy."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.distributed.models import Stemmed
from tests.ranks import on_ranks


def refusal(model):
    with pytest.raises(ValueError, match=r"\w") as caught:
        zeroshard.initialize(model)
    return str(caught.value)


@on_ranks(2)
def test_a_model_that_is_distributed_already_is_refused_by_name_with_the_remedy():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    partly = Stemmed()
    partly.head.bias = nn.Parameter(distribute_tensor(partly.head.bias.detach(), mesh, [Replicate()]))
    inside = nn.Sequential(fully_shard(Stemmed(), mesh=mesh), nn.ReLU())
    wrapped = DistributedDataParallel(Stemmed())
    models = [
        partly,
        fully_shard(Stemmed(), mesh=mesh),
        inside,
        FullyShardedDataParallel(Stemmed(), device_id=torch.device("cpu")),
    ]
    found = [refusal(model) for model in (*models, wrapped)] + [
        zeroshard.initialize(wrapped.module, torch.optim.AdamW).engine.global_step
    ]
    tensor, fsdp2, inner, fsdp1, ddp, num_steps = found
    assert "parameter 'head.bias' is a DTensor" in tensor
    assert "the model is a FSDPModule of torch" in fsdp2
    assert "leave fully_shard out" in fsdp2
    assert "module '0' is a FSDPModule" in inner
    assert "the model is a FullyShardedDataParallel" in fsdp1
    assert "the model is a DistributedDataParallel" in ddp
    assert "the model inside, its attribute `module`" in ddp
    assert num_steps == 0
