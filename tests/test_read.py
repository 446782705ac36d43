"""What is fed, what is explained, where it is read, and what is said about it."""

import copy
import warnings

import pytest
import tiny
import torch
from tiny import IDS
from transformers import GenerationConfig

from iglens_core import IGLensError, Readout, attribute, explain, read, residual_stream, token_id, token_text

PLAIN = tiny.tokenizer()


def greedy(model, ids: list[int], count: int, ends=()) -> list[int]:
    """The argmax of the raw logits, one full forward for each token."""
    made = []
    while len(made) < count and not (made and made[-1] in ends):
        with torch.no_grad():
            made.append(int(model(torch.tensor([ids + made])).logits[0, -1].argmax()))
    return made


@pytest.fixture
def speaker():
    """A tiny Llama of its own, that a test may change."""
    return copy.deepcopy(tiny.speaker())


# ---------------------------------------------------------------------------------------------------------------------
# The greedy answer
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["the cat", "on the mat", "cat", "x"])
def test_the_answer_is_the_argmax_of_the_raw_logits(speaker, prompt):
    trace = read(speaker, PLAIN, prompt, max_new_tokens=6)
    assert trace.token_ids.tolist() == greedy(speaker, PLAIN.encode(prompt), 6, ends=[1])
    assert trace.prompt_length == len(PLAIN.encode(prompt))


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 5.0},
        {"do_sample": True, "temperature": 9.0, "top_k": 0},
        {"forced_bos_token_id": 7},
        {"forced_eos_token_id": 1},
        {"suppress_tokens": [129, 30, 131]},
        {"begin_suppress_tokens": [129]},
        {"bad_words_ids": [[30], [131]]},
        {"no_repeat_ngram_size": 1},
        {"num_beams": 4},
        {"min_new_tokens": 12},
        {"max_length": 3},
        {"exponential_decay_length_penalty": [1, 9.0]},
        {"sequence_bias": [[[7], 99.0]]},
    ],
    ids=lambda options: "-".join(options),
)
def test_the_models_generation_settings_change_nothing_and_stay(speaker, options):
    expected = greedy(speaker, PLAIN.encode("the cat"), 10, ends=[1])
    own = speaker.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=2, **options)
    before = own.to_dict()
    assert read(speaker, PLAIN, "the cat", max_new_tokens=10).token_ids.tolist() == expected
    assert speaker.generation_config is own
    assert own.to_dict() == before


def test_the_end_token_is_explained_and_labelled(speaker):
    result = explain(speaker, PLAIN, "the cat", max_new_tokens=20)
    assert result.tokens[-1] == "</s>"
    assert result.token_ids[-1] == 1
    assert result.token_ids.tolist().count(1) == 1
    ids = torch.tensor(PLAIN.encode("the cat") + result.token_ids.tolist())
    expected = tiny.levels(speaker, ids, len(ids) - 2, 1)
    assert torch.allclose(result.levels[-1].double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("ends", [30, [30], [200, 30]])
def test_any_of_the_models_own_end_tokens_ends_the_answer(speaker, ends):
    speaker.generation_config = GenerationConfig(eos_token_id=ends)
    full = greedy(speaker, PLAIN.encode("the cat"), 6)
    assert read(speaker, PLAIN, "the cat", max_new_tokens=6).token_ids.tolist() == full[: full.index(30) + 1]


def test_max_new_tokens_bounds_the_answer(speaker):
    assert len(read(speaker, PLAIN, "the cat", max_new_tokens=1).tokens) == 1
    assert len(read(speaker, PLAIN, "the cat", max_new_tokens=3).tokens) == 3


def test_a_forced_answer_takes_one_run_of_the_model(speaker):
    runs = []
    handle = speaker.model.register_forward_hook(lambda *_: runs.append(1))
    trace = read(speaker, PLAIN, "the cat", answer=" sat on")
    assert len(runs) == 1
    attribute(Readout(tiny.speaker()), trace)
    assert len(runs) == 1
    handle.remove()


# ---------------------------------------------------------------------------------------------------------------------
# What is fed
# ---------------------------------------------------------------------------------------------------------------------


def test_a_forced_answer_is_fed_as_it_encodes_alone(speaker):
    trace = read(speaker, tiny.tokenizer(bos=True, eos=True), "the cat", answer=" sat on the mat")
    answer = PLAIN.encode(" sat on the mat")
    assert trace.input_ids.tolist() == [0, *PLAIN.encode("the cat"), *answer]
    assert trace.token_ids.tolist() == answer
    assert trace.tokens == (" sat", " on", " the", " mat")
    assert trace.input_tokens == ("<s>", "the", " cat", *trace.tokens)
    assert trace.prompt_length == 3


def test_prompt_and_answer_may_be_ids(speaker):
    texts = read(speaker, PLAIN, "the cat", answer=" sat on")
    for kind in (list, tuple, torch.tensor, lambda ids: torch.tensor([ids])):
        ids = read(speaker, PLAIN, kind(PLAIN.encode("the cat")), answer=kind(PLAIN.encode(" sat on")))
        assert torch.equal(ids.input_ids, texts.input_ids)
        assert torch.equal(ids.stream, texts.stream)
        assert ids.prompt_length == texts.prompt_length


def test_ids_are_fed_as_they_are_also_where_there_is_a_template(speaker):
    trace = read(speaker, tiny.tokenizer(bos=True, chat=True), [260, 264], answer=[7])
    assert trace.input_ids.tolist() == [260, 264, 7]


def test_a_bare_prompt_has_what_the_tokenizer_adds_but_no_end_token(speaker):
    expected = PLAIN.encode("the cat")
    for options, fed in (({}, expected), ({"bos": True}, [0, *expected]), ({"eos": True}, expected)):
        trace = read(speaker, tiny.tokenizer(**options), "the cat", answer=" sat", chat=False)
        assert trace.input_ids.tolist()[:-1] == fed
    assert read(speaker, tiny.tokenizer(bos=True, eos=True), "the", answer=" sat").input_ids.tolist()[0] == 0


def test_an_end_token_that_the_prompt_itself_ends_in_is_kept(speaker):
    trace = read(speaker, PLAIN, "the cat</s>", answer=" sat")
    assert trace.input_ids.tolist() == [260, 264, 1, *PLAIN.encode(" sat")]


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("chat", [None, True])
def test_a_template_is_fed_as_it_is_with_one_bos(speaker, bos, chat):
    tokenizer = tiny.tokenizer(bos=bos, chat=True)
    messages = [{"role": "user", "content": "the cat"}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    trace = read(speaker, tokenizer, "the cat", answer=" sat", chat=chat)
    fed = trace.input_ids.tolist()[: trace.prompt_length]
    assert fed == expected
    assert fed.count(0) == 1
    assert tokenizer.decode(fed) == "<s>[user] the cat [assistant]"


def test_chat_false_feeds_the_bare_prompt(speaker):
    trace = read(speaker, tiny.tokenizer(bos=True, chat=True), "the cat", answer=" sat", chat=False)
    assert trace.input_ids.tolist() == [0, *PLAIN.encode("the cat sat")]


# ---------------------------------------------------------------------------------------------------------------------
# Where it is read
# ---------------------------------------------------------------------------------------------------------------------


def test_tokens_are_read_at_the_position_before_their_own(speaker):
    trace = read(speaker, PLAIN, "the cat", answer=" sat on the mat")
    assert trace.positions.tolist() == [1, 2, 3, 4]
    assert torch.equal(trace.token_ids, trace.input_ids[trace.positions + 1])
    with torch.no_grad():
        own = tiny.log_probs(speaker(trace.input_ids[None]).logits[0]).exp()
    expected = own[trace.positions, trace.token_ids]
    result = attribute(Readout(speaker), trace)
    assert torch.allclose(result.levels[:, -1].double(), expected, rtol=0, atol=1e-6)
    assert not torch.allclose(expected, own[trace.positions + 1, trace.token_ids], rtol=0, atol=1e-3)


def test_scope_all_explains_every_token_but_the_first(speaker):
    trace = read(speaker, PLAIN, "the cat", answer=" sat on", scope="all")
    assert trace.positions.tolist() == [0, 1, 2]
    assert torch.equal(trace.token_ids, trace.input_ids[1:])
    assert trace.tokens == (" cat", " sat", " on")
    assert trace.prompt_length == 2
    answer = attribute(Readout(speaker), read(speaker, PLAIN, "the cat", answer=" sat on"))
    everything = attribute(Readout(speaker), trace)
    assert torch.allclose(everything.levels[1:], answer.levels, rtol=0, atol=1e-6)


def test_the_trace_holds_the_stream_and_the_models_own_logits(speaker):
    trace = read(speaker, PLAIN, "the cat", answer=" sat on the mat", scope="all")
    with torch.no_grad():
        own = speaker(trace.input_ids[None]).logits[0]
    assert torch.equal(trace.stream, tiny.stream(speaker, trace.input_ids))
    assert torch.equal(trace.logit_positions, trace.positions)
    assert torch.allclose(trace.logits, own[:-1], rtol=0, atol=1e-5)
    assert trace.model == "LlamaForCausalLM"
    assert trace.attention_mask.tolist() == [1] * 6


@pytest.mark.parametrize("count", [64, 65, 130])
def test_long_texts_are_compared_at_64_spread_positions(speaker, count):
    ids = [3 + 7 * i % 200 for i in range(count + 1)]
    result = explain(speaker, PLAIN, ids[:1], answer=ids[1:], scope="all").check(1e-6)
    compared = ~result.model_level.isnan()
    assert int(compared.sum()) == 64
    assert compared[0]
    assert compared[-1]
    gaps = compared.nonzero().flatten().diff()
    assert int(gaps.max()) <= -(-count // 63)
    with torch.no_grad():
        own = tiny.log_probs(speaker(torch.tensor([ids])).logits[0]).exp()[torch.arange(count), ids[1:]]
    assert torch.allclose(result.model_level[compared].double(), own[compared], rtol=0, atol=1e-6)
    assert torch.allclose(result.levels[:, -1].double(), own, rtol=0, atol=1e-6)
    assert torch.allclose(result.credits.double().sum(1), result.delta.double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2", "opt_350m", "gemma2", "phi", "gptj", "bloom", "gpt_neo"])
def test_left_padding_changes_nothing(name):
    model = tiny.shared(name)
    padded = torch.cat([torch.full((5,), 7), IDS])
    mask = torch.tensor([0] * 5 + [1] * len(IDS))
    expected = tiny.stream(model, IDS)
    got = residual_stream(model, padded, mask)[:, 5:]
    assert torch.allclose(got, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert torch.equal(residual_stream(model, padded[None], mask[None])[:, 5:], got)
    assert torch.equal(residual_stream(model, padded, mask.bool())[:, 5:], got)
    unmasked = residual_stream(model, padded)[:, 5:]
    assert (unmasked - expected).abs().max() > 0.05 * expected.abs().max()


# ---------------------------------------------------------------------------------------------------------------------
# What is said about it
# ---------------------------------------------------------------------------------------------------------------------


def messages_of(call) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught if "answer" in str(warning.message)]


def test_an_answer_without_its_space_is_warned_about_with_id_and_piece(speaker):
    (message,) = messages_of(lambda: read(speaker, PLAIN, "the", answer="cat"))
    assert "id 263 'cat'" in message
    assert "id 264 ' cat'" in message


def test_an_answer_that_encodes_otherwise_with_the_prompt_is_warned_about_with_both_ids(speaker):
    (message,) = messages_of(lambda: read(speaker, PLAIN, "the ", answer="cat"))
    assert f"fed as {PLAIN.encode('cat')}" in message
    assert f"end in {PLAIN.encode('the cat')}" in message
    with pytest.warns(UserWarning, match="encoded together"):
        trace = read(speaker, PLAIN, "the ", answer="cat")
    assert trace.token_ids.tolist() == PLAIN.encode("cat")


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [("the", " cat"), ("the cat", "."), ("the\n", "cat"), ("the", [7]), ([260], "cat"), ("日", "本"), ("the", None)],
)
@pytest.mark.parametrize("bos", [False, True])
def test_nothing_is_warned_about_otherwise(speaker, prompt, answer, bos):
    assert messages_of(lambda: read(speaker, tiny.tokenizer(bos=bos), prompt, answer=answer, max_new_tokens=2)) == []


def test_byte_pieces_are_shown_as_bytes():
    ids = PLAIN.encode("日本")
    assert [token_text(PLAIN, i) for i in ids] == [f"<0x{byte:02X}>" for byte in "日本".encode()]


def test_a_token_reads_as_inside_a_sentence_or_by_its_id():
    texts = {264: " cat", 263: "cat", 0: "<s>", 1: "</s>", len(PLAIN): f"id {len(PLAIN)}", -1: "id -1"}
    assert {i: token_text(PLAIN, i) for i in texts} == texts
    assert token_text(tiny.tokenizer(bos=True), 264) == " cat"


def test_a_space_that_the_tokenizer_drops_at_the_start_of_a_text_is_kept_on_its_token():
    tokenizer = tiny.spaced()
    ids = tokenizer.encode("cat cat本", add_special_tokens=False)
    pieces = [tokenizer.convert_ids_to_tokens(i) for i in ids]
    assert pieces == ["\u2581cat", "\u2581cat", "<0xE6>", "<0x9C>", "<0xAC>"]
    assert tokenizer.decode(ids[:1]) == "cat"
    assert [token_text(tokenizer, i) for i in ids] == [" cat", " cat", "<0xE6>", "<0x9C>", "<0xAC>"]
    assert token_text(tokenizer, tokenizer.convert_tokens_to_ids("cat")) == "cat"


def test_token_id_respects_the_space_and_adds_no_bos():
    for tokenizer in (PLAIN, tiny.tokenizer(bos=True, eos=True)):
        assert (token_id(tokenizer, " cat"), token_id(tokenizer, "cat")) == (264, 263)
    with pytest.raises(IGLensError, match="264 ' cat', 267 ' sat'"):
        token_id(PLAIN, " cat sat")


# ---------------------------------------------------------------------------------------------------------------------
# The default model
# ---------------------------------------------------------------------------------------------------------------------

FRANCE, PARIS = [504, 3575, 282, 4649, 314], 7042


@pytest.fixture(scope="module")
def france(smol):
    model, tokenizer, _ = smol
    return read(model, tokenizer, "The capital of France is", answer=" Paris", chat=False)


def test_default_model_reads_paris(smol, france):
    model, _, readout = smol
    assert france.input_ids.tolist() == [*FRANCE, PARIS]
    with torch.no_grad():
        own = torch.softmax(model(torch.tensor([FRANCE])).logits[0, -1].double(), -1)
    assert float(own[PARIS]) == pytest.approx(0.77253, abs=1e-5)
    result = attribute(readout, france).check()
    assert float(result.levels[0, -1]) == pytest.approx(float(own[PARIS]), abs=1e-6)
    assert readout.prob(france.stream[-1, 4:5], 38634)[0].item() == pytest.approx(5.15e-4, abs=5e-7)
    assert result.check(1e-5).faithfulness_error <= 1e-5


def test_default_model_read_through_the_norm_twice_would_be_wrong(smol, france):
    model, _, readout = smol
    with torch.no_grad():
        twice = model.model.norm(france.stream[-1, 4:5])
    assert readout.prob(twice, PARIS)[0].item() == pytest.approx(0.00550, abs=1e-5)


def test_default_model_is_read_at_the_preceding_position(smol):
    model, tokenizer, readout = smol
    trace = read(model, tokenizer, FRANCE, answer=[PARIS], scope="all")
    result = attribute(readout, trace).check(1e-5)
    assert result.positions.tolist() == [0, 1, 2, 3, 4]
    assert result.tokens == (" capital", " of", " France", " is", " Paris")
    assert float(result.levels[-1, -1]) == pytest.approx(0.7725, abs=1e-4)
    assert readout.prob(trace.stream[-1, 5:6], PARIS)[0].item() == pytest.approx(1.9e-4, abs=5e-6)
    bare = read(model, tokenizer, "The capital of France is Paris", answer=".", chat=False, scope="all")
    again = attribute(readout, bare).check(1e-5)
    assert torch.allclose(again.levels[:5], result.levels, rtol=0, atol=1e-5)


def test_default_model_warns_about_the_missing_space(smol):
    model, tokenizer, _ = smol
    with pytest.warns(UserWarning, match="id 38634 'Paris'; .* id 7042 ' Paris'"):
        result = explain(model, tokenizer, "The capital of France is", answer="Paris", chat=False)
    assert result.token_ids.tolist() == [38634]
    assert float(result.levels[0, -1]) == pytest.approx(5.15e-4, abs=5e-7)


def test_default_model_explains_an_answer_of_several_tokens(smol):
    model, tokenizer, _ = smol
    result = explain(model, tokenizer, "The capital of Iceland is", answer=" Reykjavik", chat=False).check(1e-5)
    assert result.token_ids.tolist() == [45803, 91, 44450, 1873]
    assert float(result.levels[0, -1]) == pytest.approx(0.4457, abs=6e-5)
    assert float(result.answer().levels[0, -1]) == pytest.approx(0.4101, abs=6e-5)


def test_default_model_answers_in_its_chat_template(smol):
    model, tokenizer, readout = smol
    question = "What is the capital of Vietnam?"
    trace = read(model, tokenizer, question)
    messages = [{"role": "user", "content": question}]
    fed = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert trace.input_ids.tolist()[: trace.prompt_length] == list(fed)
    assert "".join(trace.tokens) == "The capital of Vietnam is Hoi An.<|im_end|>"
    assert trace.token_ids.tolist() == greedy(model, list(fed), 20, ends=[tokenizer.eos_token_id])
    where = trace.tokens.index(" Ho")
    result = attribute(readout, trace).check(1e-5)
    assert float(result.levels[where, -1]) == pytest.approx(0.45, abs=0.01)
    rival = attribute(readout, trace, targets=token_id(tokenizer, " H")).check(1e-5)
    assert float(rival.levels[where, -1]) == pytest.approx(0.41, abs=0.01)


def test_default_model_shows_readable_bytes(smol):
    _, tokenizer, _ = smol
    ids = tokenizer.encode("日本", add_special_tokens=False)
    texts = [token_text(tokenizer, i) for i in ids]
    assert texts == ["<0xE6><0x97>", "<0xA5>", "本"]


def test_default_model_in_bfloat16_gives_its_own_probability(smol):
    model, tokenizer, _ = smol
    half = copy.deepcopy(model).to(torch.bfloat16)
    result = explain(half, tokenizer, "The capital of France is", answer=" Paris", chat=False).check()
    with torch.no_grad():
        own = torch.softmax(half(torch.tensor([FRANCE])).logits[0, -1].double(), -1)[PARIS]
    assert float(result.levels[0, -1]) == pytest.approx(float(own), abs=1e-2)
    assert float(result.levels[0, -1]) == pytest.approx(0.7571, abs=2e-2)  # the machine decides the rest
    assert result.dtype == "bfloat16"
    assert result.levels.dtype == torch.float32
