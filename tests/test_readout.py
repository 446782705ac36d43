"""The readout and the stream against the model itself, run on states of our choice."""

import copy

import pytest
import tiny
import torch
import transformers as hf
from tiny import FAMILIES, IDS, N, V

from iglens_core import IGLensError, Readout, UnsupportedModelError, attribute, explain, read, residual_stream

SCALED = {"gemma2": 3.0, "cohere": 0.0625, "granite": 8.0, "minicpm3": 8, "falcon_h1": 0.5, "hyperclovax": 0.125}


@pytest.fixture(params=FAMILIES)
def name(request):
    return request.param


@pytest.fixture
def llama():
    return tiny.shared("llama")


def test_stream_holds_the_input_of_the_first_block_and_every_output(name):
    model = tiny.shared(name)
    expected = tiny.stream(model, IDS)
    assert expected.shape == (N + 1, len(IDS), tiny.D)
    assert torch.equal(residual_stream(model, IDS), expected)
    assert torch.equal(residual_stream(model, IDS[None]), expected)
    assert torch.equal(residual_stream(model, IDS.tolist()), expected)


def test_last_layer_gives_the_models_own_probabilities(name):
    model = tiny.shared(name)
    with torch.no_grad():
        own = tiny.log_probs(model(IDS[None]).logits[0]).exp()
    readout, last = Readout(model), tiny.stream(model, IDS)[-1]
    for target in (0, 41, V - 1):
        assert torch.allclose(readout.prob(last, target).double(), own[:, target], rtol=0, atol=1e-6)
    own_targets = own.argmax(-1)
    read_off = readout.prob(last, own_targets).double()
    assert torch.allclose(read_off, own.amax(-1), rtol=0, atol=1e-6)


def test_every_layer_equals_the_model_run_on_that_layers_states(name):
    model = tiny.shared(name)
    readout = Readout(model)
    for states in tiny.stream(model, IDS):
        expected, got = tiny.log_probs(tiny.oracle(model, states)), tiny.log_probs(readout.logits(states))
        assert torch.allclose(got, expected, rtol=0, atol=1e-5)
        assert torch.allclose(got.exp(), expected.exp(), rtol=0, atol=1e-6)
        for target in (0, 41, V - 1):
            assert torch.allclose(readout.log_prob(states, target).double(), expected[:, target], rtol=0, atol=1e-5)


def test_float64_models_are_read_to_float64(name):
    model = tiny.cast(tiny.shared(name), torch.float64)
    readout = Readout(model)
    for states in tiny.stream(model, IDS):
        got = readout.logits(states)
        assert got.dtype == torch.float64
        expected = tiny.log_probs(tiny.oracle(model, states)).exp()
        assert torch.allclose(got.softmax(-1), expected, rtol=0, atol=1e-12)
        every = torch.arange(len(states))
        assert torch.allclose(readout.prob(states, every), expected[every, every], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 5e-3)])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2", "opt_350m", "gemma2", "cohere", "minicpm3"])
def test_half_precision_models_are_read_as_they_read_themselves(name, dtype, tolerance):
    model = tiny.cast(tiny.shared(name), dtype)
    readout = Readout(model)
    for states in tiny.stream(model, IDS):
        got, expected = readout.logits(states), tiny.log_probs(tiny.oracle(model, states)).exp()
        assert states.dtype == dtype
        assert got.dtype == torch.float32
        assert torch.allclose(tiny.log_probs(got).exp(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family[3] and name != "gemma2"])
def test_a_norm_applied_twice_would_show_on_these_models(name):
    model = tiny.shared(name)
    last, readout = tiny.stream(model, IDS)[-1], Readout(model)
    with torch.no_grad():
        twice = tiny.log_probs(readout.logits(tiny.final_norm(model)(last))).exp()
        own = tiny.log_probs(model(IDS[None]).logits[0]).exp()
    assert (twice - own).abs().max() > 0.25


def test_without_perturbed_norms_a_norm_applied_twice_would_hide():
    model = tiny.build("llama", perturb=False)
    last, readout = tiny.stream(model, IDS)[-1], Readout(model)
    with torch.no_grad():
        twice = tiny.log_probs(readout.logits(tiny.final_norm(model)(last))).exp()
        own = tiny.log_probs(model(IDS[None]).logits[0]).exp()
    assert (twice - own).abs().max() < 1e-3


def test_every_layer_is_normed_with_its_own_statistics(llama):
    readout, stream = Readout(llama), tiny.stream(llama, IDS).double()
    weight, head = llama.model.norm.weight.double(), llama.lm_head.weight.double()
    scale = (stream.square().mean(-1, keepdim=True) + llama.config.rms_norm_eps).rsqrt()
    own = (stream * scale * weight @ head.T).log_softmax(-1)
    last = (stream * scale[-1] * weight @ head.T).log_softmax(-1)
    for layer in range(N + 1):
        got = tiny.log_probs(readout.logits(stream[layer].float()))
        assert torch.allclose(got, own[layer], rtol=0, atol=1e-4)
        assert layer == N or (got.exp() - last[layer].exp()).abs().max() > 0.2


@pytest.mark.parametrize("name", [*SCALED, "phi", "gptj"])
def test_cap_scale_or_bias_left_out_would_show(name):
    model = tiny.shared(name)
    norm, head = tiny.final_norm(model), model.get_output_embeddings()
    last = tiny.stream(model, IDS)[-1]
    with torch.no_grad():
        bare = tiny.log_probs(norm(last) @ head.weight.T).exp()
        own = tiny.log_probs(model(IDS[None]).logits[0]).exp()
    assert (bare - own).abs().max() > 0.02
    got = tiny.log_probs(Readout(model).logits(last)).exp()
    assert torch.allclose(got, own, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "written_out"),
    [
        ("gemma2", lambda z: 3.0 * torch.tanh(z / 3.0)),
        ("cohere", lambda z: z * 0.0625),
        ("granite", lambda z: z / 8),
        ("minicpm3", lambda z: z / (32 / 8)),
        ("falcon_h1", lambda z: z * 0.5),
        ("hyperclovax", lambda z: z * 0.125),
    ],
)
def test_logits_carry_the_architectures_own_cap_or_scale(name, written_out):
    model = tiny.shared(name)
    states = tiny.stream(model, IDS)[1]
    with torch.no_grad():
        raw = model.get_output_embeddings()(tiny.final_norm(model)(states)).double()
    got = Readout(model).logits(states).double()
    assert torch.allclose(got, written_out(raw), rtol=1e-5, atol=1e-5)


def test_opt_goes_through_its_projection_without_a_norm():
    model = tiny.shared("opt_350m")
    readout, states = Readout(model), tiny.stream(model, IDS)[1]
    with torch.no_grad():
        expected = states.double() @ model.model.decoder.project_out.weight.double().T
        expected = expected @ model.lm_head.weight.double().T
    assert model.lm_head.weight.shape == (V, 16)
    assert readout.d == 32
    assert torch.allclose(readout.logits(states).double(), expected, rtol=1e-5, atol=1e-4)


def test_the_families_here_have_blocks_that_return_tensors_and_blocks_that_return_tuples():
    kinds = {}
    for name in ("llama", "bloom", "mpt", "gpt_neo"):
        model = tiny.shared(name)
        keep = lambda module, args, output, name=name: kinds.update({name: type(output)})  # noqa: E731
        handle = tiny.blocks(model)[-1].register_forward_hook(keep)
        model(IDS[None])
        handle.remove()
    assert kinds == {"llama": torch.Tensor, "bloom": tuple, "mpt": tuple, "gpt_neo": tuple}


def test_sizes_are_those_of_the_model(name):
    readout = Readout(tiny.shared(name))
    assert (readout.V, readout.d, readout.n) == (V, tiny.D, N)


def test_topk_gives_the_largest_probabilities_with_their_ids(llama):
    states = tiny.stream(llama, IDS)[2]
    expected = tiny.log_probs(tiny.oracle(llama, states)).exp().topk(5)
    probabilities, ids = Readout(llama).topk(states, 5)
    assert torch.equal(ids, expected.indices)
    assert torch.allclose(probabilities.double(), expected.values, rtol=0, atol=1e-6)


def test_one_target_for_all_rows_or_one_for_each(llama):
    readout, states = Readout(llama), tiny.stream(llama, IDS)[2]
    assert torch.equal(readout.prob(states, 7), readout.prob(states, [7] * len(IDS)))
    each = torch.stack([readout.prob(states, int(target))[row] for row, target in enumerate(IDS)])
    assert torch.allclose(readout.prob(states, IDS), each, rtol=0, atol=1e-7)


# ---------------------------------------------------------------------------------------------------------------------
# What is refused
# ---------------------------------------------------------------------------------------------------------------------


def _gemma3n():
    config = hf.Gemma3nTextConfig(
        vocab_size=V, vocab_size_per_layer_input=V, hidden_size=32, hidden_size_per_layer_input=8, intermediate_size=64,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_kv_shared_layers=0,
        laurel_rank=4, layer_types=["full_attention"] * 4, activation_sparsity_pattern=[0.0] * 4, pad_token_id=0,
    )  # fmt: skip
    return hf.AutoModelForCausalLM.from_config(config).eval()


def _bert():
    config = hf.BertConfig(
        vocab_size=V, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, pad_token_id=0
    )
    return hf.AutoModelForCausalLM.from_config(config).eval()


def _t5():
    config = hf.T5Config(vocab_size=V, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, decoder_start_token_id=0)
    return hf.AutoModelForSeq2SeqLM.from_config(config).eval()


def _headless():
    return hf.AutoModel.from_config(tiny.shared("llama").config).eval()


class Nudged(hf.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + 0.1 * torch.nn.functional.one_hot(torch.tensor(41), V)
        return output


class Masked(hf.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.clone()
        output.logits[..., 90:] = torch.finfo(output.logits.dtype).min
        return output


class Bent(hf.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.sign() * output.logits.abs() ** 1.1
        return output


class Sidestepped(hf.LlamaForCausalLM):
    """Its logits take more than the last block's output: the embeddings too."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        output.logits = output.logits + 0.3 * self.get_input_embeddings()(ids) @ self.lm_head.weight.T
        return output


class Swelling(hf.LlamaForCausalLM):
    """What the head is given grows with the states, by one factor for all of them."""

    def forward(self, *args, **kwargs):
        handle = self.lm_head.register_forward_pre_hook(lambda _, args: args[0] * args[0].std())
        output = super().forward(*args, **kwargs)
        handle.remove()
        return output


class Neighbours(torch.nn.Module):
    """A final norm that looks at the position before."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, states):
        return self.norm(states + 0.5 * states.roll(1, dims=1))


def _mixing():
    model = tiny.build("llama")
    model.model.norm = Neighbours(model.model.norm)
    return model


def _tampered(kind):
    llama = tiny.shared("llama")
    model = kind(llama.config).eval()
    model.load_state_dict(llama.state_dict())
    return model


def _mixing_behind_a_mask():
    """The same, with padded rows of the head masked: their size must not hide what is wrong with the others."""
    model = tiny.build("phi")
    model.model.final_layernorm = Neighbours(model.model.final_layernorm)
    with torch.no_grad():
        model.lm_head.bias[-3:] = -1e9
    return model


REFUSED = {
    "several residual streams": (_gemma3n, "Gemma3nForCausalLM", "one stream"),
    "encoder": (_bert, "BertLMHeadModel", "later token changes earlier states"),
    "encoder-decoder": (_t5, "T5ForConditionalGeneration", "encoder-decoder"),
    "no head": (_headless, "LlamaModel", "no head; load it with AutoModelForCausalLM"),
    "one logit raised": (lambda: _tampered(Nudged), "Nudged", "logits"),
    "logits masked": (lambda: _tampered(Masked), "Masked", "logits"),
    "logits bent": (lambda: _tampered(Bent), "Bent", "neither a scale nor a soft cap"),
    "a scale that depends on the states": (lambda: _tampered(Swelling), "Swelling", "misses the model's own logits"),
    "a tail that mixes positions": (_mixing, "LlamaForCausalLM", "logits"),
    "a tail that mixes positions behind a mask": (_mixing_behind_a_mask, "PhiForCausalLM", "misses"),
    "a second way to the logits": (lambda: _tampered(Sidestepped), "Sidestepped", "logits"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_models_that_cannot_be_read_faithfully_are_refused(what):
    make, name, reason = REFUSED[what]
    with pytest.raises(UnsupportedModelError) as caught:
        Readout(make())
    message = str(caught.value)
    assert name in message
    assert reason in message
    assert "\n" not in message
    assert len(message) < 300


@pytest.mark.parametrize("what", ["several residual streams", "encoder-decoder", "no head"])
def test_their_stream_and_their_prompts_are_refused_too(what):
    model = REFUSED[what][0]()
    with pytest.raises(UnsupportedModelError, match=REFUSED[what][1]):
        residual_stream(model, IDS)
    with pytest.raises(UnsupportedModelError, match=REFUSED[what][1]):
        read(model, tiny.tokenizer(), [5, 6], answer=[7])


def test_an_untampered_subclass_is_read():
    class Same(hf.LlamaForCausalLM):
        pass

    states = tiny.stream(tiny.shared("llama"), IDS)[2]
    assert torch.equal(Readout(_tampered(Same)).logits(states), Readout(tiny.shared("llama")).logits(states))


# ---------------------------------------------------------------------------------------------------------------------
# More head rows than tokens
# ---------------------------------------------------------------------------------------------------------------------


def test_a_head_with_more_rows_than_tokens_is_read_over_all_of_them():
    model = tiny.build("llama", vocab_size=tiny.WORDS)
    model.resize_token_embeddings(tiny.WORDS + 64, mean_resizing=False)
    readout, tokenizer = Readout(model), tiny.tokenizer()
    assert readout.V == tiny.WORDS + 64
    trace = read(model, tokenizer, "the cat", answer=" sat on")
    extra = tiny.WORDS + 63
    result = attribute(readout, trace, targets=extra).check(1e-6)
    assert result.tokens == (f"id {extra}",) * 2
    for t, position in enumerate(trace.positions.tolist()):
        expected = tiny.levels(model, trace.input_ids, position, extra)
        assert torch.allclose(result.levels[t].double(), expected, rtol=0, atol=1e-6)
    with pytest.raises(IGLensError, match=rf"ids of this model, 0 … {extra}, got \[{extra + 1}"):
        attribute(readout, trace, targets=extra + 1)


# ---------------------------------------------------------------------------------------------------------------------
# The model is left as found
# ---------------------------------------------------------------------------------------------------------------------


def _everything(model):
    return explain(model, tiny.tokenizer(chat=True), "the cat", max_new_tokens=3, layers=[1])


def _found(model):
    modes = [module.training for module in model.modules()]
    grads = [parameter.grad is None for parameter in model.parameters()]
    return modes, tiny.hooks(model), grads, [p.requires_grad for p in model.parameters()], id(model.generation_config)


@pytest.fixture
def mixed():
    """A model in train mode with dropout, one of its blocks in eval mode."""
    model = tiny.build("gpt2", vocab_size=tiny.WORDS, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5, eos_token_id=1)
    model.train()
    model.transformer.h[1].eval()
    return model


def test_dropout_is_off_while_reading_and_on_again_afterwards(mixed):
    before, weights = _found(mixed), copy.deepcopy(mixed.state_dict())
    got = _everything(mixed)
    assert _found(mixed) == before
    assert all(torch.equal(weights[key], value) for key, value in mixed.state_dict().items())
    expected = _everything(copy.deepcopy(mixed).eval())
    assert torch.equal(got.levels, expected.levels)


def test_the_readout_of_a_model_in_train_mode_reads_in_eval_mode():
    model = tiny.build("gpt2")
    states, wanted = tiny.stream(model, IDS)[2], Readout(model).logits(tiny.stream(model, IDS)[2])
    readout = Readout(model)
    model.train()
    model.transformer.ln_f.eval()
    before = _found(model)
    assert torch.equal(readout.logits(states), wanted)
    assert _found(model) == before


@pytest.mark.parametrize("where", ["first block", "last block", "head"])
@pytest.mark.parametrize("call", ["readout", "stream", "generation", "forced"])
def test_an_error_midway_leaves_the_model_as_found(mixed, where, call):
    part = {"first block": mixed.transformer.h[0], "last block": mixed.transformer.h[-1], "head": mixed.lm_head}[where]

    def fail(module, args, output):
        raise RuntimeError("midway")

    handle = part.register_forward_hook(fail)
    before = _found(mixed)
    calls = {
        "readout": lambda: Readout(mixed),
        "stream": lambda: residual_stream(mixed, IDS),
        "generation": lambda: read(mixed, tiny.tokenizer(), "the cat"),
        "forced": lambda: read(mixed, tiny.tokenizer(), "the cat", answer=" sat"),
    }
    with pytest.raises((RuntimeError, UnsupportedModelError), match="midway"):
        calls[call]()
    assert _found(mixed) == before
    handle.remove()
    _everything(mixed)  # and it still works


def test_a_refused_model_is_left_as_found():
    model = _tampered(Nudged).train()
    before = _found(model)
    with pytest.raises(UnsupportedModelError):
        Readout(model)
    assert _found(model) == before


def test_an_error_in_the_readout_leaves_the_modes(mixed):
    readout = Readout(mixed)
    before = _found(mixed)
    handle = mixed.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        readout.logits(torch.zeros(2, readout.d))
    handle.remove()
    assert _found(mixed) == before


@pytest.mark.parametrize("on", [True, False])
def test_it_works_with_gradients_globally_on_and_off(on):
    expected = _everything(tiny.speaker())
    with torch.set_grad_enabled(on):
        result = _everything(tiny.speaker())
        assert torch.is_grad_enabled() == on
    assert torch.equal(result.credits, expected.credits)
    assert not result.credits.requires_grad
    assert not result.levels.requires_grad
    assert all(parameter.grad is None for parameter in tiny.speaker().parameters())


def test_an_unreadable_stream_names_the_way_out():
    model = tiny.build("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1e5)
    half = tiny.cast(model, torch.float16)
    with pytest.raises(IGLensError, match=r"layer \[2\] is not finite in torch.float16; .*bfloat16 or float32"):
        residual_stream(half, IDS)
    with pytest.raises(IGLensError, match="bfloat16 or float32"):
        read(half, tiny.tokenizer(), IDS[:4].tolist(), answer=[5])
    assert residual_stream(tiny.cast(model, torch.bfloat16), IDS).isfinite().all()


# ---------------------------------------------------------------------------------------------------------------------
# The default model
# ---------------------------------------------------------------------------------------------------------------------


def test_default_model_every_layer_equals_the_model_run_on_that_layers_states(smol):
    model, tokenizer, readout = smol
    ids = torch.tensor(tokenizer.encode("The capital of France is", add_special_tokens=False))
    stream = tiny.stream(model, ids)
    assert torch.equal(residual_stream(model, ids), stream)
    for layer in (0, 1, 7, 15, 23, 28, 29, 30):
        expected = tiny.log_probs(tiny.oracle(model, stream[layer]))
        got = tiny.log_probs(readout.logits(stream[layer]))
        assert torch.allclose(got.exp(), expected.exp(), rtol=0, atol=1e-5)
        assert torch.allclose(got, expected, rtol=0, atol=1e-3)
        targets = expected.argmax(-1)
        assert torch.allclose(readout.prob(stream[layer], targets).double(), expected.amax(-1).exp(), rtol=0, atol=1e-5)
