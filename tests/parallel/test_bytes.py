"""Bytes of divided models: those that `estimate` foretells are those that ranks hold and send."""

import pytest
import torch
import transformers

import zeroshard
from tests.distributed.training import ALL_STAGES
from zeroshard import Config, Mesh
from zeroshard.memory.typical import Sizes, TypicalModel

CONFIG = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "tie_word_embeddings": False,
    "use_cache": False,
}
BATCH, LENGTH = 2, 16


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))


def measured(config):
    engine = zeroshard.initialize(llama(), lambda p: torch.optim.AdamW(p, lr=1e-3), config).engine
    torch.manual_seed(engine.dp_rank)
    tokens = torch.randint(CONFIG["vocab_size"], (BATCH, LENGTH))
    for _ in range(2):
        engine.reset_comm_report()
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        gradients = engine.memory_report().gradients
        engine.step()
    memory, sent = engine.memory_report(), engine.comm_report()
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    wire = sum(sent.bytes_sent.get(kind, 0) for kind in kinds)
    return memory.parameters, gradients, memory.optimizer, wire


@pytest.mark.long_where(num_ranks=[4])
@pytest.mark.parametrize(("num_ranks", "stage"), [(2, 3), *((4, stage) for stage in ALL_STAGES)])
def test_a_rank_holds_what_is_foretold_and_the_formula_with_fewer_parameters(ranks, num_ranks, stage):
    tp = 2
    config = {"stage": stage, "mesh": {"tp": tp}}
    model = llama()
    foretold = zeroshard.estimate(model, num_ranks, config)
    num_parameters = sum(p.numel() for p in model.parameters())
    dp = num_ranks // tp
    shares = {0: (1, 1), 1: (dp, dp), 2: (dp, dp), 3: (dp, dp)}[stage]
    for parameters, gradients, optimizer, _ in ranks(num_ranks, measured, config):
        assert (parameters, gradients) == (foretold.parameters, foretold.gradients)
        assert gradients <= 1.02 * 4 * num_parameters / tp / shares[0]
        assert optimizer <= 1.02 * 8 * num_parameters / tp / shares[1]
        kept = 4 / (dp if stage == 3 else 1) if dp == 1 or stage in (0, 3) else 4 + 4 / dp
        assert parameters <= 1.02 * kept * num_parameters / tp


@pytest.mark.long_where(recompute=["none"])
@pytest.mark.parametrize("recompute", ["none", "unit"])
def test_sums_over_tensor_ranks_are_counted(ranks, recompute):
    config = {"stage": 1, "mesh": {"tp": 2}, "recompute": recompute}
    foretold = zeroshard.estimate(llama(), 2, config, num_tokens=BATCH * LENGTH)
    without = zeroshard.estimate(llama(), 2, config)
    of_sums = foretold.wire_bytes_per_step - without.wire_bytes_per_step
    of_a_sum = 4 * BATCH * LENGTH * CONFIG["hidden_size"]  # 2 (tp - 1) / tp of it are sent
    of_blocks = CONFIG["num_hidden_layers"] * (5 if recompute == "unit" else 4) * of_a_sum
    ends = 2 * of_a_sum  # of the embedding and the gradient of the head
    assert of_sums == pytest.approx(of_blocks + ends, rel=0.02)
    for *_, wire in ranks(2, measured, config):
        assert wire - without.wire_bytes_per_step == pytest.approx(of_sums, rel=0.001)


def test_activations_follow_the_formulas_of_the_source():
    samples, length, width, depth = 4, 2048, 4096, 32
    one = samples * length * width
    blocks = Sizes(num_params=0, depth=depth, width=width, embedding=0, is_tied=False)

    def used(**options):
        return TypicalModel(blocks, samples * length).usage(Config(precision="bf16", **options), None)

    def held(**options):
        return used(**options).peak

    assert held() == depth * 34 * one
    assert held(mesh=Mesh(tp=8)) == depth * (10 + 24 / 8) * one  # equation 2 without scores
    assert held(mesh=Mesh(tp=8, sequence=True)) == depth * 34 / 8 * one  # equation 6
    assert held(recompute="unit") == (2 * depth + 34) * one
    assert used(mesh=Mesh(tp=8)).sent == depth * 4 * 2 * 7 / 8 * 2 * one


def test_the_head_keeps_two_inputs_and_float32_logits():
    """Section 4.3 of the source: 4 s b h (1 + v / h) bytes over the tensor ranks."""
    tokens, width, vocabulary = 2048, 4096, 32_000
    config = Config(precision="bf16", mesh=Mesh(tp=4, sequence=True))
    expected = 4 * tokens * (width + vocabulary) / 4
    sizes = Sizes(num_params=0, depth=1, width=width, embedding=vocabulary * width, is_tied=False)
    assert TypicalModel(sizes, tokens).usage(config, None).units[-1].working == expected


def test_an_estimate_refuses_what_it_cannot_know():
    with pytest.raises(ValueError, match="num_tokens= is for causal language models of transformers"):
        zeroshard.estimate(torch.nn.Linear(4, 4), 2, num_tokens=8)
    with pytest.raises(ValueError, match=r"mesh\.tp=2: Linear has no plan of its own"):
        zeroshard.estimate(torch.nn.Linear(4, 4), 2, {"mesh": {"tp": 2}})
    with pytest.raises(ValueError, match=r"num_tokens: expected an integer >= 0, got 1\.5"):
        zeroshard.estimate(1000, 2, num_tokens=1.5)
    halved = zeroshard.estimate(10**9, 8, {"mesh": {"tp": 2}, "stage": 0})
    assert halved.parameters == pytest.approx(2 * 10**9, rel=1e-4)
