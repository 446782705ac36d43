"""Models as they come from other libraries: adapters, offloading, compilation, switches, sharing, half precision."""

import copy
import warnings

import families
import pytest
import tiny
import torch
import transformers as hf
from accelerate import cpu_offload, disk_offload, dispatch_model
from tiny import IDS

from iglens_core import Readout, UnsupportedModelError, explain, residual_stream


def assert_faithful(model, inner=None, ids=IDS, tolerance=1e-4):
    """At every layer the readout agrees with the model run on that layer's states, and with its own logits.

    inner: where the tests' own hooks find the blocks, if not in the model itself.
    """
    inner = model if inner is None else inner
    before = tiny.hooks(model)
    readout, got = Readout(model), residual_stream(model, ids)
    assert tiny.hooks(model) == before
    with torch.no_grad():
        stream, own = tiny.stream(inner, ids), model(input_ids=ids[None])
        own = own[0] if isinstance(own, tuple) else own.logits
        pairs = [(states, tiny.oracle(inner, states, ids)) for states in stream] + [(stream[-1], own[0])]
        assert torch.equal(got, stream)
        for states, expected in pairs:
            gap = tiny.log_probs(readout.logits(states)) - tiny.log_probs(expected)
            assert gap.abs().max() <= tolerance
            targets = expected.argmax(-1)
            gap = readout.log_prob(states, targets) - tiny.log_probs(expected).gather(1, targets[:, None])[:, 0]
            assert gap.abs().max() <= tolerance
    return readout


# ---------------------------------------------------------------------------------------------------------------------
# Adapters
# ---------------------------------------------------------------------------------------------------------------------


def adapted(model, *targets, **options):
    """The model with LoRA of rank 4 on the named modules, the matrices that start at zero away from it."""
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tied targets
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), task_type="CAUSAL_LM", **options)
        wrapped = peft.get_peft_model(model, config).eval()
    torch.manual_seed(1)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return wrapped


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", ["q_proj", "v_proj"]),
        ("llama", ["lm_head"]),
        ("llama", ["q_proj", "down_proj", "lm_head"]),
        ("llama_tied", ["o_proj"]),
        ("llama_tied", ["lm_head"]),
        ("llama", ["embed_tokens"]),
        ("gpt2", ["c_attn"]),
        ("gemma2", ["up_proj", "lm_head"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_lora_adapters_are_read_with_the_model(family, targets):
    wrapped = adapted(tiny.build(family), *targets)
    with torch.no_grad(), wrapped.disable_adapter():
        plain = wrapped(input_ids=IDS[None]).logits
    with torch.no_grad():
        assert (wrapped(input_ids=IDS[None]).logits - plain).abs().max() > 0.5  # the adapter counts
    assert_faithful(wrapped, wrapped.get_base_model())
    assert_faithful(wrapped.get_base_model())


def test_a_head_kept_for_full_training_is_read():
    wrapped = adapted(tiny.build("llama"), "q_proj", modules_to_save=["lm_head"])
    with torch.no_grad():
        wrapped.get_base_model().lm_head.modules_to_save["default"].weight.mul_(-0.7)
    assert_faithful(wrapped, wrapped.get_base_model())


def test_a_disabled_adapter_is_left_out():
    plain = tiny.shared("llama")
    wrapped = adapted(copy.deepcopy(plain), "q_proj", "lm_head")
    states = tiny.stream(plain, IDS)[1]
    with wrapped.disable_adapter():
        readout = Readout(wrapped)
        assert torch.allclose(readout.logits(states), Readout(plain).logits(states), rtol=0, atol=1e-5)
        assert torch.allclose(residual_stream(wrapped, IDS), residual_stream(plain, IDS), rtol=0, atol=1e-5)


def test_an_adapted_model_explains_an_answer():
    wrapped = adapted(copy.deepcopy(tiny.speaker()), "q_proj", "lm_head")
    result = explain(wrapped, tiny.tokenizer(), "the cat", answer=" sat on").check()
    merged = explain(copy.deepcopy(wrapped).merge_and_unload(), tiny.tokenizer(), "the cat", answer=" sat on")
    assert torch.allclose(result.levels, merged.levels, rtol=0, atol=1e-5)
    explain(wrapped, tiny.tokenizer(), "the cat", max_new_tokens=2).check()


def test_virtual_prompt_tokens_are_refused():
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(UnsupportedModelError, match=r"PeftModelForCausalLM: expected one stream \[1, 8, d\]"):
        Readout(peft.get_peft_model(tiny.build("llama"), config))


# ---------------------------------------------------------------------------------------------------------------------
# Offloading
# ---------------------------------------------------------------------------------------------------------------------


def _on_disk(model, folder):
    return disk_offload(model, str(folder), execution_device=torch.device("cpu"))


def _in_memory(model, folder):
    return cpu_offload(model, execution_device=torch.device("cpu"))


def _in_parts(model, folder):
    """Embeddings and first block in place; other blocks and norm on disk; the head wherever it is tied to."""
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    places |= {"model.layers.2": "disk", "model.norm": "disk"}
    places["lm_head"] = "cpu" if families.is_tied(model) else "disk"
    return dispatch_model(model, places, main_device="cpu", offload_dir=str(folder))


def _loaded(model, folder):
    """Saved, and loaded with every block but the first on disk."""
    model.save_pretrained(folder / "model")
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    places |= {"model.layers.2": "disk", "model.norm": "cpu"}
    places["lm_head"] = "cpu" if families.is_tied(model) else "disk"
    kind = hf.AutoModelForCausalLM
    return kind.from_pretrained(
        folder / "model", device_map=places, offload_folder=folder / "disk", attn_implementation="eager"
    ).eval()


OFFLOADED = {"disk": _on_disk, "memory": _in_memory, "parts": _in_parts, "device_map": _loaded}


@pytest.mark.parametrize("how", OFFLOADED)
@pytest.mark.parametrize("family", ["llama", "llama_tied"])
def test_offloaded_models_are_read_as_those_in_memory(how, family, tmp_path):
    plain = tiny.shared(family)
    offloaded = OFFLOADED[how](tiny.build(family), tmp_path)
    assert any(parameter.is_meta for parameter in offloaded.parameters())
    if family == "llama" or how in ("disk", "memory"):
        assert offloaded.lm_head.weight.is_meta
    places = {name: parameter.device for name, parameter in offloaded.named_parameters()}
    readout = assert_faithful(offloaded)
    for states in tiny.stream(plain, IDS):
        assert torch.allclose(readout.logits(states), Readout(plain).logits(states), rtol=0, atol=1e-5)
    assert torch.allclose(residual_stream(offloaded, IDS), tiny.stream(plain, IDS), rtol=0, atol=1e-6)
    assert {name: parameter.device for name, parameter in offloaded.named_parameters()} == places


@pytest.mark.parametrize("how", OFFLOADED)
def test_offloaded_models_explain_an_answer(how, tmp_path):
    offloaded = OFFLOADED[how](copy.deepcopy(tiny.speaker()), tmp_path)
    for options in ({"answer": " sat on"}, {"max_new_tokens": 2}):
        result = explain(offloaded, tiny.tokenizer(), "the cat", **options).check()
        expected = explain(tiny.speaker(), tiny.tokenizer(), "the cat", **options)
        assert torch.allclose(result.levels, expected.levels, rtol=0, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Heads, vocabularies, names, sharing
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "llama_tied", "gpt2", "gemma2"])
def test_reading_leaves_heads_tied_or_untied_and_unchanged(family):
    model = tiny.build(family)
    tied, weights = families.is_tied(model), copy.deepcopy(model.state_dict())
    assert tied == (family in ("llama_tied", "gpt2"))
    assert_faithful(model)
    assert families.is_tied(model) == tied
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("family", ["llama", "llama_tied", "gpt2", "gemma2", "phi"])
def test_padded_vocabularies_are_read_over_every_row(family):
    model = tiny.build(family)
    model.resize_token_embeddings(tiny.V + 5, pad_to_multiple_of=64, mean_resizing=False)
    readout = assert_faithful(model)
    assert readout.V == 128
    states = tiny.stream(model, IDS)[1]
    assert torch.allclose(readout.prob(states[:1].expand(128, -1), torch.arange(128)).sum(), torch.tensor(1.0))


class Renamed(hf.models.llama.modeling_llama.LlamaModel):
    """Its final norm is registered as `closing`."""

    norm = property(lambda self: self._modules["closing"])


def test_a_final_norm_by_another_name_is_found():
    model, plain = tiny.build("llama"), tiny.shared("llama")
    model.model.closing = model.model._modules.pop("norm")
    model.model.__class__ = Renamed
    assert "model.norm" not in dict(model.named_modules())
    readout = assert_faithful(model)
    states = tiny.stream(plain, IDS)[2]
    assert torch.equal(readout.logits(states), Readout(plain).logits(states))


def test_a_block_that_stands_at_several_layers_is_refused():
    model = tiny.build("llama")
    model.model.layers[2] = model.model.layers[0]
    for call in (Readout, lambda model: residual_stream(model, IDS)):
        with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM: the same block stands at several layers"):
            call(model)


def test_blocks_that_share_their_weights_are_read():
    model = tiny.build("llama")
    model.model.layers[2].mlp = model.model.layers[0].mlp
    assert_faithful(model)


# ---------------------------------------------------------------------------------------------------------------------
# Compilation, checkpointing, switches
# ---------------------------------------------------------------------------------------------------------------------


def _wrapped(model):
    return torch.compile(model, backend="eager")


def _in_place(model):
    model.compile(backend="eager")
    return model


def _forward(model):
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def _blockwise(model):
    for block in model.model.layers:
        block.compile(backend="eager")
    return model


def _readout_or_reason(model) -> Readout | str:
    try:
        return Readout(model)
    except UnsupportedModelError as error:
        return str(error)


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("compiled", [_wrapped, _in_place, _forward, _blockwise], ids=lambda f: f.__name__.strip("_"))
def test_compiled_models_are_read_or_refused_and_stay_as_they_were(compiled, warm):
    torch._dynamo.reset()
    plain = tiny.shared("llama", num_hidden_layers=2)
    model = compiled(tiny.build("llama", num_hidden_layers=2))
    with torch.no_grad():
        own = plain(input_ids=IDS[None]).logits
        if warm:
            assert torch.allclose(model(input_ids=IDS[None]).logits, own, rtol=0, atol=1e-5)
    readout = _readout_or_reason(model)
    if isinstance(readout, str):
        assert "every block to run once, in order; they ran as []" in readout or "fails on 8 ids" in readout
    else:
        for states in tiny.stream(plain, IDS):
            expected = tiny.log_probs(tiny.oracle(plain, states))
            assert torch.allclose(tiny.log_probs(readout.logits(states)), expected, rtol=0, atol=1e-4)
        assert torch.allclose(residual_stream(model, IDS), tiny.stream(plain, IDS), rtol=0, atol=1e-5)
    with torch.no_grad():
        assert torch.allclose(model(input_ids=IDS[None]).logits, own, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_gradient_checkpointing_in_train_mode_changes_nothing(family):
    model = tiny.build(family)
    model.activation_checkpointing_enable()
    model.train()
    got, readout = residual_stream(model, IDS), Readout(model)
    assert model.training and model.is_activation_checkpointing
    plain = tiny.shared(family)
    assert torch.equal(got, tiny.stream(plain, IDS))
    for states in got:
        expected = tiny.log_probs(tiny.oracle(plain, states))
        assert torch.allclose(tiny.log_probs(readout.logits(states)), expected, rtol=0, atol=1e-4)


SWITCHES = {
    "output_hidden_states": {"output_hidden_states": True},
    "output_attentions": {"output_attentions": True},
    "use_cache": {"use_cache": True},
    "no use_cache": {"use_cache": False},
    "all": {"output_hidden_states": True, "output_attentions": True, "use_cache": True},
}


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "gemma2", "opt_350m", "falcon_h1"])
def test_switches_in_the_config_change_nothing(family, switch):
    plain = tiny.shared(family)
    model = copy.deepcopy(plain)
    for key, value in SWITCHES[switch].items():
        setattr(model.config, key, value)
    readout = Readout(model)
    assert torch.equal(residual_stream(model, IDS), tiny.stream(plain, IDS))
    for states in tiny.stream(plain, IDS):
        assert torch.equal(readout.logits(states), Readout(plain).logits(states))
    assert all(getattr(model.config, key) == value for key, value in SWITCHES[switch].items())


@pytest.mark.parametrize("family", ["bloom", "mpt", "llama"])
def test_models_that_return_tuples_are_read_where_they_can_run_so(family):
    plain = tiny.shared(family)
    model = copy.deepcopy(plain)
    model.config.return_dict = False
    if family == "llama":  # not even transformers runs it
        with pytest.raises(AttributeError, match="'tuple' object has no attribute"):
            model(input_ids=IDS[None])
        with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM fails on 8 ids"):
            Readout(model)
        return
    assert isinstance(model(input_ids=IDS[None]), tuple)
    readout = Readout(model)
    for states in residual_stream(model, IDS):
        assert torch.equal(readout.logits(states), Readout(plain).logits(states))


# ---------------------------------------------------------------------------------------------------------------------
# Padding
# ---------------------------------------------------------------------------------------------------------------------

PADDED = [
    "mamba",
    "mamba2",
    "falcon_mamba",
    "rwkv",
    "recurrent_gemma",
    "jamba",
    "bamba",
    "zamba2",
    "falcon_h1",
    "qwen3_next",
    "lfm2",
    "xlstm",
    "gpt2",
    "llama",
    "bloom",
    "opt",
    "xglm",
    "biogpt",
    "bart",
    "roberta",
]


@pytest.mark.parametrize("name", PADDED)
def test_rows_of_a_padded_batch_have_the_states_of_the_text_alone(name):
    model = families.build(name)
    alone = tiny.stream(model, IDS)
    pad, seen = torch.zeros(3, dtype=torch.long), torch.ones(len(IDS), dtype=torch.long)
    for left, right in ((3, 0), (0, 3), (2, 3)):
        ids, mask = (torch.cat([pad[:left], middle, pad[:right]]) for middle in (IDS, seen))
        got = residual_stream(model, ids, mask)
        assert got.shape == (len(alone), len(ids), alone.shape[-1])
        assert torch.allclose(got[:, mask.bool()], alone, rtol=1e-5, atol=1e-5)
        assert got[:, ~mask.bool()].isnan().all()


# ---------------------------------------------------------------------------------------------------------------------
# Half precision
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.15), (torch.float16, 2e-2)])
@pytest.mark.parametrize("in_fp32", [True, False])
@pytest.mark.parametrize("name", ["mamba", "mamba2", "falcon_mamba"])
def test_half_precision_with_a_float32_residual_stream_is_read(name, in_fp32, dtype, tolerance):
    model = families.build(name)
    model.config.residual_in_fp32 = in_fp32
    for block in model.backbone.layers:
        block.residual_in_fp32 = in_fp32
    model = model.to(dtype)
    dtypes = {states.dtype for states in tiny.stream(model, IDS)[1:]}
    assert dtypes == {torch.float32 if in_fp32 else dtype}
    assert_faithful(model, tolerance=tolerance)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "rwkv", "jamba", "zaya", "gemma3_text", "falcon_h1"])
def test_other_half_precision_models_are_read(name):
    assert_faithful(families.build(name).to(torch.bfloat16), tolerance=0.15)
