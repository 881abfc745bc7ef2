"""Models for which transformers has no plan are divided by ours, and train to the values of one process."""

import functools
import re

import pytest
import torch
import transformers
from torch import nn

import zeroshard
from tests.parallel.trained import divided, plain
from zeroshard.parallel.tensor.division import match, plan_of
from zeroshard.parallel.tensor.styles import sections_of, set_counts
from zeroshard.plan.cuts import heads
from zeroshard.sharding.context import Changes

BATCH, LENGTH, VOCABULARY = 4, 9, 64
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": VOCABULARY}
GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
T5 = {"d_model": 32, "d_kv": 6, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
T5 |= {"dropout_rate": 0.0, "relative_attention_num_buckets": 8, "decoder_start_token_id": 0}
GATED = T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
MODELS = {
    "GPT-2": (transformers.GPT2LMHeadModel, transformers.GPT2Config, GPT2),
    "GPT-2, untied": (
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config,
        GPT2 | {"tie_word_embeddings": False, "n_inner": 48, "scale_attn_by_inverse_layer_idx": True},
    ),
    "T5": (transformers.T5ForConditionalGeneration, transformers.T5Config, T5),
    "T5, gated": (transformers.T5ForConditionalGeneration, transformers.T5Config, GATED),
    "mT5": (transformers.MT5ForConditionalGeneration, transformers.MT5Config, GATED),
}


def build(name, seed=0):
    cls, config, options = MODELS[name]
    torch.manual_seed(seed)
    return cls(config(**options, use_cache=False)).double()


def batch(name, number):
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens.flip(1)[:, 2:].contiguous() if "T5" in name else tokens}


@pytest.mark.long_where(tp=[4])
@pytest.mark.long_where(stage=[1])
@pytest.mark.long_where(name=["T5"], num_ranks=[4])
@pytest.mark.long_where(name=["GPT-2"], num_ranks=[2])
@pytest.mark.long_where(name=["GPT-2, untied", "T5, gated", "mT5"])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("num_ranks", "tp"), [(2, 2), (4, 4), (4, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_in_one_process(ranks, name, num_ranks, tp, stage):
    of = functools.partial(build, name), functools.partial(batch, name)
    want_losses, want_norms, want = plain(*of)
    for losses, norms, state in ranks(num_ranks, divided, *of, stage, tp):
        assert losses == pytest.approx(want_losses, rel=1e-6)  # the factor of clipping is rounded to float32
        assert norms == pytest.approx(want_norms, rel=1e-5)  # the loss of transformers is in float32
        for key, value in state.items():
            # Adam divides small gradients, which come from a loss in float32, by their own size.
            torch.testing.assert_close(value, want[key], rtol=0, atol=3e-5, msg=key)


def test_each_rank_has_whole_heads_of_queries_of_keys_and_of_values():
    model = build("GPT-2")
    cuts = {layer.name: layer.cuts for layer in match(model, plan_of(model), 2)}
    cut = cuts["transformer.h.0.attn.c_attn"]["weight"]
    assert (cut.dim, cut.sections) == (1, heads(4, 4, 4, size=8))
    assert [span.start for span in cut.spans(1)] == [16, 48, 80]
    cut = cuts["transformer.h.1.attn.c_proj"]["weight"]
    assert (cut.dim, cut.sections) == (0, heads(4, size=8))
    assert "transformer.wpe" not in cuts


def test_cross_attention_has_its_keys_and_values_in_one():
    config = transformers.GPT2Config(**GPT2, add_cross_attention=True)
    attention = transformers.GPT2LMHeadModel(config).transformer.h[0].crossattention
    assert sections_of("h.0.crossattention.c_attn", attention, 64, is_outputs=True) == heads(4, 4, size=8)
    assert sections_of("h.0.crossattention.q_attn", attention, 32, is_outputs=True) == heads(4, size=8)


@pytest.mark.parametrize(("name", "counts"), [("GPT-2", (4, 32, 32)), ("T5", (4, 24)), ("mT5", (4, 24))])
def test_attention_layers_are_told_the_heads_of_a_rank_until_the_end(name, counts):
    names = {2: ("n_heads", "inner_dim"), 3: ("num_heads", "embed_dim", "split_size")}[len(counts)]
    model, changes = build(name), Changes()
    attentions = [module for module in model.modules() if hasattr(module, names[0])]
    assert len(attentions) == (2 if name == "GPT-2" else 6)
    set_counts(attentions, 2, changes)
    for attention in attentions:
        assert tuple(getattr(attention, name) for name in names) == tuple(count // 2 for count in counts)
    changes.undo()
    for attention in attentions:
        assert tuple(getattr(attention, name) for name in names) == counts


def test_a_plan_has_the_patterns_that_fit_a_variant():
    tied, encoder = build("T5"), transformers.T5EncoderModel(transformers.T5Config(**T5))
    assert "lm_head" in plan_of(tied)
    assert "lm_head" not in plan_of(encoder)
    assert plan_of(nn.Linear(2, 2)) == {}
    for model in (tied, encoder):
        divided_layers = {layer.name for layer in match(model, plan_of(model), 2)}
        linear = {name for name, one in model.named_modules() if isinstance(one, (nn.Linear, nn.Embedding))}
        assert divided_layers == linear


def test_heads_that_do_not_divide_are_refused_with_the_numbers():
    model = build("GPT-2")
    model.resize_token_embeddings(66)
    text = "'transformer.h.0.attn.c_attn.weight', dimension 1 of shape (32, 96): 4 heads of 8 cannot be"
    with pytest.raises(ValueError, match=re.escape(text)):
        match(model, plan_of(model), 3)


@pytest.mark.parametrize("name", ["GPT-2", "T5, gated"])
def test_a_vocabulary_that_does_not_divide_is_refused_with_the_remedy(name):
    model = build(name)
    text = (
        "a vocabulary of 64 tokens: 64 elements cannot be divided over mesh.tp=3 ranks; expected a multiple "
        "of 3. model.resize_token_embeddings(pad_to_multiple_of=3) before"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        match(model, plan_of(model), 3)
    model.resize_token_embeddings(pad_to_multiple_of=3)
    with pytest.raises(ValueError, match=r"4 heads of \d cannot be divided"):  # the vocabulary comes first
        match(model, plan_of(model), 3)
    assert model.get_output_embeddings().weight.shape == (66, 32)


CLASSIFIERS = {
    "sequence": (transformers.T5ForSequenceClassification, transformers.T5Config),
    "tokens": (transformers.T5ForTokenClassification, transformers.T5Config),
    "mT5": (transformers.MT5ForSequenceClassification, transformers.MT5Config),
}


def classifier(kind):
    cls, config = CLASSIFIERS[kind]
    torch.manual_seed(0)
    return cls(config(**T5, num_labels=3, classifier_dropout=0.0)).double()


def loss_of_classifier(model, kind):
    tokens = torch.randint(2, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    tokens[:, -1] = 1  # the end of a sentence
    labels = tokens % 3 if kind == "tokens" else tokens[:, 0] % 3
    return model(input_ids=tokens, labels=labels).loss


def divided_classifier(kind):
    engine = zeroshard.initialize(classifier(kind), sgd, {"stage": 3, "mesh": {"tp": 2}}).engine
    losses = []
    for _ in range(2):
        loss = loss_of_classifier(engine, kind)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.close(restore=False)
    return losses


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.long_where(kind=["mT5", "tokens"])
@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_classifiers_over_t5_train_as_in_one_process(ranks, kind):
    model, want = classifier(kind), []
    optimizer = sgd(model.parameters())
    for _ in range(2):
        loss = loss_of_classifier(model, kind)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        want.append(loss.item())
    for losses in ranks(2, divided_classifier, kind):
        assert losses == pytest.approx(want, rel=1e-6)  # the loss of transformers may be in float32
