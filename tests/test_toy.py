"""Models whose answer is known beforehand: what was planted is there, nothing else is, and what reads it finds it."""

import copy
import itertools
import json
import math
from functools import cache

import pytest
import tiny
import torch
from safetensors.torch import save_file
from torch import nn

from iglens_core import (
    CompletenessError,
    FaithfulnessError,
    IGLensError,
    Readout,
    attribute,
    explain,
    read,
    token_id,
    token_text,
)
from iglens_lab import toy

Y, RIVAL = toy.ALPHABET.index(toy.ANSWER), toy.ALPHABET.index(toy.RIVAL)
DEPTHS = [(n, layer) for n in (3, 6, 12) for layer in (1, n // 2 + 1, n)]
PLACES = ("who?", "?who", "a?wo", "wabc", "aaaw")
COMMAND = "python -m iglens_lab.toy"


def ask(model, prompt=toy.PROMPT, answer=toy.ANSWER, **options):
    return explain(model, toy.tokenizer(), prompt, answer=answer, **options).check()


@torch.no_grad()
def direction(model, token: int) -> torch.Tensor:
    """[d], of length 1: what the head's row of a token reads, through the norm's weights."""
    row = model.lm_head.weight[token] * model.model.norm.weight
    return row / row.norm()


def oracle_levels(model, prompt, token, position=-1) -> torch.Tensor:
    """[n + 1], the probability at a position by the model itself, in float64."""
    return tiny.levels(tiny.cast(model, torch.float64), toy.ids(prompt), position, token)


def oracle_p(model, prompt=toy.PROMPT, token=Y) -> float:
    with torch.no_grad():
        return float(tiny.log_probs(model(input_ids=toy.ids(prompt)[None]).logits)[0, -1, token].exp())


def without(model, layer):
    """A copy of the model that lacks a block."""
    made = copy.deepcopy(model)
    del made.model.layers[layer - 1]
    return made


def writes(model, prompt=toy.PROMPT) -> torch.Tensor:
    """[n, S, d], what every block adds at every position."""
    return tiny.stream(model, toy.ids(prompt)).diff(dim=0)


# ---------------------------------------------------------------------------------------------------------------------
# The tokenizer
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("V", [1, 3, 26, 64])
def test_every_character_is_one_token_and_its_text_is_that_character(V):
    made = toy.tokenizer(V)
    text = toy.ALPHABET[:V]
    assert len(made) == V
    assert made(text)["input_ids"] == list(range(V)) == toy.ids(text).tolist()
    assert made.decode(range(V)) == text
    assert [token_text(made, i) for i in range(V)] == list(text)
    assert [token_id(made, character) for character in text] == list(range(V))


def test_the_alphabet_has_64_different_characters_among_them_those_of_the_prompt():
    assert len(set(toy.ALPHABET)) == len(toy.ALPHABET) == 64
    assert {*toy.PROMPT, toy.ANSWER, toy.RIVAL} <= set(toy.ALPHABET)
    assert toy.SOURCE in toy.PROMPT


# ---------------------------------------------------------------------------------------------------------------------
# One block writes
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("n", "layer"), DEPTHS)
def test_the_planted_block_has_the_credit_at_any_depth(n, layer, seed):
    model = toy.planted((layer, toy.ANSWER, 30.0), blocks=n, seed=seed)
    result = ask(model)
    assert result.layers == tuple(range(1, n + 1)) and float(result.delta) > 0.9
    assert float(result.credits[0, layer - 1] / result.delta) >= 0.99
    assert int(result.onset()) == layer
    others = [j for j in range(n) if j != layer - 1]
    assert result.credits[0, others].abs().max() < 0.01 * float(result.delta)
    expected = oracle_levels(model, toy.PROMPT, Y)
    torch.testing.assert_close(result.levels[0].double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("n", "layer"), DEPTHS)
def test_all_blocks_stay_active_and_write_updates_of_comparable_size(n, layer, seed):
    model = toy.planted((layer, toy.ANSWER, 30.0), blocks=n, seed=seed)
    size = writes(model)[:, -1].norm(dim=-1)
    assert size.min() > 1
    assert size.max() / size.min() < 3


@pytest.mark.parametrize("logit", [30.0, 3.0, 0.0, -8.0, 70.0])
@pytest.mark.parametrize(("n", "layer"), [(3, 1), (6, 4), (12, 12)])
def test_after_the_write_the_head_gives_the_logit_that_was_asked_for(n, layer, logit):
    model = toy.planted((layer, toy.ANSWER, logit), blocks=n, seed=1)
    state = tiny.stream(model, toy.ids(toy.PROMPT))[layer, -1]
    got = float(tiny.oracle(model, state[None])[0, Y])
    assert got == pytest.approx(logit, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("prompt", [toy.PROMPT, "abcdefgh", "ZN?wYq"])
@pytest.mark.parametrize("seed", [0, 5])
def test_no_block_and_no_embedding_has_the_reserved_directions_before_planting(seed, prompt):
    model = toy.random_model(blocks=6, seed=seed)
    stream = tiny.stream(model, toy.ids(prompt))
    for token in (Y, RIVAL):
        along = stream @ direction(model, token)
        assert along.abs().max() < 1e-4 and stream.norm(dim=-1).min() > 1
        assert tiny.oracle(model, stream[-1])[:, token].abs().max() < 1e-3


@pytest.mark.parametrize("seed", [0, 5])
def test_only_the_planted_block_writes_the_answers_direction(seed):
    model = toy.planted((3, toy.ANSWER, 30.0), blocks=6, seed=seed)
    along = writes(model) @ direction(model, Y)  # [n, S], at every position
    others = torch.arange(6) != 2
    assert along[others].abs().max() < 1e-4
    assert float(along[2, -1]) > 1
    assert (writes(model) @ direction(model, RIVAL)).abs().max() < 1e-4


@pytest.mark.parametrize("seed", [0, 1])
def test_planting_changes_one_matrix_by_rank_one(seed):
    before, after = toy.random_model(seed=seed), toy.planted((4, toy.ANSWER, 30.0), seed=seed)
    pairs = zip(before.state_dict().items(), after.state_dict().values(), strict=True)
    changed = {name: new - old for (name, old), new in pairs if not torch.equal(old, new)}
    assert list(changed) == ["model.layers.3.mlp.down_proj.weight"]
    values = torch.linalg.svdvals(next(iter(changed.values())))
    assert values[0] > 1e-2 and values[1] < 1e-4 * values[0]


def test_seeds_give_different_models_and_one_seed_the_same_whatever_torchs_own():
    torch.manual_seed(1)
    first = toy.planted((2, toy.ANSWER, 9.0), seed=3).state_dict()
    torch.manual_seed(2)
    again, other = (toy.planted((2, toy.ANSWER, 9.0), seed=seed).state_dict() for seed in (3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_the_norms_weights_differ_so_that_a_norm_applied_twice_shows():
    weights = toy.random_model().model.norm.weight
    assert weights.std() > 0.1


@pytest.mark.parametrize("seed", range(3))
def test_identity_blocks_get_nothing(seed):
    model = toy.planted((3, toy.ANSWER, 30.0), silent=(2, 5), seed=seed)
    assert torch.equal(writes(model)[[1, 4]], torch.zeros(2, 4, toy.D))
    result = ask(model)
    assert result.credits[0, [1, 4]].abs().max() <= 1e-6
    assert writes(model)[[0, 2, 3, 5], -1].norm(dim=-1).min() > 1  # the others are at work
    assert result.credits[0, 2] >= 0.99 * float(result.delta)


# ---------------------------------------------------------------------------------------------------------------------
# Several blocks write
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("first", [0.6, 1.5, 3.0, 4.5, 5.4])
def test_two_blocks_share_the_probability_as_the_hand_formula_says(first, seed):
    model = toy.planted((2, toy.ANSWER, first), (3, toy.ANSWER, 6.0), blocks=4, silent=(4,), quiet=True, seed=seed)
    by_hand = lambda logit: math.exp(logit) / (math.exp(logit) + 63)  # noqa: E731
    result, logits = ask(model), ask(model, scalar="logit")
    credits = torch.tensor([[0, by_hand(first) - by_hand(0), by_hand(6) - by_hand(first), 0]])
    torch.testing.assert_close(result.credits, credits, atol=1e-4, rtol=0)
    torch.testing.assert_close(logits.credits, torch.tensor([[0, first, 6 - first, 0]]), atol=1e-4, rtol=0)


def test_quiet_models_give_every_other_token_a_logit_of_zero():
    model = toy.planted((2, toy.ANSWER, 5.0), quiet=True)
    logits = tiny.oracle(model, tiny.stream(model, toy.ids(toy.PROMPT))[-1])
    others = torch.arange(64) != Y
    assert logits[:, others].abs().max() < 1e-4 < float(logits[-1, Y])
    loud = toy.planted((2, toy.ANSWER, 5.0))
    assert tiny.oracle(loud, tiny.stream(loud, toy.ids(toy.PROMPT))[-1])[:, others].std() > 0.1


@pytest.mark.parametrize("seed", range(3))
def test_what_is_written_and_erased_shows_as_credits_of_both_signs(seed):
    result = ask(toy.planted((2, toy.ANSWER, 10.0), (4, toy.ANSWER, 3.0), seed=seed))
    assert result.credits[0, 1] > 0.9 and result.credits[0, 3] < -0.5
    assert float(result.non_monotonicity()) > 2
    assert float(result.delta) < 0.5


def test_writes_may_be_given_in_any_order():
    one = toy.planted((4, toy.ANSWER, 3.0), (2, toy.ANSWER, 10.0)).state_dict()
    other = toy.planted((2, toy.ANSWER, 10.0), (4, toy.ANSWER, 3.0)).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("seed", range(3))
def test_a_block_that_helps_the_rival_hurts_the_answer_without_touching_its_logit(seed):
    model = toy.planted((2, toy.ANSWER, 10.0), (4, toy.RIVAL, 14.0), seed=seed)
    written = writes(model)[3, -1]
    assert float(written @ direction(model, Y)) == pytest.approx(0, abs=1e-4)
    assert float(written @ direction(model, RIVAL)) > 1
    assert ask(model).credits[0, 3] < -0.5
    assert ask(model, answer=toy.RIVAL).credits[0, 3] > 0.9


# ---------------------------------------------------------------------------------------------------------------------
# Attention moves, blocks relay
# ---------------------------------------------------------------------------------------------------------------------


@cache
def mover(layer=4, seed=0):
    return toy.moved(layer, seed=seed)


def values_zeroed(model, layer, position):
    """A hook: a block's attention gets values of zero from a position."""

    def hook(module, args, output):
        output = output.clone()
        output[:, position] = 0
        return output

    return model.model.layers[layer - 1].self_attn.v_proj.register_forward_hook(hook)


@pytest.mark.parametrize("prompt", PLACES)
@pytest.mark.parametrize(("layer", "seed"), [(1, 0), (4, 0), (4, 1), (6, 2)])
def test_the_mover_has_the_credit_wherever_the_source_token_stands(layer, seed, prompt):
    result = ask(mover(layer, seed), prompt)
    assert float(result.credits[0, layer - 1]) > 0.9 < oracle_p(mover(layer, seed), prompt)
    assert int(result.onset()) == layer


@pytest.mark.parametrize("prompt", ["aho?", "abcd", "N"])
@pytest.mark.parametrize(("layer", "seed"), [(1, 0), (4, 0), (4, 1), (6, 2)])
def test_without_the_source_token_nothing_is_moved(layer, seed, prompt):
    result = ask(mover(layer, seed), prompt)
    assert abs(float(result.credits[0, layer - 1])) < 0.01
    assert oracle_p(mover(layer, seed), prompt) < 0.05  # 1 / V = 0.016


@pytest.mark.parametrize("prompt", PLACES)
@pytest.mark.parametrize(("layer", "seed"), [(1, 0), (4, 1)])
def test_what_is_moved_comes_from_the_source_position_by_attention(layer, seed, prompt):
    model, place = mover(layer, seed), prompt.index(toy.SOURCE)
    assert oracle_p(without(model, layer), prompt) < 0.05
    assert oracle_p(model, prompt.replace(toy.SOURCE, "b")) < 0.05
    for position in range(4):
        handle = values_zeroed(model, layer, position)
        p = oracle_p(model, prompt)
        handle.remove()
        assert p < 0.05 if position == place else p > 0.9
    for other in range(1, 7):  # no other block is needed
        assert other == layer or oracle_p(without(model, other), prompt) > 0.9


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("finder", "speaker", "n"), [(1, 2, 2), (1, 6, 6), (2, 5, 6), (3, 4, 12)])
def test_a_finder_that_no_row_reads_has_no_credit_though_the_answer_needs_it(finder, speaker, n, seed):
    model = toy.relayed(finder, speaker, blocks=n, quiet=True, seed=seed)
    result = ask(model)
    assert abs(float(result.credits[0, finder - 1])) <= 1e-6
    assert float(result.credits[0, speaker - 1]) > 0.95
    assert oracle_p(model) > 0.95
    for layer in (finder, speaker):
        assert oracle_p(without(model, layer)) < 0.05
    assert writes(model)[finder - 1, -1].norm() > 1


@pytest.mark.parametrize("logit", [24.0, 5.0, -8.0])
@pytest.mark.parametrize(
    ("layer", "near", "make"),
    [(4, 0.05, lambda logit: toy.moved(4, logit)),  # the block's own MLP writes after its attention
     (6, 0.05, lambda logit: toy.moved(6, logit, quiet=True)), (3, 1e-4, lambda logit: toy.relayed(1, 3, logit)),
     (6, 1e-4, lambda logit: toy.relayed(2, 6, logit, quiet=True, seed=1))],
    ids=["mover", "quiet mover", "relay", "quiet relay"],
)  # fmt: skip
def test_what_is_moved_or_relayed_has_the_logit_that_was_asked_for(layer, near, make, logit):
    model = make(logit)
    state = tiny.stream(model, toy.ids(toy.PROMPT))[layer, -1]
    assert float(tiny.oracle(model, state[None])[0, Y]) == pytest.approx(logit, rel=near)


# ---------------------------------------------------------------------------------------------------------------------
# Walking a path
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("n", "d", "V"), [(1, 2, 3), (5, 2, 3), (4, 6, 9), (12, 4, 2)])
def test_the_stream_walks_the_path_and_the_head_reads_it_as_by_hand(n, d, V, norm):
    generator = torch.Generator().manual_seed(n)
    path = torch.randn(n + 1, d, generator=generator, dtype=torch.float64) * 2
    rows = torch.randn(V, d, generator=generator, dtype=torch.float64)
    model = toy.walking(path, rows, norm=norm)
    exact = 1e-6 if norm else 1e-11  # a Llama's norm computes in float32
    torch.testing.assert_close(tiny.stream(model, toy.ids("a"))[:, 0], path, atol=1e-11, rtol=0)
    seen = path / (path.square().mean(1, keepdim=True) + 1e-2).sqrt() if norm else path
    levels = (seen @ rows.T).softmax(1)[:, -1]
    result = explain(model, toy.tokenizer(V), "a", answer=toy.ALPHABET[V - 1]).check()
    torch.testing.assert_close(result.levels[0], levels, atol=exact, rtol=0)


def test_a_path_may_stand_still_and_may_end_at_zero():
    path = torch.tensor([[1.0, 2.0], [1.0, 2.0], [-1.0, 0.5], [0.0, 0.0]], dtype=torch.float64)
    model = toy.walking(path, torch.eye(3, 2, dtype=torch.float64))
    torch.testing.assert_close(tiny.stream(model, toy.ids("a"))[:, 0], path, atol=1e-12, rtol=0)


@pytest.mark.parametrize("at", [0, 1])
def test_a_path_through_zero_is_refused(at):
    path = torch.ones(3, 2)
    path[at] = 0
    with pytest.raises(IGLensError, match="expected non-zero states before the last"):
        toy.walking(path, torch.ones(3, 2))


# ---------------------------------------------------------------------------------------------------------------------
# Refusals
# ---------------------------------------------------------------------------------------------------------------------


MAKERS = {
    "writer": lambda layer: toy.planted((layer, toy.ANSWER, 3.0)),
    "plant": lambda layer: toy.plant(toy.random_model(), layer, toy.ANSWER, 3.0),
    "silent": lambda layer: toy.planted(silent=(layer,)),
    "mover": toy.moved,
    "finder": lambda layer: toy.relayed(layer, 5),
    "speaker": lambda layer: toy.relayed(1, layer),
}


@pytest.mark.parametrize("layer", [0, 7, -1, True, 2.0, "2", None])
@pytest.mark.parametrize("role", MAKERS)
def test_a_block_that_is_not_there_is_refused(role, layer):
    with pytest.raises(IGLensError, match="expected a block of 1 … 6, got"):
        MAKERS[role](layer)


@pytest.mark.parametrize(("finder", "speaker"), [(2, 1), (2, 2)])
def test_a_finder_that_does_not_come_before_its_speaker_is_refused(finder, speaker):
    with pytest.raises(IGLensError, match=f"the finder before the speaker, got blocks {finder} and {speaker}"):
        toy.relayed(finder, speaker)


def test_a_block_that_is_told_two_things_is_refused():
    with pytest.raises(IGLensError, match=r"every block to be told one thing, got \[2, 2\]"):
        toy.planted((2, toy.ANSWER, 9.0), (2, toy.RIVAL, 3.0))
    with pytest.raises(IGLensError, match=r"every block to be told one thing, got \[2, 3, 2\]"):
        toy.planted((2, toy.ANSWER, 9.0), silent=iter((3, 2)))


@pytest.mark.parametrize("blocks", [0, -1, True, 2.0, None])
def test_a_number_of_blocks_that_is_none_is_refused(blocks):
    with pytest.raises(IGLensError, match="blocks: expected a whole number, at least 1, got"):
        toy.random_model(blocks)


@pytest.mark.parametrize("logit", [toy.TOP + 0.1, -toy.TOP - 0.1, 1e9, math.inf, -math.inf, math.nan])
def test_a_logit_beyond_the_heads_reach_is_refused(logit):
    with pytest.raises(IGLensError, match=f"logit of 'Y': expected one between −{toy.TOP:.0f} and {toy.TOP:.0f}, got"):
        toy.planted((2, toy.ANSWER, logit))


@pytest.mark.parametrize("token", ["", "ä", " ", 3, "no", "YN"])
def test_a_token_that_is_not_one_character_of_the_alphabet_is_refused(token):
    with pytest.raises(IGLensError):
        toy.planted((2, token, 1.0))


@pytest.mark.parametrize("text", ["", "a b", "ä", 3, None, ["a"]])
def test_a_text_of_other_characters_has_no_ids(text):
    with pytest.raises(IGLensError, match="expected a text of the characters abc"):
        toy.ids(text)


@pytest.mark.parametrize("V", [0, 65, -1, True, 2.0])
def test_a_vocabulary_that_the_alphabet_does_not_have_is_refused(V):
    with pytest.raises(IGLensError, match="V: expected a whole number of 1 … 64, got"):
        toy.tokenizer(V)


@pytest.mark.parametrize(
    ("path", "rows"),
    [(torch.ones(3, 3), torch.ones(2, 3)), (torch.ones(3, 4), torch.ones(3, 2)), (torch.ones(4), torch.ones(2, 4)),
     (torch.ones(3, 2).long(), torch.ones(3, 2))],
    ids=["odd", "other width", "no path", "integers"],
)  # fmt: skip
def test_a_path_that_no_model_can_walk_is_refused(path, rows):
    with pytest.raises(IGLensError, match=r"expected a path \[n \+ 1, d\] and rows \[V, d\] of floats, d even, got"):
        toy.walking(path, rows)


# ---------------------------------------------------------------------------------------------------------------------
# The trained model
# ---------------------------------------------------------------------------------------------------------------------


@cache
def trained():
    return toy.induction()


@pytest.mark.parametrize("length", [toy.LENGTH, 12])
def test_certain_positions_are_those_whose_next_token_followed_before(length):
    tokens, certain = toy.sequences(300, torch.Generator().manual_seed(0), length)
    assert tokens.shape == (300, length) and certain.shape == (300, length - 1)
    for row, flags in zip(tokens.tolist(), certain.tolist(), strict=True):
        followed = {}
        for (token, following), flag in zip(itertools.pairwise(row), flags, strict=True):
            assert flag == (token in followed)
            assert followed.setdefault(token, following) == following


def test_periods_and_letters_differ_from_sequence_to_sequence():
    tokens, certain = toy.sequences(500, torch.Generator().manual_seed(0))
    assert set((~certain).sum(1).tolist()) == set(range(5, 17))
    assert len({tuple(row[:5]) for row in tokens.tolist()}) > 490
    assert set(tokens.flatten().tolist()) == set(range(toy.LETTERS))
    again = toy.sequences(500, torch.Generator().manual_seed(0))[0]
    assert torch.equal(tokens, again)
    assert not torch.equal(tokens, toy.sequences(500, torch.Generator().manual_seed(1))[0])


@torch.no_grad()
def share_right(model, count=200, seed=99) -> float:
    """Of the certain next tokens, those that the model predicts, counted one by one."""
    tokens, _ = toy.sequences(count, torch.Generator().manual_seed(seed))
    best, right = model(input_ids=tokens).logits.argmax(-1).tolist(), []
    for row, found in zip(tokens.tolist(), best, strict=True):
        right += [found[i] == row[i + 1] for i in range(len(row) - 1) if row[i] in row[:i]]
    return sum(right) / len(right)


def test_the_trained_model_predicts_what_is_certain_in_fresh_sequences():
    assert share_right(trained()) > 0.99
    assert toy.accuracy(trained()) > 0.99
    random = toy.llama(toy.LETTERS, 64, 2, seed=0)
    assert toy.accuracy(random, count=200) < 0.2
    assert toy.accuracy(random, count=200, seed=99) == pytest.approx(share_right(random), abs=1e-6)


def test_block_2_carries_the_answers_and_skipping_either_block_destroys_them():
    tokens, certain = toy.sequences(24, torch.Generator().manual_seed(7))
    credits, delta, readout = [], [], Readout(trained())
    for row, known in zip(tokens.tolist(), certain, strict=True):
        result = attribute(readout, read(trained(), toy.tokenizer(toy.LETTERS), row[:1], answer=row[1:])).check()
        credits.append(result.credits[known])
        delta.append(result.delta[known])
    credits, delta = torch.cat(credits).mean(0), torch.cat(delta).mean()
    assert len(credits) == 2 and delta > 0.8
    assert credits[1] > 0.9 * delta

    @torch.no_grad()
    def p(model):
        logs = tiny.log_probs(model(input_ids=tokens).logits[:, :-1])
        return float(logs.gather(2, tokens[:, 1:, None])[..., 0][certain].exp().mean())

    assert p(trained()) > 0.99
    for layer in (1, 2):
        assert p(without(trained(), layer)) < p(trained()) - 0.5


def test_training_is_the_same_twice_with_one_seed_and_another_with_another():
    torch.manual_seed(1)
    first = toy.train(steps=2).state_dict()
    torch.manual_seed(2)
    again, other = toy.train(steps=2).state_dict(), toy.train(seed=1, steps=2).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@torch.no_grad()
def loss(model) -> float:
    tokens, certain = toy.sequences(64, torch.Generator().manual_seed(5))
    return float(nn.functional.cross_entropy(model(input_ids=tokens).logits[:, :-1][certain], tokens[:, 1:][certain]))


def test_a_few_steps_of_training_lower_the_loss():
    model = toy.train(steps=30)
    assert not model.training
    assert loss(model) < loss(toy.llama(toy.LETTERS, 64, 2, seed=0)) - 0.3


@pytest.mark.parametrize("steps", [1, 20])
def test_any_number_of_steps_trains(steps):
    assert math.isfinite(loss(toy.train(steps=steps)))


@pytest.mark.slow
def test_training_from_scratch_learns_the_task():
    model = toy.train()
    assert share_right(model) > 0.99 < toy.accuracy(model)


# ---------------------------------------------------------------------------------------------------------------------
# Its file
# ---------------------------------------------------------------------------------------------------------------------


def test_a_stored_model_comes_back_exactly_and_leaves_no_other_file(tmp_path):
    model = toy.llama(toy.LETTERS, 64, 2, seed=5)
    toy.store(model, tmp_path / "model.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    back = toy.induction(tmp_path / "model.safetensors")
    assert not back.training and type(back) is type(model)
    assert back.config.to_diff_dict() == model.config.to_diff_dict()
    assert back.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in back.state_dict().items())
    tokens, _ = toy.sequences(4, torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(back(input_ids=tokens).logits, model(input_ids=tokens).logits)


def test_storing_replaces_what_was_there(tmp_path):
    path = tmp_path / "model.safetensors"
    toy.store(toy.llama(toy.LETTERS, 64, 2, seed=5), path)
    toy.store(trained(), path)
    assert path.read_bytes() == toy.INDUCTION.read_bytes()


def test_a_store_that_fails_leaves_no_other_file(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises((OSError, IGLensError)):
        toy.store(trained(), tmp_path / "folder")
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]


def test_a_missing_file_names_the_command_that_makes_it(tmp_path):
    with pytest.raises(IGLensError, match=COMMAND) as caught:
        toy.induction(tmp_path / "none.safetensors")
    assert "none.safetensors" in str(caught.value)


@pytest.mark.parametrize("kept", [0, 5, 1000, -1])
def test_a_truncated_file_names_the_command(tmp_path, kept):
    path = tmp_path / "cut.safetensors"
    path.write_bytes(toy.INDUCTION.read_bytes()[:kept])
    with pytest.raises(IGLensError, match=COMMAND):
        toy.induction(path)


SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 4}


@pytest.mark.parametrize(
    "metadata",
    [None, {"other": "1"}, {"config": "no json"}, {"config": "{}"}, {"config": "[]"}, {"config": "null"},
     {"config": json.dumps(SMALL)},
     {"config": json.dumps(SMALL | {"num_attention_heads": 0})},
     {"config": json.dumps(SMALL | {"hidden_size": "x"})},
     {"config": json.dumps(SMALL | {"hidden_size": 9})}],
    ids=str,
)  # fmt: skip
def test_a_foreign_file_names_the_command(tmp_path, metadata):
    path = tmp_path / "foreign.safetensors"
    save_file({"weight": torch.zeros(2)}, path, metadata)
    with pytest.raises(IGLensError, match=COMMAND):
        toy.induction(path)


# ---------------------------------------------------------------------------------------------------------------------
# The failure gallery
# ---------------------------------------------------------------------------------------------------------------------


@cache
def eraser():
    return toy.planted((2, toy.ANSWER, 10.0), (4, toy.ANSWER, 3.0))


def is_right(result, model, prompt, token, position=-1):
    """The core's own way gives the levels of the model itself, in float64, and passes its checks."""
    expected = oracle_levels(model, prompt, token, position)
    torch.testing.assert_close(result.levels[0].double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(result.credits[0].double(), expected.diff(), atol=1e-5, rtol=0)
    assert result.check(1e-5) is result


def is_unfaithful_but_complete(wrong):
    assert wrong.completeness_error <= 1e-5
    with pytest.raises(FaithfulnessError):
        wrong.check()


def test_a_double_norm_is_complete_and_only_faithfulness_catches_it():
    model = eraser()
    right, wrong = toy.double_norm(model, toy.tokenizer(), toy.PROMPT, toy.ANSWER)
    is_right(right, model, toy.PROMPT, Y)
    with torch.no_grad():
        normed = model.model.norm(tiny.stream(model, toy.ids(toy.PROMPT))[-1])
    twice = float(tiny.log_probs(tiny.oracle(model, normed))[-1, Y].exp())
    assert float(wrong.levels[0, -1]) == pytest.approx(twice, abs=1e-6)
    assert abs(twice - float(right.levels[0, -1])) > 0.1
    torch.testing.assert_close(wrong.levels[:, :-1], right.levels[:, :-1])
    is_unfaithful_but_complete(wrong)


def test_absolute_credits_are_faithful_and_only_completeness_catches_them():
    right, wrong = toy.absolute_credits(eraser(), toy.tokenizer(), toy.PROMPT, toy.ANSWER)
    is_right(right, eraser(), toy.PROMPT, Y)
    assert torch.equal(wrong.credits, right.credits.abs())
    assert float(wrong.credits.sum() - right.credits.sum()) > 1
    assert wrong.faithfulness_error <= 1e-5
    with pytest.raises(CompletenessError):
        wrong.check()


def test_reading_at_the_own_position_is_complete_and_only_faithfulness_catches_it():
    prompt, token = "kfwmzbqkfwm", toy.ALPHABET.index("z")
    right, wrong = toy.own_position(trained(), toy.tokenizer(toy.LETTERS), prompt, "z")
    is_right(right, trained(), prompt, token)
    shifted = oracle_levels(trained(), prompt + "z", token)  # where z stands, not where it is predicted
    torch.testing.assert_close(wrong.levels[0].double(), shifted, atol=1e-5, rtol=0)
    assert float(right.levels[0, -1]) > 0.9 and float(wrong.levels[0, -1]) < 0.01
    is_unfaithful_but_complete(wrong)


def test_a_missing_cap_is_complete_and_only_faithfulness_catches_it():
    model = toy.capped()
    favourite = read(model, toy.tokenizer(), toy.PROMPT, max_new_tokens=1).tokens[0]
    token = toy.ALPHABET.index(favourite)
    right, wrong = toy.missing_cap(model, toy.tokenizer(), toy.PROMPT, favourite)
    is_right(right, model, toy.PROMPT, token)
    bare = copy.deepcopy(model)
    bare.config.final_logit_softcapping = None
    torch.testing.assert_close(wrong.levels[0].double(), oracle_levels(bare, toy.PROMPT, token), atol=1e-5, rtol=0)
    assert float((wrong.levels - right.levels).abs().max()) > 0.2
    assert model.config.final_logit_softcapping == 4.0
    is_unfaithful_but_complete(wrong)


@pytest.mark.parametrize("make", [lambda: toy.capped(None), eraser])
def test_a_model_without_a_cap_cannot_lack_it(make):
    with pytest.raises(IGLensError, match="expected a model that caps its logits, got"):
        toy.missing_cap(make(), toy.tokenizer(), toy.PROMPT, toy.ANSWER)


def test_the_cap_bounds_the_logits():
    bounded, free = toy.capped(4.0), toy.capped(None)
    with torch.no_grad():
        logits, plain = (model(input_ids=toy.ids(toy.PROMPT)[None]).logits for model in (bounded, free))
    assert logits.abs().max() <= 4 < plain.abs().max()
    torch.testing.assert_close(logits, 4 * torch.tanh(plain / 4), atol=1e-5, rtol=0)


def test_no_check_catches_a_hook_left_on_which_explains_another_model():
    model = toy.planted((3, toy.ANSWER, 30.0))
    right, wrong = toy.hook_left_on(model, toy.tokenizer(), toy.PROMPT, toy.ANSWER, 3)
    is_right(right, model, toy.PROMPT, Y)
    assert wrong.check() is wrong  # the explanation of a model without block 3 is complete and faithful
    assert float(wrong.levels[0, -1]) == pytest.approx(oracle_p(without(model, 3)), abs=1e-6)
    assert float(right.levels[0, -1]) > 0.9 and float(wrong.levels[0, -1]) < 0.05
    assert tiny.hooks(model) == 0


@pytest.mark.parametrize("mistake", [toy.double_norm, toy.absolute_credits, toy.own_position])
def test_a_mistake_leaves_the_model_and_the_right_result_as_they_are(mistake):
    before = {name: value.clone() for name, value in eraser().state_dict().items()}
    right, _ = mistake(eraser(), toy.tokenizer(), toy.PROMPT, toy.ANSWER)
    assert all(torch.equal(value, before[name]) for name, value in eraser().state_dict().items())
    assert torch.equal(right.credits, ask(eraser()).credits)
