"""A skipped block passes the stream on as it is, in any family, and is itself again afterwards."""

import copy

import pytest
import tiny
import torch
from torch import nn

from iglens_core import IGLensError, Readout, UnsupportedModelError, attribute, explain, read, residual_stream
from iglens_lab.ablation import block, skipped

FAMILIES = ["llama", "gpt2", "gemma2", "opt_350m", "bloom", "mpt", "gpt_neo", "falcon_h1"]
TUPLES = {"bloom", "mpt", "gpt_neo", "falcon_h1"}  # whose blocks return a tuple


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(input_ids=tiny.IDS[None], use_cache=False).logits


def without(model, *layers):
    """A copy of the model that lacks the blocks (0 is the first)."""
    made = copy.deepcopy(model)
    kept = tiny.blocks(made)
    for layer in sorted(layers, reverse=True):
        del kept[layer]
    return made


@pytest.mark.parametrize("layer", range(tiny.N))
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_with_a_skipped_block_is_the_model_without_it(name, layer):
    model = tiny.shared(name)
    whole, expected = logits(model), logits(without(model, layer))
    with skipped(model, layer + 1):
        torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)
    assert (whole - expected).abs().max() > 1
    assert torch.equal(logits(model), whole)
    assert tiny.hooks(model) == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_these_families_have_blocks_of_both_kinds(name):
    kinds = []
    block = tiny.blocks(tiny.shared(name))[0]
    handle = block.register_forward_hook(lambda module, args, output: kinds.append(type(output)))
    logits(tiny.shared(name))
    handle.remove()
    assert issubclass(kinds[0], tuple) == (name in TUPLES)


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_skipped_blocks_may_be_nested_and_end_in_any_order(name):
    model = tiny.shared(name)
    with skipped(model, 1):
        with skipped(model, 3):
            torch.testing.assert_close(logits(model), logits(without(model, 0, 2)), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(logits(model), logits(without(model, 0)), atol=1e-5, rtol=1e-5)
    first, second = skipped(model, 1), skipped(model, 2)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    torch.testing.assert_close(logits(model), logits(without(model, 1)), atol=1e-5, rtol=1e-5)
    second.__exit__(None, None, None)
    assert tiny.hooks(model) == 0


def test_a_block_skipped_twice_is_skipped_until_the_last_is_over():
    model = tiny.shared("llama")
    with skipped(model, 2):
        with skipped(model, 2):
            torch.testing.assert_close(logits(model), logits(without(model, 1)), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(logits(model), logits(without(model, 1)), atol=1e-5, rtol=1e-5)
    assert tiny.hooks(model) == 0


def test_with_all_blocks_skipped_only_the_embedding_is_read():
    model = tiny.shared("llama")
    states = tiny.stream(model, tiny.IDS)[0]
    with skipped(model, 1), skipped(model, 2), skipped(model, 3):
        found = logits(model)[0]
    torch.testing.assert_close(found, tiny.oracle(model, states), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_inside_is_passed_on_and_the_block_is_itself_again(error):
    model = tiny.shared("llama")
    whole = logits(model)
    with pytest.raises(error, match="inside"), skipped(model, 2):
        raise error("inside")
    assert tiny.hooks(model) == 0
    assert torch.equal(logits(model), whole)


def test_hooks_of_others_stay():
    model, runs = tiny.build("llama"), []
    handle = tiny.blocks(model)[1].register_forward_hook(lambda *_: runs.append(1))
    with skipped(model, 2):
        logits(model)
    logits(model)
    assert runs == [1, 1] and tiny.hooks(model) == 1
    handle.remove()


@pytest.mark.parametrize("name", ["llama", "gpt_neo"])
def test_a_skipped_block_leaves_the_stream_unchanged_and_has_no_credit(name):
    model = tiny.shared(name)
    before = residual_stream(model, tiny.IDS)
    with skipped(model, 2):
        stream = residual_stream(model, tiny.IDS)
        result = explain(model, tiny.tokenizer(), tiny.IDS[:5].tolist(), answer=tiny.IDS[5:].tolist()).check()
    assert torch.equal(stream[2], stream[1])
    assert torch.equal(stream[1], before[1])
    assert not torch.equal(stream[2], before[2])
    assert torch.equal(result.credits[:, 1], torch.zeros(3))
    assert result.credits[:, [0, 2]].abs().max() > 1e-4


class Called(nn.Module):
    """A block that is called in its own way, and does the same."""

    def __init__(self, block, call):
        super().__init__()
        self.block, self.call = block, call

    def forward(self, *args, **kwargs):
        return self.call(self.block, *args, **kwargs)


def rebuilt(call, at=1):
    """A model whose block is called in another way."""
    model = tiny.build("llama")
    tiny.blocks(model)[at] = Called(tiny.blocks(model)[at], call)
    return model


@pytest.mark.parametrize("name", sorted(TUPLES))
def test_what_a_block_returns_beside_the_states_stays(name):
    model, seen = tiny.shared(name), []
    handle = tiny.blocks(model)[1].register_forward_hook(lambda module, args, output: seen.append(output))
    logits(model)
    handle.remove()
    with skipped(model, 2):
        handle = tiny.blocks(model)[1].register_forward_hook(lambda module, args, output: seen.append(output))
        logits(model)
        handle.remove()
    whole, passed = seen
    assert type(passed) is tuple and len(passed) == len(whole)
    assert passed[0].shape == whole[0].shape and not torch.equal(passed[0], whole[0])


def test_states_given_by_keyword_are_passed_on():
    model = tiny.build("llama")
    by_name = lambda module, args, kwargs: ((), {"hidden_states": args[0]} | kwargs)  # noqa: E731
    handle = tiny.blocks(model)[1].register_forward_pre_hook(by_name, with_kwargs=True)
    with skipped(model, 2):
        torch.testing.assert_close(logits(model), logits(without(model, 1)), atol=1e-5, rtol=1e-5)
    handle.remove()
    assert tiny.hooks(model) == 0


def test_a_block_that_writes_into_its_input_passes_on_what_it_was_given():
    def adds(block, states, **kwargs):
        return states.add_(block(states, **kwargs))

    model = rebuilt(adds)
    expected = logits(without(model, 1))
    with skipped(model, 2):
        torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)


def test_a_readout_made_before_explains_the_ablated_run():
    model = tiny.shared("llama")
    readout, ids = Readout(model), tiny.IDS.tolist()
    with skipped(model, 1):
        trace = read(model, tiny.tokenizer(), ids[:5], answer=ids[5:])
    result = attribute(readout, trace).check()
    expected = tiny.log_probs(logits(without(model, 0))[0]).exp()[torch.arange(4, 7), tiny.IDS[5:]]
    torch.testing.assert_close(result.levels[:, -1].double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_are_counted_from_1(name):
    model = tiny.shared(name)
    assert [block(model, layer) for layer in range(1, tiny.N + 1)] == list(tiny.blocks(model))


@pytest.mark.parametrize("layer", [0, tiny.N + 1, -1, True, 1.0, "1", None, torch.tensor(1)])
def test_a_block_that_is_not_there_is_refused(layer):
    model = tiny.shared("llama")
    with pytest.raises(IGLensError, match=f"layer: expected a block of 1 … {tiny.N}, got"):
        block(model, layer)
    with pytest.raises(IGLensError, match=f"layer: expected a block of 1 … {tiny.N}, got"), skipped(model, layer):
        pytest.fail("entered")
    assert tiny.hooks(model) == 0


@pytest.mark.parametrize("model", [None, "llama", torch.zeros(2)])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(IGLensError, match="model: expected a causal language model of transformers"), skipped(model, 1):
        pytest.fail("entered")


def test_a_model_without_a_head_is_refused():
    with pytest.raises(UnsupportedModelError, match="has no head"), skipped(tiny.shared("llama").model, 1):
        pytest.fail("entered")
