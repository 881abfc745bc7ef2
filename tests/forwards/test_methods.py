"""Methods other than forward, and models of transformers and peft inside a sharded model."""

import copy
import warnings
from functools import partial

import peft
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import zeroshard
from tests.distributed.models import tiny
from tests.distributed.training import (
    SOME_STAGES,
    build,
    caught,
    differences,
    finish,
    start,
    step,
    token_loss,
    train_sharded,
)
from tests.ranks import on_ranks


@on_ranks(1)
def test_methods_that_cannot_be_registered_are_refused_by_name():
    engine, _ = start(tiny(), "SGD")
    for name, text in (
        ("encode_sound", "expected the name of a method of Tiny"),
        ("blocks.0.forward", "A method of a part is called by one of the model"),
        ("step", "^the engine has a method 'step' of its own"),
    ):
        with pytest.raises(ValueError, match=text):
            engine.register_forward_method(name)
    with pytest.raises(AttributeError, match="Tiny has no method 'generate'"):
        engine.generate()


@on_ranks(2, timeout=120)
def test_ranks_generate_different_lengths_as_plain_pytorch_does():
    model = build("tied transformers Llama")
    rank = dist.get_rank()
    prompt = torch.arange(1, 4 + rank).unsqueeze(0)
    options = {"max_new_tokens": 5 + 4 * rank, "do_sample": False, "pad_token_id": 0}
    want = copy.deepcopy(model).generate(prompt, **options).tolist()
    wanted_run = train_sharded(model, "SGD", 2)
    engine, optimizer = start(copy.deepcopy(model), "SGD")
    losses = [step(engine, optimizer, token_loss, 0)]
    engine.generate(prompt, **options)
    losses.append(step(engine, optimizer, token_loss, 1))
    found = differences("trained", finish(engine, losses), wanted_run)
    engine, _ = start(copy.deepcopy(model), "SGD")
    assert engine.generate(prompt, **options).tolist() == want
    assert engine.memory_report().unsharded == 0
    engine.register_forward_method("generate")
    synced = engine.generate(prompt, synced_gpus=True, **options)
    assert synced[:, : len(want[0])].tolist() == want
    return found


@on_ranks(2, timeout=120)
def test_models_that_generate_through_their_parts_generate_as_plain_pytorch_does():
    """The model is not called as a whole: the encoder by itself."""
    sizes = {"vocab_size": 60, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()
    rank = dist.get_rank()
    ids = torch.arange(3, 7 + rank).unsqueeze(0)
    options = {"input_ids": ids, "max_new_tokens": 4 + 3 * rank, "do_sample": False, "pad_token_id": 0}
    want = copy.deepcopy(model).generate(**options).tolist()
    engine, _ = start(model, "SGD")
    assert engine.generate(**options).tolist() == want
    assert engine.generate(synced_gpus=True, **options)[:, : len(want[0])].tolist() == want
    assert engine.memory_report().unsharded == 0


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
    generate = partial(decoder.generate, input_ids=TOKENS[:1], max_new_tokens=2, pad_token_id=0)
    for act in (decoder.merge_adapter, decoder.merge_and_unload, generate):
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
