"""A tiny random model of every type in transformers' causal-LM mapping, and the verdict on reading it.

A config is a table of shrunken fields, filtered by what the config class knows, with a few values of the type's own.
Norm weights and biases are perturbed, caps, scales and multipliers stand away from neutral, and the head is scaled
until the logits spread.
"""

from __future__ import annotations

import dataclasses
from functools import cache

import tiny
import torch
import transformers as hf
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

from iglens_core import Readout, UnsupportedModelError, residual_stream

V, D, N = tiny.V, tiny.D, tiny.N
LIMIT = 10_000_000  # parameters
TOLERANCE = 1e-4  # in log-probability, over the whole vocabulary
DEPTH = ("n_layer", "n_layers", "num_layers", "num_hidden_layers", "decoder_layers", "encoder_layers")
LANGUAGE = ("text_config", "decoder")  # the configs of other modalities' towers get another depth

SHRUNK = (
    dict.fromkeys(["vocab_size", "n_words", "vocab_size_per_layer_input"], V)
    | dict.fromkeys(["hidden_size", "n_embd", "d_model", "emb_dim", "embedding_size", "embedding_dim", "lru_width"], D)
    | dict.fromkeys(DEPTH, N)
    | dict.fromkeys(["intermediate_size", "ffn_dim", "ffn_hidden_size", "dff", "n_inner", "hidden_dim"], 64)
    | dict.fromkeys(["decoder_ffn_dim", "encoder_ffn_dim", "feed_forward_size"], 64)
    | dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads", "mamba_n_heads"], 4)
    | dict.fromkeys(["decoder_attention_heads", "encoder_attention_heads"], 4)
    | dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"], 128)
    | {"max_source_positions": 32, "num_key_value_heads": 2, "head_dim": 8, "attention_head_size": 8, "rotary_dim": 4}
    | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "is_decoder": True, "initializer_range": 0.2}
    | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    | dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4)
    | dict.fromkeys(["n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "num_shared_experts"], 1)
    | {"num_experts_per_tok": 2, "moe_k": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    | {"mamba_d_ssm": 32, "mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_d_head": 8, "mamba_expand": 1}
    | {"mamba_n_groups": 1, "mamba_headdim": 8, "mamba_dt_rank": 4, "state_size": 8, "expand": 2, "time_step_rank": 4}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    | {"linear_head_dim": 8, "linear_num_heads": 4}
    | {"chunk_size": 8, "attention_window_size": 16, "sliding_window": 16, "word_embed_proj_dim": 16}
    | {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 8, "hidden_size_per_layer_input": 8}
    | dict.fromkeys(["final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"], 3.0)
    | {"logit_scale": 0.3, "logits_scaling": 4.0, "lm_head_multiplier": 0.5, "dim_model_base": 8}
    | {"attn_logit_softcapping": 5.0, "residual_multiplier": 0.7, "embedding_multiplier": 3.0, "mup_enabled": True}
    | dict.fromkeys(["attention_multiplier", "key_multiplier", "attention_in_multiplier"], 0.6)
    | dict.fromkeys(["attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"], 0.8)
    # other modalities
    | {"depth": 1, "image_size": 16, "patch_size": 8, "base_channels": 32, "mm_posemb_size": 16}
    | dict.fromkeys(["out_hidden_size", "output_proj_dims", "mm_embed_dim"], D)
    | dict.fromkeys(["adapter_in_dim", "adapter_out_dim", "adapter_input_size"], D)
)

_LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_LATENT = {"num_key_value_heads": 4}  # latent attention has a key for each head
_INDEXER = {"n_heads": 2, "kv_heads": 1, "head_dim": 8, "budget": 8, "compress_ratio": 4}
_QWEN4 = _LINEAR | {"hc_lowrank": 8} | {f"indexer_{key}": value for key, value in _INDEXER.items()}
_SLIDING = {"num_attention_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "head_dim": 16, "qk_nope_head_dim": 8}
_SLIDING |= {"num_key_value_heads": 4, "v_head_dim": 8}
_DOTS3 = _LATENT | {f"swa_{key}": value for key, value in _SLIDING.items()}

# what a type needs beyond the shrunken fields
OWN = {
    "axk1": _LATENT,
    "axk2": _LATENT,
    "bailing_hybrid": _LATENT | {"num_hidden_layers": 4, "layer_group_size": 2},
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        "encoder_config": {"hidden_size_global": D},
        "decoder_config": {"hidden_size_global": D},
        "use_cache": False,
    },
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    },
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 2, "moe_top_k": 1},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
    },
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "dory": {"head_dim": 16, "n_input_layers": 1, "n_output_layers": 1},
    "dots3_note": {"text_config": _DOTS3, "vision_config": {"mlp_layer_types": ["dense"] * 2}},
    "dots3_note_text": _DOTS3,
    "gemma3n_text": {
        "altup_num_inputs": 3,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
    },
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _LATENT,
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "jamba": {"num_experts": 2, "mamba_expand": 2}
    | dict.fromkeys(["attn_layer_period", "expert_layer_period"], 2)
    | dict.fromkeys(["attn_layer_offset", "expert_layer_offset"], 1),
    "kimi_linear": _LINEAR | _LATENT,
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "longcat_flash": _LATENT
    | {"num_layers": 2, "expert_ffn_hidden_size": 16, "ffn_hidden_size": 32, "zero_expert_num": 2, "moe_topk": 2},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "minicpm3": _LATENT,
    "qwen3_5": {"text_config": _LINEAR},
    "qwen3_5_moe": {"text_config": _LINEAR},
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_next": _LINEAR,
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local"] * N, "local_attn_chunk_length": 4},
    "roc_bert": {
        "pronunciation_vocab_size": 50,
        "shape_vocab_size": 50,
        "pronunciation_embed_dim": 8,
        "shape_embed_dim": 8,
    },
    "sarvam_mla": _LATENT,
    "xlstm": {"qk_dim_factor": 1.0, "hidden_size": 64, "embedding_dim": 64},  # heads are rounded up to that
    "xmod": {"default_language": "en_XX"},
    "youtu": _LATENT,
    "zamba": {"layers_block_type": ["hybrid", "linear_attention", "hybrid"]},
    "zamba2": {
        "layer_types": ["mamba", "hybrid", "mamba"],
        "mamba_expand": 2,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "num_mem_blocks": 1,
        "hybrid_layer_ids": [1],
    },
    "zaya": {"num_experts_per_tok": 1},
}

NOT_BUILT = {"gemma3n": "its vision tower needs timm; gemma3n_text is its language model"}

# not one residual stream that runs once through the blocks on a text's ids: outside the share that must be faithful
APART = {
    "blt": "bytes, patches of bytes and bytes again, each with blocks of its own",
    "deepseek_v4": "several streams (hyper-connections)",
    "dory": "runs some of its blocks several times",
    "gemma3n_text": "several streams",
    "gemma4_assistant": "a draft model: takes another model's states and keys",
    "gemma4_unified_assistant": "a draft model: takes another model's states and keys",
    "hrm_text": "runs its blocks in nested loops",
    "hy_v4": "several streams (hyper-connections)",
    "inkling2_loop_text": "its last state attends to those of earlier blocks; runs blocks several times",
    "inkling2_text": "its last state attends to those of earlier blocks",
    "musicgen": "four codebooks of audio at every position",
    "musicgen_melody": "four codebooks of audio at every position",
    "prophetnet": "a stream for each predicted n-gram beside the main one",
    "reformer": "two streams (reversible blocks)",
}

RUNS_NOT_ON_IDS = {"gemma4_assistant", "gemma4_unified_assistant", "musicgen", "musicgen_melody"}
INNER = {"musicgen": "decoder", "musicgen_melody": "decoder"}  # the part of the config that the model's class takes


def _fields(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def _merge(options: dict, own: dict) -> dict:
    return options | {k: _merge(options[k], v) if isinstance(options.get(k), dict) else v for k, v in own.items()}


def _options(kind: type, depth: int = N) -> dict:
    """The shrunken fields that a config class knows, and the same for the configs inside it."""
    options = {key: depth if key in DEPTH else value for key, value in SHRUNK.items() if key in _fields(kind)}
    for key, inner in kind.sub_configs.items():
        model_type = getattr(getattr(kind, "sub_configs_defaults", {}).get(key), "model_type", None)
        if inner is not AutoConfig:
            options[key] = _options(inner, N if key in LANGUAGE else 2)
        elif model_type is not None:
            inner = CONFIG_MAPPING[model_type]
            options[key] = {"model_type": model_type} | _options(inner, N if key in LANGUAGE else 2)
    return options


def config(name: str):
    kind = CONFIG_MAPPING[name]
    kind = kind.sub_configs[INNER[name]] if name in INNER else kind
    return kind(**_merge(_options(kind), OWN.get(name, {})))


def _make(name: str, **options) -> nn.Module:
    kind = getattr(hf, CLASSES[name])._from_config if name in INNER else hf.AutoModelForCausalLM.from_config
    return kind(config(name), **options)


def build(name: str) -> nn.Module:
    """A tiny model of a type, float32, eval mode, eager attention, on the CPU; the same at every call."""
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in _make(name).parameters())
    assert count <= LIMIT, f"{name} has {count:,} parameters"
    torch.manual_seed(0)
    model = _make(name, attn_implementation="eager").float().eval()
    tied = is_tied(model)
    tiny.randomise(model)
    if name not in RUNS_NOT_ON_IDS:
        tiny.widen(model)
    assert is_tied(model) == tied, f"{name}: scaling the head broke its tie"
    return model


def is_tied(model: nn.Module) -> bool:
    return getattr(model.get_output_embeddings(), "weight", None) is getattr(model.get_input_embeddings(), "weight", 0)


@dataclasses.dataclass(frozen=True)
class Finding:
    verdict: str  # "faithful", "refused", "not built" or "wrong"
    kind: str  # the model's class
    blocks: int | None = None
    error: float | None = None  # largest, in log-probability, over layers, positions and vocabulary
    reason: str = ""


@cache
@torch.no_grad()
def examine(name: str) -> Finding:
    """Build a model of a type and read every layer. Only UnsupportedModelError from the Readout is a refusal."""
    kind = CLASSES[name]
    if name in NOT_BUILT:
        return Finding("not built", kind, reason=NOT_BUILT[name])
    model, ids = build(name), tiny.IDS
    try:
        readout = Readout(model)
    except UnsupportedModelError as error:
        return Finding("refused", kind, reason=str(error))
    except Exception as error:
        return Finding("wrong", kind, reason=f"{type(error).__name__}: {error}")
    stream = tiny.stream(model, ids)
    if not torch.equal(residual_stream(model, ids), stream):
        return Finding("wrong", kind, len(stream) - 1, reason="residual_stream gives other states than the blocks")
    wanted = [tiny.oracle(model, states, ids) for states in stream] + [model(input_ids=ids[None]).logits[0]]
    gaps = []
    for states, expected in zip((*stream, stream[-1]), map(tiny.log_probs, wanted), strict=True):
        every = torch.arange(expected.shape[1])
        one_by_one = readout.log_prob(states.repeat_interleave(len(every), 0), every.repeat(len(states)))
        for got in (tiny.log_probs(readout.logits(states)), one_by_one.view_as(expected)):
            gaps.append((got - expected).abs().max())
    error = float(torch.stack(gaps).max())  # NaN is not below the tolerance
    return Finding("faithful" if error <= TOLERANCE else "wrong", kind, len(stream) - 1, error)
