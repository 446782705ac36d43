"""How near path_credits comes to the floor: python -m pytest tests/benchmarks/bench_speed.py

The floor, timed in turns with it in the same run, is one bare matrix product of the same rows by the unembedding in the
same chunks and one logsumexp pass. Beside it, once, the naive way: m + 1 points for every segment.
"""

import statistics
import time
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import iglens_core
from iglens_core import Readout, path_credits

ROUNDS = 5


def llama_1b_head():
    """Random weights in the shape of Llama-3.2-1B's head, behind few blocks."""
    shape = {"hidden_size": 2048, "vocab_size": 128_256, "intermediate_size": 2048, "num_attention_heads": 32}
    config = LlamaConfig(**shape, num_key_value_heads=8, num_hidden_layers=2, tie_word_embeddings=True)
    torch.manual_seed(0)
    return Readout(LlamaForCausalLM(config).eval())


@pytest.fixture(scope="module", params=["default", "llama-1b head"])
def case(request):
    """The readout and its k: 30 layers of the default model; 16 of a model of Llama-3.2-1B's depth."""
    if request.param == "default":
        from iglens_lab.models import load_model

        return SimpleNamespace(readout=Readout(load_model()[0]), k=30)
    return SimpleNamespace(readout=llama_1b_head(), k=16)


def floor(weight, rows, size):
    """The product and the logsumexp, in the chunks that path_credits takes."""
    for some in rows.split(size):
        torch.stack([torch.mm(some, part.T).logsumexp(-1) for part in weight.split(iglens_core.SLICE)]).logsumexp(0)


@pytest.mark.parametrize("tokens", [16, 64, 256])
def test_path_credits_against_the_floor(benchmark, case, tokens):
    readout, weight = case.readout, case.readout.model.lm_head.weight.detach()
    states = torch.randn(case.k + 1, tokens, readout.d)
    targets, rows = torch.arange(tokens), states.flatten(0, 1)
    size, floors = iglens_core._chunk(readout, 256), []

    def before():
        with torch.no_grad():
            start = time.perf_counter()
            floor(weight, rows, size)
            floors.append(time.perf_counter() - start)
        return (readout, states, targets), {}

    benchmark.pedantic(path_credits, setup=before, rounds=ROUNDS, warmup_rounds=1)
    pairs = zip(benchmark.stats.stats.data, floors[-ROUNDS:], strict=True)
    ratio = statistics.median(one / other for one, other in pairs)
    benchmark.extra_info["ratio to the floor"] = round(ratio, 2)
    print(f"\n{tokens} tokens × {case.k} layers, d {readout.d}, V {readout.V}: {ratio:.2f} of the floor")
    assert ratio <= 1.25


@pytest.mark.parametrize("steps", [4, 64])
def test_naive_points_of_16_tokens_against_path_credits(case, steps):
    readout, tokens = case.readout, 16
    states, targets = torch.randn(case.k + 1, tokens, readout.d), torch.arange(tokens)
    start = time.perf_counter()
    credits, _ = path_credits(readout, states, targets)
    ours, start = time.perf_counter() - start, time.perf_counter()
    with torch.no_grad():
        for j in range(case.k):  # the m + 1 points of one segment, all tokens
            at = torch.linspace(0, 1, steps + 1)[:, None, None]
            points = (states[j] + at * (states[j + 1] - states[j])).flatten(0, 1)
            levels = readout.logits(points).softmax(-1)[torch.arange(len(points)), targets.repeat(steps + 1)]
            naive = levels.view(steps + 1, tokens).diff(dim=0).sum(0)
            torch.testing.assert_close(naive, credits[:, j], atol=1e-5, rtol=0)
    print(
        f"\nnaive, m = {steps}, d {readout.d}, V {readout.V}: {(time.perf_counter() - start) / ours:.0f} times as long"
    )
