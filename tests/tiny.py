"""Tiny random models of many families, a byte-level tokenizer, and an oracle that shares no code with the core.

Every norm weight and bias is perturbed, so that a norm applied twice or a bias left out shows; the heads are scaled
until the logits spread, so that a soft cap shows.
"""

from __future__ import annotations

import copy
import inspect
from functools import cache

import torch
import transformers as hf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers.convert_slow_tokenizer import bytes_to_unicode

V, D, N = 96, 32, 3  # vocabulary, width, blocks
IDS = torch.tensor([5, 17, 3, 88, 42, 17, 9, 60])
SPREAD = 3.5  # standard deviation that the logits get
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # what configs call a cap of the logits

_LLAMA = {
    "vocab_size": V, "hidden_size": D, "intermediate_size": 64, "num_hidden_layers": N, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_GPT = {
    "vocab_size": V,
    "n_embd": D,
    "n_layer": N,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OPT = {
    "vocab_size": V, "hidden_size": D, "word_embed_proj_dim": 16, "do_layer_norm_before": False, "ffn_dim": 64,
    "num_hidden_layers": N, "num_attention_heads": 4, "max_position_embeddings": 256, "dropout": 0.0,
}  # fmt: skip
_MINICPM = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "dim_model_base": 8, "tie_word_embeddings": False,
}  # fmt: skip
_MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_chunk_size": 8, "lm_head_multiplier": 0.5}
_BLOOM = {"vocab_size": V, "hidden_size": D, "n_layer": N, "n_head": 4}
_NEO = {
    "vocab_size": V, "hidden_size": D, "num_layers": N, "num_heads": 4, "max_position_embeddings": 256,
    "attention_types": [[["global", "local", "global"], 1]],
}  # fmt: skip

# name: (configuration, its options, where the blocks are, where the final norm is)
FAMILIES = {
    "llama": (hf.LlamaConfig, _LLAMA | {"tie_word_embeddings": False}, "model.layers", "model.norm"),
    "llama_tied": (hf.LlamaConfig, _LLAMA | {"tie_word_embeddings": True}, "model.layers", "model.norm"),
    "gpt2": (hf.GPT2Config, _GPT, "transformer.h", "transformer.ln_f"),
    "qwen2": (hf.Qwen2Config, _LLAMA, "model.layers", "model.norm"),
    "opt_350m": (hf.OPTConfig, _OPT, "model.decoder.layers", None),
    "gemma2": (
        hf.Gemma2Config,
        _LLAMA | {"head_dim": 8, "final_logit_softcapping": 3.0, "tie_word_embeddings": False},
        "model.layers",
        "model.norm",
    ),
    "phi": (hf.PhiConfig, _LLAMA | {"num_key_value_heads": 4}, "model.layers", "model.final_layernorm"),
    "gptj": (
        hf.GPTJConfig,
        _GPT | {"rotary_dim": 4, "tie_word_embeddings": False},
        "transformer.h",
        "transformer.ln_f",
    ),
    "cohere": (hf.CohereConfig, _LLAMA | {"logit_scale": 0.0625}, "model.layers", "model.norm"),
    "granite": (hf.GraniteConfig, _LLAMA | {"logits_scaling": 8.0}, "model.layers", "model.norm"),
    "minicpm3": (hf.MiniCPM3Config, _LLAMA | _MINICPM, "model.layers", "model.norm"),
    "falcon_h1": (hf.FalconH1Config, _LLAMA | _MAMBA, "model.layers", "model.final_layernorm"),
    "hyperclovax": (hf.HyperCLOVAXConfig, _LLAMA | {"logits_scaling": 0.125}, "model.layers", "model.norm"),
    "bloom": (hf.BloomConfig, _BLOOM, "transformer.h", "transformer.ln_f"),
    "mpt": (
        hf.MptConfig,
        {"vocab_size": V, "d_model": D, "n_layers": N, "n_heads": 4},
        "transformer.blocks",
        "transformer.norm_f",
    ),
    "gpt_neo": (hf.GPTNeoConfig, _NEO, "transformer.h", "transformer.ln_f"),
}


def build(name: str, seed: int = 0, perturb: bool = True, **options) -> nn.Module:
    """A fresh model of a family, float32, eval mode. perturb=False leaves norm weights and biases as they start."""
    config_class, given, *_ = FAMILIES[name]
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(config_class(**(given | options)), attn_implementation="eager")
    model = model.float().eval()
    randomise(model, perturb)
    widen(model)
    return model


@torch.no_grad()
def randomise(model: nn.Module, perturb: bool = True) -> None:
    """Weights large enough that every block counts; norm weights and biases away from where they start."""
    for parameter in dict.fromkeys(model.parameters()):
        if parameter.ndim > 1:
            parameter.normal_(std=0.25)
        elif perturb:
            parameter.add_(torch.randn_like(parameter) * 0.5)


@torch.no_grad()
def widen(model: nn.Module) -> None:
    """Scale the head in place (and the embeddings with it, where they are tied) until the logits spread."""
    head = model.get_output_embeddings()
    for _ in range(30):
        spread = logit_spread(model)
        if spread >= SPREAD:
            return
        head.weight.mul_(min(4.0, 1.1 * SPREAD / spread))
    raise AssertionError(f"the logits of {type(model).__name__} spread by {spread:.2f} only")


@torch.no_grad()
def logit_spread(model: nn.Module) -> float:
    """Standard deviation of the logits, of those before the soft cap where there is one."""
    raw = []
    handle = model.get_output_embeddings().register_forward_hook(lambda module, args, output: raw.append(output))
    logits = model(input_ids=IDS[None]).logits
    handle.remove()
    text = model.config.get_text_config()
    return float((raw[-1] if any(getattr(text, cap, None) for cap in CAPS) else logits).std())


@cache
def shared(name: str, **options) -> nn.Module:
    """One model of a family for all tests that leave it as it is."""
    return build(name, **options)


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    return copy.deepcopy(model).to(dtype)


# ---------------------------------------------------------------------------------------------------------------------
# The oracle: the model itself, run on states of our choice
# ---------------------------------------------------------------------------------------------------------------------


def blocks(model: nn.Module) -> nn.ModuleList:
    """The blocks: where the table says, else the list of as many modules that holds the most parameters."""
    kinds = {config_class: path for config_class, _, path, _ in FAMILIES.values()}
    if type(model.config) in kinds:
        return model.get_submodule(kinds[type(model.config)])
    n = model.config.get_text_config().num_hidden_layers
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == n]
    return max(lists, key=lambda module: sum(parameter.numel() for parameter in module.parameters()))


def final_norm(model: nn.Module) -> nn.Module:
    kinds = {config_class: path for config_class, _, _, path in FAMILIES.values()}
    return model.get_submodule(kinds[type(model.config)])


def _states(output) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def stream(model: nn.Module, ids: Tensor, **kwargs) -> Tensor:
    """[n + 1, S, d]: the first block's input and every block's output."""
    kept, layers = {}, blocks(model)

    def entry(module, args, kwargs):
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        kept[0] = given.get("hidden_states", next(iter(given.values()))).clone()

    handles = [layers[0].register_forward_pre_hook(entry, with_kwargs=True)]
    for layer, block in enumerate(layers, 1):
        keep = lambda module, args, output, layer=layer: kept.update({layer: _states(output).clone()})  # noqa: E731
        handles.append(block.register_forward_hook(keep))
    with torch.no_grad():
        model(input_ids=ids[None], **kwargs)
    for handle in handles:
        handle.remove()
    return torch.cat([kept[layer] for layer in range(len(layers) + 1)])


def oracle(model: nn.Module, states: Tensor, ids: Tensor | None = None) -> Tensor:
    """[S, V] logits of the model when the last block gives `states` [S, d], whatever the ids."""
    ids = torch.ones(len(states), dtype=torch.long) if ids is None else ids

    def swap(module, args, output):
        return states[None] if isinstance(output, Tensor) else (states[None], *output[1:])

    handle = blocks(model)[-1].register_forward_hook(swap)
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0]
    handle.remove()
    return logits


def log_probs(logits: Tensor) -> Tensor:
    return logits.double().log_softmax(-1)


def levels(model: nn.Module, ids: Tensor, position: int, target: int) -> Tensor:
    """[n + 1], the oracle's probability of `target` at `position`, for the states of every layer."""
    return torch.stack([log_probs(oracle(model, states))[position, target].exp() for states in stream(model, ids)])


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers
# ---------------------------------------------------------------------------------------------------------------------

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
_MERGES = [
    "t h",
    "th e",
    "Ġ the",
    "c a",
    "ca t",
    "Ġ cat",
    "Ġ s",
    "Ġs a",
    "Ġsa t",
    "Ġ o",
    "Ġo n",
    "Ġ m",
    "Ġm a",
    "Ġma t",
]
_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
WORDS = 256 + 3 + len(_MERGES)  # entries of the tokenizer


@cache
def tokenizer(bos: bool = False, chat: bool = False, eos: bool = False) -> hf.PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges. bos, eos: a post-processor adds them. chat: a template, which writes BOS."""
    pieces = [BOS, EOS, PAD, *bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in _MERGES)]
    merges = [tuple(merge.split(" ")) for merge in _MERGES]
    made = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(piece, special=True) for piece in (BOS, EOS, PAD)])
    if bos or eos:
        single = f"{BOS if bos else ''} $A {EOS if eos else ''}".strip()
        made.post_processor = processors.TemplateProcessing(single=single, special_tokens=[(BOS, 0), (EOS, 1)])
    wrapped = hf.PreTrainedTokenizerFast(tokenizer_object=made, bos_token=BOS, eos_token=EOS, pad_token=PAD)
    if chat:
        wrapped.chat_template = "{{ bos_token }}" + _TEMPLATE
    return wrapped


@cache
def spaced() -> hf.PreTrainedTokenizerFast:
    """SentencePiece's kind: a space belongs to the piece, the first one is dropped, unknown characters become bytes."""
    pieces = [
        "<unk>",
        BOS,
        EOS,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        *"acst",
        "at",
        "cat",
        "\u2581cat",
    ]
    merges = [("a", "t"), ("c", "at"), ("\u2581", "cat")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    strip = decoders.Strip(" ", 1, 0)
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    made.add_special_tokens([AddedToken(piece, special=True) for piece in (BOS, EOS)])
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, bos_token=BOS, eos_token=EOS)


@cache
def speaker() -> nn.Module:
    """A tiny Llama whose head has a row for every entry of the tokenizer."""
    return build("llama", vocab_size=WORDS, bos_token_id=0, eos_token_id=1, pad_token_id=2)
