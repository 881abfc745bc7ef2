"""Models of transformers and peft inside a sharded model: their methods take no slices for parameters."""

import copy
import warnings

import peft
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import zeroshard
from tests.distributed.training import SOME_STAGES, caught
from tests.ranks import on_ranks

SHAPE = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Two(nn.Module):
    """An encoder, and a decoder with adapters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = BertModel(BertConfig(**SHAPE, **NO_DROPOUT, num_hidden_layers=1))
        decoder = LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=1, num_key_value_heads=1))
        lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        self.decoder = peft.get_peft_model(decoder, lora)

    def forward(self, tokens):
        hidden = self.encoder(tokens).last_hidden_state
        return self.decoder(inputs_embeds=hidden).logits.square().mean()


TOKENS = torch.arange(12).view(2, 6)


def trained(model, stage):
    """The model after a step."""
    config = {"stage": stage, "units": ["BertLayer"]}
    engine = zeroshard.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config).engine
    engine.backward(engine(TOKENS))
    engine.step()
    return engine


@pytest.mark.parametrize("stage", SOME_STAGES)
@on_ranks(2)
def test_methods_of_inner_models_have_whole_parameters_or_are_refused(tmp_path, stage):
    folder = str(tmp_path / str(stage))
    model = Two()
    plain = copy.deepcopy(model)
    plain(TOKENS).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    engine = trained(model, stage)
    encoder, decoder = model.encoder, model.decoder
    reads = "of the sharded model sees only this rank's slices: call it under engine.unsharded("
    for act, path, ending in (
        (lambda: encoder.save_pretrained(folder), "encoder", f"{reads}) on all ranks"),
        (lambda: encoder.push_to_hub("me/mine"), "encoder", f"{reads}) on all ranks"),
        (lambda: decoder.save_pretrained(folder), "decoder", f"{reads}) on all ranks"),
        (lambda: encoder.save_pretrained(folder, state_dict=encoder.state_dict()), "encoder", reads),
    ):
        assert f"() of '{path}' {ending}" in caught(act)
    for act in (decoder.merge_adapter, decoder.merge_and_unload):
        assert "outside the forward of its unit" in caught(act)
    with engine.unsharded(decoder):  # the other unit shows slices
        assert reads in caught(encoder.save_pretrained, folder)
    with engine.unsharded():
        if dist.get_rank() == 0:
            encoder.save_pretrained(folder)
            decoder.save_pretrained(f"{folder}/adapters")
    dist.barrier()
    loaded = BertModel.from_pretrained(folder).state_dict()
    for name, value in plain.encoder.state_dict().items():
        torch.testing.assert_close(loaded[name], value, rtol=0, atol=1e-6)
    adapters = safetensors.torch.load_file(f"{folder}/adapters/adapter_model.safetensors")
    for name, value in peft.get_peft_model_state_dict(plain.decoder).items():
        torch.testing.assert_close(adapters[name], value, rtol=0, atol=1e-6)
    with engine.unsharded(write_back=True):
        decoder.merge_adapter()
    plain.decoder.merge_adapter()
    with engine.unsharded():
        torch.testing.assert_close(model(TOKENS), plain(TOKENS))
    engine.close()
    for part in model.modules():
        assert not [name for name, value in vars(part).items() if type(value).__module__.startswith("zero")]
    model.decoder = decoder.merge_and_unload()
    model.encoder.resize_token_embeddings(40)
    trained(model, stage).close()


@on_ranks(2)
def test_a_part_of_a_pipeline_is_not_saved_as_a_whole_model(tmp_path):
    folder = str(tmp_path)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=2, num_key_value_heads=1))
    plain = copy.deepcopy(model).state_dict()
    engine = zeroshard.initialize(model, config={"mesh": {"pp": 2}, "stage": 1}).engine
    with engine.unsharded():
        whole = caught(model.save_pretrained, folder)
        inner = caught(model.model.save_pretrained, folder)
    engine.save_pretrained(folder)
    loaded = LlamaForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in plain.items())
    found = engine.full_state_dict()
    assert dist.get_rank() or found.keys() == plain.keys()
    engine.close(restore=False)
    assert "save engine.full_state_dict()" in whole
    assert "or call save_pretrained() of the engine" in whole
    assert inner.endswith("save engine.full_state_dict(), which has the parameters of all pipeline ranks")


@on_ranks(2)
def test_a_file_of_safetensors_with_slices_gets_a_warning(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8))
    engine = zeroshard.initialize(model, config={"stage": 3}).engine
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        safetensors.torch.save_file(model[0].state_dict(), f"{tmp_path}/{dist.get_rank()}.safetensors")
    engine.close(restore=False)
    found = [str(warning.message) for warning in caught]
    assert [text[:43] for text in found] == ["a state_dict() of a sharded model is being "]
