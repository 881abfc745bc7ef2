"""Whole parameters of divided layers: shown, edited, given back, exported, and read from files in parts."""

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import zeroshard
from tests.parallel import models
from tests.parallel.test_checkpoints import Model, same, start, train
from zeroshard.safetensors import FileTensor


def shown_and_edited(stage, tp):
    engine = start(stage, tp)
    train(engine, range(2))
    want = engine.full_state_dict()
    with engine.unsharded(write_back=True), torch.no_grad():
        found = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        for number, (_, parameter) in enumerate(engine.module.named_parameters()):
            parameter.add_(torch.arange(parameter.numel()).view(parameter.shape), alpha=0.1 * number)
    edited = engine.full_state_dict()
    for name in want if dist.get_rank() == 0 else ():
        if name in found:
            assert torch.equal(found[name], want[name]), name
    engine.close(restore=False)
    return found, edited


@pytest.mark.long_where(stage=[0, 1])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_unsharded_shows_whole_parameters_and_writes_each_rank_its_part_back(ranks, stage):
    [(first, edited), *others] = ranks(4, shown_and_edited, stage, 2)
    for number, (name, value) in enumerate(first.items()):
        step = torch.arange(value.numel()).view(value.shape)
        assert torch.equal(edited[name], value.add(step, alpha=0.1 * number)), name
    for found, _ in others:
        assert same(found, first) == []


def whole_gradients(stage, tp):
    engine = start(stage, tp, clip_grad_norm=None)
    torch.manual_seed(5)
    tokens = torch.randint(44, (4, 6))
    engine.backward(nn.functional.cross_entropy(engine(tokens).flatten(0, 1), tokens.flatten()))
    read = {name: engine.full_gradient(name) for name, _ in engine.module.named_parameters()}
    read = {name: gradient for name, gradient in read.items() if gradient is not None}
    engine.set_full_gradient("blocks.0.down.weight", torch.ones(24, 44))
    ones = engine.full_gradient("blocks.0.down.weight")
    engine.close(restore=False)
    return read, ones


def plain_gradients():
    torch.manual_seed(0)
    model = Model()
    torch.manual_seed(5)
    tokens = torch.randint(44, (4, 6))
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_are_whole_by_name(ranks):
    want = plain_gradients()
    for read, ones in ranks(2, whole_gradients, 3, 2):
        assert read.keys() == want.keys()
        for name, gradient in want.items():
            torch.testing.assert_close(read[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
        assert torch.equal(ones, torch.ones(24, 44))


def given_back(stage, tp):
    engine = start(stage, tp)
    train(engine, range(2))
    want, module = engine.full_state_dict(), engine.module
    engine.close()
    output = module(torch.arange(12).view(2, 6))
    want.pop("mean", None)  # each rank goes on with its own, as in DistributedDataParallel without buffers
    return want, dict(module.named_parameters()), output.detach()


@pytest.mark.long_where(stage=[1])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_closed_engine_gives_whole_parameters_and_layers_back(ranks, stage):
    found = ranks(4, given_back, stage, 2)
    want = found[0][0]
    for _, state, output in found:
        assert same({"head.weight": state["tokens.weight"]} | state, want) == []
        module = Model()
        module.load_state_dict(want, strict=False)
        torch.testing.assert_close(output, module(torch.arange(12).view(2, 6)))


def refusals(tp):
    engine = start(3, tp)
    tokens = torch.arange(12).view(2, 6)
    want = engine(tokens).detach()
    with engine.unsharded():
        assert torch.equal(engine(tokens), want)  # its units are gathered, in parts
        text = "'blocks.0.up' is divided over tensor-parallel ranks and has its whole parameters now"
        with pytest.raises(RuntimeError, match=text):
            engine.module.blocks[0].up(torch.ones(2, 24))
    with (
        pytest.raises(RuntimeError, match="the ranks made different edits"),
        engine.unsharded(write_back=True),
        torch.no_grad(),
    ):
        engine.module.blocks[0].up.weight.add_(dist.get_rank())
    with pytest.raises(ValueError, match=r"expected a full tensor of shape \(44, 24\), got shape \(22, 24\)"):
        engine.set_full_parameter("blocks.0.up.weight", torch.ones(22, 24))
    values = torch.arange(44.0 * 24).view(44, 24)
    engine.set_full_parameter("blocks.0.up.weight", values)
    assert torch.equal(engine.full_parameter("blocks.0.up.weight"), values)
    engine.close(restore=False)


def test_products_with_whole_parameters_and_edits_that_differ_between_tensor_ranks_are_refused(ranks):
    ranks(2, refusals, 2)


# ------------------------------------------------------------------------------------------- transformers


def trained(folder, tp, stage):
    """Train a model that is read from files, and write it again."""
    read = []
    original = FileTensor.read

    def noted(self, *spans):
        read.append(sum(span.size for span in spans))
        return original(self, *spans)

    FileTensor.read = noted
    try:
        model = zeroshard.from_pretrained(transformers.LlamaForCausalLM, folder / "base")
        config = {"stage": stage, "mesh": {"tp": tp}}
        engine = zeroshard.initialize(model, lambda p: torch.optim.AdamW(p, lr=1e-2), config).engine
    finally:
        FileTensor.read = original
    begun = engine.full_state_dict()
    tokens = torch.arange(24).view(2, 12)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    engine.save_pretrained(folder / "out")
    state = engine.full_state_dict()
    engine.close(restore=False)
    return begun, state, sum(read)


@pytest.mark.long_where(stage=[1])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_is_read_in_parts_and_written_whole(ranks, tmp_path, stage):
    base = models.build("Llama").float()
    base.save_pretrained(tmp_path / "base")
    [(begun, state, _), *others] = found = ranks(4, trained, tmp_path, 2, stage)
    assert same(begun, dict(base.state_dict())) == []
    assert all(other == {} for _, other, _ in others)
    written = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert same(state, dict(written.state_dict())) == []
    norms = sum(p.numel() for n, p in base.named_parameters() if "norm" in n)
    cut = sum(p.numel() for p in base.parameters()) - norms
    num_kept = 2 if stage < 3 else 4  # ranks over which the values are divided
    for *_, num_read in found:
        assert num_read <= cut / num_kept + norms + 256 * 16  # shards end with whole blocks
