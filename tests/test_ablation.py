"""A skipped block passes the stream on as it is, in any family, and is itself again afterwards; so do all in one batch.

The oracle overwrites what a block gives in a copy of the model, one block at a time, without hooks, cache or batch.
"""

import copy
from functools import cache

import pytest
import tiny
import torch
from torch import nn

from iglens_core import IGLensError, Readout, UnsupportedModelError, attribute, explain, read, residual_stream
from iglens_lab.ablation import INTERVENTIONS, SCOPES, Ablations, ablated, block, one_by_one, part, skipped

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
    return model.eval()


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


# ---------------------------------------------------------------------------------------------------------------------
# All blocks in one batch
# ---------------------------------------------------------------------------------------------------------------------

PARTS = {
    "llama": {"attention": "self_attn", "mlp": "mlp"},
    "gpt2": {"attention": "attn", "mlp": "mlp"},
    "gemma2": {"attention": "self_attn", "mlp": "mlp"},
    "gpt_neo": {"attention": "attn", "mlp": "mlp"},
    "phi": {"attention": "self_attn", "mlp": "mlp"},  # side by side
}
REFUSED = {  # why their attention and MLP cannot be taken out
    "bloom": "still change the residual stream",  # both add the stream themselves
    "mpt": "still change the residual stream",  # the MLP does
    "falcon_h1": "still change the residual stream",  # there is a Mamba beside
    "opt_350m": "found no single mlp",
}
TARGET = 11
CASES = [
    (name, what, scope)
    for name in (*FAMILIES, "phi")
    for what in INTERVENTIONS
    for scope in SCOPES
    if what in ("skip", "update") or name in PARTS
]


@cache
def ablations(name: str) -> Ablations:
    return Ablations(tiny.shared(name))


def updates(length: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.randn(tiny.N, length, tiny.D, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def probability(model, ids=tiny.IDS, target=TARGET) -> float:
    return float(tiny.log_probs(model(input_ids=ids[None], use_cache=False).logits[0, -1])[target].exp())


def overwritten(model, layer: int, inner: str, scope: str, write) -> float:
    """p where a copy's block (or the part `inner` of it) gives what write(given, made) says at each position."""
    made = copy.deepcopy(model)
    module = tiny.blocks(made)[layer - 1]
    module = getattr(module, inner) if inner else module
    original = module.forward

    def forward(*args, **kwargs):
        given = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)).clone()
        output = original(*args, **kwargs)
        states = (output if isinstance(output, torch.Tensor) else output[0]).clone()
        length = states.shape[1]
        for t in range(length) if scope == "all" else [length - 1]:
            states[0, t] = write(given[0, t], states[0, t], length - t)
        return states if isinstance(output, torch.Tensor) else (states, *output[1:])

    module.forward = forward
    return made


def expected(model, what: str, scope: str, ids=tiny.IDS, given=None, parts=None, target=TARGET) -> torch.Tensor:
    """[n + 1], by one changed copy of the model for each block."""

    def write(layer):
        if what == "skip":
            return lambda came, made, from_end: came
        if what == "update":
            rows = given[layer - 1]
            return lambda came, made, from_end: came + rows[-from_end].to(came) if from_end <= len(rows) else made
        return lambda came, made, from_end: 0

    inner = "" if what in ("skip", "update") else parts[what]
    found = [probability(model, ids, target)]
    for layer in range(1, tiny.N + 1):
        found.append(probability(overwritten(model, layer, inner, scope, write(layer)), ids, target))
    return torch.tensor(found, dtype=torch.float64)


def close(found, wanted, atol=1e-6):
    torch.testing.assert_close(found, wanted, atol=atol, rtol=0)


@pytest.mark.parametrize(("name", "what", "scope"), CASES)
def test_one_batch_gives_what_a_run_for_each_block_gives(name, what, scope):
    given = updates() if what == "update" else None
    found = ablations(name).probabilities(tiny.IDS, TARGET, what, scope=scope, updates=given)
    wanted = expected(tiny.shared(name), what, scope, given=given, parts=PARTS.get(name))
    close(found, wanted)
    close(found.log(), wanted.log(), 1e-4)  # some are small
    assert found.dtype == torch.float64 and found.shape == (tiny.N + 1,)
    assert len({f"{p:.3g}" for p in found}) == tiny.N + 1  # every block counts, so that none may be mixed up
    assert tiny.hooks(tiny.shared(name)) == 0


@pytest.mark.parametrize("what", ["attention", "mlp"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_added_to_the_stream_is_refused_and_never_gives_a_number(name, what):
    for scope in SCOPES * 2:
        with pytest.raises(UnsupportedModelError, match=REFUSED[name]):
            ablations(name).probabilities(tiny.IDS, TARGET, what, scope=scope)
    assert tiny.hooks(tiny.shared(name)) == 0
    ablations(name).probabilities(tiny.IDS, TARGET)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_last_block_skipped_at_the_last_position_takes_its_credit_away(name):
    model = tiny.shared(name)
    trace = read(model, tiny.tokenizer(), tiny.IDS.tolist(), answer=[TARGET])
    result = attribute(Readout(model), trace)
    found = ablations(name).probabilities(tiny.IDS, TARGET)
    assert float(found[0] - found[-1]) == pytest.approx(float(result.credits[0, -1]), abs=1e-6)
    assert float(found[0]) == pytest.approx(float(result.levels[0, -1]), abs=1e-6)


@pytest.mark.parametrize("name", ["llama", "bloom", "gpt2"])
def test_nothing_depends_on_what_was_asked_before(name):
    model = tiny.build(name)
    asked = [
        (ids, what, scope)
        for ids in (tiny.IDS, tiny.IDS[:3], tiny.IDS.flip(0), tiny.IDS[:1])
        for what in (["skip", "update"] if name == "bloom" else INTERVENTIONS)
        for scope in SCOPES
    ]

    def answers(order):
        made, found = Ablations(model), {}
        for i in order:
            ids, what, scope = asked[i]
            given = updates() if what == "update" else None
            found[i] = made.probabilities(ids, TARGET, what, scope=scope, updates=given)
        return found

    first, again = answers(range(len(asked))), answers(reversed(range(len(asked))))
    assert all(torch.equal(first[i], again[i]) for i in first)


@pytest.mark.parametrize("length", [1, 2, 8, 13])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("name", ["llama", "bloom", "falcon_h1"])
def test_updates_are_aligned_with_the_end(name, scope, length):
    model, given = tiny.shared(name), updates(length, seed=length)
    found = ablations(name).probabilities(tiny.IDS, TARGET, "update", scope=scope, updates=given)
    close(found, expected(model, "update", scope, given=given))
    cut = ablations(name).probabilities(tiny.IDS, TARGET, "update", scope=scope, updates=given[:, -len(tiny.IDS) :])
    assert torch.equal(found, cut)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_with_its_own_update_a_block_does_what_it_did(name, scope):
    own = residual_stream(tiny.shared(name), tiny.IDS).diff(dim=0)
    found = ablations(name).probabilities(tiny.IDS, TARGET, "update", scope=scope, updates=own)
    close(found, found[:1].expand(tiny.N + 1))
    without_any = ablations(name).probabilities(tiny.IDS, TARGET, "update", scope=scope, updates=own * 0)
    close(without_any, ablations(name).probabilities(tiny.IDS, TARGET, scope=scope))


@pytest.mark.parametrize("name", ["llama", "bloom", "gpt2", "falcon_h1"])
def test_a_prompt_of_one_token_has_one_scope(name):
    for what in ["skip", "update"] + (["attention", "mlp"] if name in PARTS else []):
        given = updates(2) if what == "update" else None
        wanted = expected(tiny.shared(name), what, "last", tiny.IDS[:1], given, PARTS.get(name))
        for scope in SCOPES:
            found = ablations(name).probabilities([5], TARGET, what, scope=scope, updates=given)
            close(found, wanted)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("what", INTERVENTIONS)
@pytest.mark.parametrize("name", ["llama", "phi"])
def test_other_dtypes(name, what, dtype, atol):
    model = tiny.cast(tiny.shared(name), dtype)
    made, given = Ablations(model), updates() if what == "update" else None
    for scope in SCOPES:
        found = made.probabilities(tiny.IDS, TARGET, what, scope=scope, updates=given)
        close(found, expected(model, what, scope, given=given, parts=PARTS[name]), atol)
        assert found.dtype == torch.float64


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(
    ("name", "options"), [("gemma2", {"sliding_window": 3}), ("gpt_neo", {"window_size": 3}), ("qwen2", {})]
)
def test_windows_shorter_than_the_prompt(name, options, scope):
    model = tiny.build(name, **options)
    ids = torch.cat([tiny.IDS, tiny.IDS.flip(0), tiny.IDS + 3])
    found = Ablations(model).probabilities(ids, TARGET, scope=scope)
    close(found, expected(model, "skip", scope, ids))
    plain = probability(tiny.shared(name), ids)
    assert not options or abs(float(found[0]) - plain) > 1e-4  # the window counts


@pytest.mark.parametrize("what", ["skip", "attention"])
@pytest.mark.parametrize("scope", SCOPES)
def test_one_by_one_gives_the_same(scope, what):
    found = ablations("llama").probabilities(tiny.IDS, TARGET, what, scope=scope)
    close(one_by_one(tiny.shared("llama"), tiny.IDS, TARGET, what, scope=scope), found[1:])


# ---------------------------------------------------------------------------------------------------------------------
# How it gets there: rows that begin at their block, and a cache
# ---------------------------------------------------------------------------------------------------------------------


def computed(model, call) -> list[tuple[int, int]]:
    """Rows and positions that every run of a block computes inside call()."""
    sizes = []
    handles = [
        one.register_forward_hook(lambda module, args, output: sizes.append(tuple(tiny._states(output).shape[:2])))
        for one in tiny.blocks(model)
    ]
    call()
    for handle in handles:
        handle.remove()
    return sizes


WHOLE = [(tiny.N + 1, 8)] * tiny.N
GROWN = [(2, 8), (3, 8), (4, 8)]
CACHED = [(1, 7)] * tiny.N + [(tiny.N + 1, 1)] * tiny.N


@pytest.mark.parametrize("what", ["skip", "update"])
@pytest.mark.parametrize(
    ("name", "scope", "sizes"),
    [(name, "all", WHOLE if name == "bloom" else GROWN) for name in FAMILIES]
    + [(name, "last", WHOLE if name == "falcon_h1" else CACHED) for name in FAMILIES],
)
def test_rows_begin_at_their_block_and_the_cached_way_computes_one_token_a_row(name, scope, sizes, what):
    made, given = ablations(name), updates() if what == "update" else None
    call = lambda: made.probabilities(tiny.IDS, TARGET, what, scope=scope, updates=given)  # noqa: E731
    assert computed(tiny.shared(name), call) == sizes


@pytest.mark.parametrize("name", ["llama", "phi", "gptj", "gpt2"])
def test_half_precision_goes_the_fast_ways_too(name):
    model = tiny.cast(tiny.shared(name), torch.bfloat16)
    made = Ablations(model)
    assert computed(model, lambda: made.probabilities(tiny.IDS, TARGET)) == CACHED
    assert computed(model, lambda: made.probabilities(tiny.IDS, TARGET, scope="all")) == GROWN


def counts_positions(block, states, **kwargs):
    """A block that takes its positions from the length of what it gets: with a cache, it is silently wrong."""
    return block(states, **kwargs) + torch.linspace(0, 1, 9)[: states.shape[1], None]


def counts_rows(block, states, **kwargs):
    """A block that is silently wrong where rows come up on the way."""
    return block(states, **kwargs) * (1 if len(states) in (1, tiny.N + 1) else 0.5)


def takes_its_batch(block, states, **kwargs):
    """A block that fails where rows come up on the way."""
    if len(states) not in (1, tiny.N + 1):
        raise RuntimeError("the batch changed")
    return block(states, **kwargs)


@pytest.mark.parametrize(
    ("call", "scope", "other"),
    [(counts_positions, "last", GROWN), (counts_rows, "all", CACHED), (takes_its_batch, "all", CACHED)],
)
def test_a_model_that_cannot_go_a_fast_way_gets_whole_rows(call, scope, other):
    model = rebuilt(call)
    made = Ablations(model)
    assert computed(model, lambda: made.probabilities(tiny.IDS, TARGET, scope=scope)) == WHOLE
    ((free),) = (one for one in SCOPES if one != scope)
    assert computed(model, lambda: made.probabilities(tiny.IDS, TARGET, scope=free)) == other
    for one in SCOPES:
        close(made.probabilities(tiny.IDS, TARGET, scope=one), expected(model, "skip", one))
    assert tiny.hooks(model) == 0


def test_logits_that_are_masked_do_not_hide_a_wrong_way():
    model = rebuilt(counts_positions)
    model.lm_head.register_forward_hook(
        lambda module, args, output: output.index_fill(-1, torch.tensor([4]), -torch.inf)
    )
    made = Ablations(model)
    close(made.probabilities(tiny.IDS, TARGET), expected(model, "skip", "last"))
    assert made.probabilities(tiny.IDS, 4).tolist() == [0] * (tiny.N + 1)


def _as_a_whole(model, backend):
    return torch.compile(model, backend=backend)


def _by_block(model, backend):
    for one in tiny.blocks(model):
        one.compile(backend=backend)
    return model


@pytest.mark.parametrize("compiled", [_as_a_whole, _by_block])
def test_a_compiled_model_is_ablated_too_and_not_compiled_anew(compiled):
    plain, graphs = tiny.build("llama"), []
    model = compiled(copy.deepcopy(plain), lambda graph, inputs: graphs.append(graph) or graph.forward)
    with torch.no_grad():
        model(input_ids=tiny.IDS[None])
    before = len(graphs)
    made = Ablations(model)
    for scope in SCOPES:
        close(made.probabilities(tiny.IDS, TARGET, scope=scope), expected(plain, "skip", scope))
    assert before > 0 and len(graphs) == before


# ---------------------------------------------------------------------------------------------------------------------
# The model is left as it was found
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("what", INTERVENTIONS)
def test_after_an_error_inside_the_model_is_as_it_was(what, scope, error):
    model = tiny.build("llama")
    made, given = Ablations(model), updates() if what == "update" else None
    made.probabilities(tiny.IDS, TARGET, "mlp")
    before = made.probabilities(tiny.IDS, TARGET, what, scope=scope, updates=given)

    def fails(module, args, output):
        raise error("inside")

    handle = tiny.blocks(model)[1].mlp.register_forward_hook(fails)
    with pytest.raises(error, match="inside"):
        made.probabilities(tiny.IDS, TARGET, what, scope=scope, updates=given)
    handle.remove()
    assert tiny.hooks(model) == 0
    assert torch.equal(made.probabilities(tiny.IDS, TARGET, what, scope=scope, updates=given), before)


@pytest.mark.parametrize("name", ["llama", "gemma2", "falcon_h1"])
def test_weights_config_mode_and_results_stay(name):
    model = tiny.build(name)
    weights, config, whole = copy.deepcopy(model.state_dict()), model.config.to_dict(), logits(model)
    made = Ablations(model)
    for scope in SCOPES:
        made.probabilities(tiny.IDS, TARGET, scope=scope)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert model.config.to_dict() == config and not any(module.training for module in model.modules())
    assert torch.equal(logits(model), whole) and tiny.hooks(model) == 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_training_mode_is_refused_whenever_it_was_set():
    model = tiny.build("llama")
    made = Ablations(model)
    for module in (model, tiny.blocks(model)[1].mlp):
        module.train()
        with pytest.raises(IGLensError, match="model: expected it in eval mode"):
            made.probabilities(tiny.IDS, TARGET)
        with pytest.raises(IGLensError, match="model: expected it in eval mode"):
            Ablations(model)
        assert module.training
        model.eval()


# ---------------------------------------------------------------------------------------------------------------------
# What is refused
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids",
    [
        [], [True, False], [5, True], [5.0], [[5, 6]], 5, None, "5", [5, None], [tiny.V], [-1], [2**70], [[5], [5, 6]],
        torch.tensor([1.5]), torch.tensor([True]), torch.tensor([[5]]), torch.tensor([1j]), torch.arange(257) % tiny.V,
        torch.zeros(3, dtype=torch.long, device="meta"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_ids_are_refused(ids):
    with pytest.raises(IGLensError, match=r"^input_ids: expected the ids"):
        ablations("llama").probabilities(ids, TARGET)


@pytest.mark.parametrize("ids", [tiny.IDS.tolist(), tuple(tiny.IDS.tolist()), tiny.IDS.int(), tiny.IDS.numpy()])
def test_ids_may_come_in_any_form(ids):
    made = ablations("llama")
    assert torch.equal(made.probabilities(ids, TARGET), made.probabilities(tiny.IDS, TARGET))


@pytest.mark.parametrize("target", [-1, tiny.V, True, 5.0, "5", None, [5], torch.tensor(5)])
def test_a_bad_target_is_refused(target):
    with pytest.raises(IGLensError, match=f"target: expected an id of 0 … {tiny.V - 1}, got"):
        ablations("llama").probabilities(tiny.IDS, target)


@pytest.mark.parametrize("value", ["", "Skip", "mean", None, True, 0, ["skip"], ("skip",)])
def test_unknown_interventions_and_scopes_are_refused(value):
    model, made = tiny.shared("llama"), ablations("llama")
    with pytest.raises(IGLensError, match="what: expected one of skip, attention, mlp, update, got"):
        made.probabilities(tiny.IDS, TARGET, value)
    with pytest.raises(IGLensError, match="scope: expected one of last, all, got"):
        made.probabilities(tiny.IDS, TARGET, scope=value)
    with pytest.raises(IGLensError, match="what: expected"), ablated(model, 1, value):
        pytest.fail("entered")
    with pytest.raises(IGLensError, match="scope: expected"), ablated(model, 1, scope=value):
        pytest.fail("entered")
    with pytest.raises(IGLensError, match="what: expected one of attention, mlp, got"):
        part(model, 1, value)


@pytest.mark.parametrize(
    "given",
    [
        None, True, 0.5, "mean", updates().tolist(), updates()[0], updates()[:2], updates()[:, :0], updates()[..., :1],
        updates()[..., :-1], updates()[None], updates().long(), updates().bool(), updates() * torch.nan,
        updates() * torch.inf, updates().to("meta"), torch.cat([updates(), updates()]),
    ],
    ids=lambda given: f"{getattr(given, 'dtype', given)!s:.20}{list(getattr(given, 'shape', []))}",
)  # fmt: skip
def test_bad_updates_are_refused(given):
    for scope in SCOPES:
        with pytest.raises(
            IGLensError, match=rf"updates: expected finite floats \[n = {tiny.N}, U, d = {tiny.D}\], got"
        ):
            ablations("llama").probabilities(tiny.IDS, TARGET, "update", scope=scope, updates=given)


@pytest.mark.parametrize("what", ["skip", "attention", "mlp"])
def test_updates_that_would_not_be_used_are_refused(what):
    with pytest.raises(IGLensError, match=f"updates: expected None for '{what}'"):
        ablations("llama").probabilities(tiny.IDS, TARGET, what, updates=updates())
    with (
        pytest.raises(IGLensError, match="update: expected"),
        ablated(tiny.shared("llama"), 1, what, update=updates()[0]),
    ):
        pytest.fail("entered")


@pytest.mark.parametrize("given", [None, True, 1.0, [[1.0] * tiny.D]])
def test_an_update_that_is_none_is_refused(given):
    expected = r"update: expected a tensor \[U, d\]"
    with pytest.raises(IGLensError, match=expected), ablated(tiny.shared("llama"), 1, "update", update=given):
        pytest.fail("entered")


@pytest.mark.parametrize("given", [updates(), updates()[0, :0], updates()[0, :, :1], updates()[0, 0]])
def test_an_update_of_another_shape_is_refused_where_it_is_used(given):
    model = tiny.shared("llama")
    with ablated(model, 2, "update", update=given), pytest.raises(IGLensError, match=r"update: expected \[U, d = 32\]"):
        logits(model)
    assert tiny.hooks(model) == 0


@pytest.mark.parametrize("row", [-1, True, 0.0, "0", [0], slice(0, 1)])
def test_a_row_that_is_none_is_refused(row):
    with pytest.raises(IGLensError, match="row: expected None or a row"), ablated(tiny.shared("llama"), 1, row=row):
        pytest.fail("entered")


@pytest.mark.parametrize("what", ["skip", "mlp"])
def test_one_row_of_a_batch_is_ablated_and_no_other(what):
    model = tiny.shared("llama")
    batch = torch.stack([tiny.IDS, tiny.IDS.flip(0)])
    with torch.no_grad():
        plain = model(input_ids=batch).logits
        with ablated(model, 2, what):
            both = model(input_ids=batch).logits
        with ablated(model, 2, what, row=1):
            found = model(input_ids=batch).logits
        with ablated(model, 2, what, row=2), pytest.raises(IGLensError, match="row: expected a row of the batch of 2"):
            model(input_ids=batch)
    close(found[0], plain[0], 1e-5)
    close(found[1], both[1], 1e-5)
    assert (both - plain).abs().amax((1, 2)).min() > 0.1


def test_at_the_last_position_alone_earlier_ones_stay():
    model = tiny.shared("llama")
    with ablated(model, 2, scope="last"):
        found = logits(model)[0]
    close(found[:-1], logits(model)[0, :-1], 1e-5)
    assert (found[-1] - logits(model)[0, -1]).abs().max() > 0.1


class Flat(nn.Module):
    """An MLP that runs the positions of all rows as one list."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, states):
        return self.inner(states).flatten(0, 1)


def test_an_mlp_without_a_batch_is_refused():
    model = tiny.build("llama")
    for one in tiny.blocks(model):
        one.mlp = Flat(one.mlp)

        def forward(states, one=one, **kwargs):
            states = states + one.self_attn(hidden_states=one.input_layernorm(states), **kwargs)[0]
            return states + one.mlp(one.post_attention_layernorm(states)).view_as(states)

        one.forward = forward
    made = Ablations(model.eval())
    with pytest.raises(UnsupportedModelError, match=r"gives \[batch, S, d\], it gives \[5, 32\]"):
        made.probabilities(tiny.IDS, TARGET, "mlp")
    assert tiny.hooks(model) == 0


def test_streams_side_by_side_are_refused():
    model = tiny.build("llama")
    first, final = tiny.blocks(model)[0], model.model.norm
    for one in tiny.blocks(model):
        one.forward = lambda states, original=one.forward, **kwargs: torch.stack(
            [original(states[0], **kwargs), states[1]]
        )
    first.register_forward_pre_hook(lambda module, args: (torch.stack([args[0], args[0]]),))
    final.register_forward_pre_hook(lambda module, args: (args[0][0],))
    assert logits(model).shape == (1, 8, tiny.V)
    with pytest.raises(UnsupportedModelError, match="expected one stream"):
        Ablations(model)


@pytest.mark.parametrize("model", [None, "llama", nn.Linear(2, 2)])
def test_ablations_need_a_model(model):
    with pytest.raises(IGLensError, match="model: expected a causal language model of transformers"):
        Ablations(model)
