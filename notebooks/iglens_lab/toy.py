"""Models whose answer is known beforehand: planted in a random Llama, or learned as a known algorithm.

A planted model is a `LlamaForCausalLM` with random weights in which a few directions of the residual stream are kept
free: no embedding has them and no block writes them, until one block is edited to do so. The edit is of rank one and
found from the random model's own activations, as in ROME (Meng et al. 2022, arXiv 2202.05262). Shapes as in
iglens_core: n blocks, d width, V head rows, k segments of a path, T tokens.

    python -m iglens_lab.toy        trains the induction model anew and writes data/induction.safetensors
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from iglens_core import (
    Attribution,
    IGLensError,
    Readout,
    attribute,
    explain,
    path_credits,
    read,
    residual_path,
    residual_stream,
    save_tensors,
)
from iglens_lab.ablation import block, skipped

ALPHABET = string.ascii_lowercase + string.ascii_uppercase + string.digits + "?!"  # V = 64 tokens, one a character
PROMPT, ANSWER, RIVAL, SOURCE = "who?", "Y", "N", "w"
INDUCTION = Path(__file__).resolve().parents[2] / "data" / "induction.safetensors"
D, LANGUAGE, FREE = 48, 24, 3  # width; directions that the other tokens' head rows share; directions kept free
TOP = 120.0  # the largest logit that the answer or the rival can have


def tokenizer(V: int = len(ALPHABET)) -> PreTrainedTokenizerFast:
    """One token a character: the first V of the alphabet."""
    if type(V) is not int or not 1 <= V <= len(ALPHABET):
        raise IGLensError(f"V: expected a whole number of 1 … {len(ALPHABET)}, got {V!r}")
    made = Tokenizer(models.WordLevel({character: i for i, character in enumerate(ALPHABET[:V])}))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def ids(text: str) -> Tensor:
    """[S], the ids of a text of the alphabet."""
    if not isinstance(text, str) or not text or set(text) - set(ALPHABET):
        raise IGLensError(f"expected a text of the characters {ALPHABET}, got {text!r}")
    return torch.tensor([ALPHABET.index(character) for character in text])


# ---------------------------------------------------------------------------------------------------------------------
# Planted models
# ---------------------------------------------------------------------------------------------------------------------


def llama(V: int, d: int, blocks: int, seed: int, **options) -> LlamaForCausalLM:
    """Random, float32, eval mode; every norm's weights are perturbed: equal ones would hide a norm applied twice."""
    config = LlamaConfig(
        vocab_size=V, hidden_size=d, num_hidden_layers=blocks, max_position_embeddings=128, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, attn_implementation="eager",
        **({"intermediate_size": 2 * d, "num_attention_heads": 4, "num_key_value_heads": 4} | options),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise / d**0.5 if parameter.ndim > 1 else torch.exp(0.3 * noise))
    return model


def _free(d: int, seed: int) -> Tensor:
    """An orthonormal basis [d, d] of the residual stream: its first rows are the directions that stay free."""
    return torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(seed + 1)))[0].T


@torch.no_grad()
def walking(path: Tensor, rows: Tensor, norm: bool = False) -> LlamaForCausalLM:
    """A float64 Llama whose residual stream walks the path: path [n + 1, d], d even; head rows [V, d].

    It does so at the last position of a prompt of the first token, "a". norm: keep the final RMSNorm (weights 1, ε
    1e-2); without it the head reads the state itself. Raises IGLensError where a state but the last is zero.
    """
    if path.ndim != 2 or path.shape[1] % 2 or rows.shape[1:] != path.shape[1:] or not path.is_floating_point():
        shapes = f"{list(path.shape)} and {list(rows.shape)}"
        raise IGLensError(f"expected a path [n + 1, d] and rows [V, d] of floats, d even, got {shapes}")
    if not path[:-1].any(1).all():
        raise IGLensError("path: expected non-zero states before the last: a block computes nothing from zeros")
    d = path.shape[1]
    shape = {"intermediate_size": 2 * d, "num_attention_heads": 1, "num_key_value_heads": 1, "rms_norm_eps": 1e-2}
    model = llama(len(rows), d, len(path) - 1, seed=0, **shape).double()
    model.model.norm.weight.fill_(1)
    if not norm:
        model.model.norm = nn.Identity()
    model.lm_head.weight.copy_(rows)
    model.model.embed_tokens.weight[:] = path[0]
    for layer, each in enumerate(model.model.layers, 1):
        stream, active = _seen(each.mlp.down_proj, model, ids("a"))
        each.mlp.down_proj.weight += torch.outer(path[layer] - stream[layer], active) / (active @ active)
    return model


@torch.no_grad()
def random_model(blocks: int = 6, seed: int = 0, quiet: bool = False, silent: Iterable[int] = ()) -> LlamaForCausalLM:
    """A random Llama in which no block writes the answer's, the rival's or the mark's direction.

    quiet: the blocks do not write the other tokens' directions either, so that those have logits of exactly 0. silent:
    blocks that write nothing, the identity.
    """
    if type(blocks) is not int or blocks < 1:
        raise IGLensError(f"blocks: expected a whole number, at least 1, got {blocks!r}")
    model, basis = llama(len(ALPHABET), D, blocks, seed), _free(D, seed)
    written = basis[FREE + LANGUAGE :] if quiet else basis[FREE:]
    onto = written.T @ written  # [d, d], projects onto what may be written
    model.model.embed_tokens.weight.copy_(2 * model.model.embed_tokens.weight * D**0.5 @ onto)
    for each in model.model.layers:
        for linear in (each.self_attn.o_proj, each.mlp.down_proj):
            linear.weight.copy_(2 * onto @ linear.weight)
    for layer in silent:
        for linear in (block(model, layer).self_attn.o_proj, block(model, layer).mlp.down_proj):
            linear.weight.zero_()
    spoken = basis[FREE : FREE + LANGUAGE]
    rows = model.lm_head.weight @ spoken.T @ spoken
    for direction, token in enumerate((ANSWER, RIVAL)):
        rows[ALPHABET.index(token)] = basis[direction] * TOP / D**0.5
    model.lm_head.weight.copy_(rows / model.model.norm.weight)  # read through the norm, they are the rows
    return model


def _step(model: LlamaForCausalLM, h: Tensor, token: str, logit: float) -> Tensor:
    """[d], what has to be added to the state h [d] along the token's direction so that its logit becomes this one."""
    one = ids(token)
    if len(one) != 1:
        raise IGLensError(f"token: expected one character, got {token!r}")
    row = model.lm_head.weight[int(one)] * model.model.norm.weight
    top, u = float(row.norm()) * len(h) ** 0.5, row / row.norm()
    if not abs(logit) < top:
        raise IGLensError(f"logit of {token!r}: expected one between −{top:.0f} and {top:.0f}, got {logit}")
    along = float(h @ u)  # logit = top · x / √(|h⊥|² + x² + d ε), solved for x
    rest = float(h @ h) - along**2 + len(h) * model.model.norm.variance_epsilon
    return (logit * (rest / (top**2 - logit**2)) ** 0.5 - along) * u


def _seen(module: nn.Module, model: LlamaForCausalLM, prompt: Tensor) -> tuple[Tensor, Tensor]:
    """The residual stream at the last position [n + 1, d], and the module's input there."""
    kept = []
    handle = module.register_forward_pre_hook(lambda module, args: kept.append(args[0][0, -1].detach().clone()))
    try:
        return residual_stream(model, prompt)[:, -1], kept[-1]
    finally:
        handle.remove()


@torch.no_grad()
def plant(model: LlamaForCausalLM, layer: int, token: str, logit: float, prompt: str = PROMPT) -> None:
    """Edit block `layer` by one rank: after it, at the prompt's last position, the head gives the token this logit."""
    down = block(model, layer).mlp.down_proj
    stream, active = _seen(down, model, ids(prompt))
    down.weight += torch.outer(_step(model, stream[layer], token, logit), active) / (active @ active)


def planted(*writes: tuple[int, str, float], **options) -> LlamaForCausalLM:
    """A random model (options: see random_model) in which blocks write what they are told to, and no other does.

    writes: (block, token, logit), one a block.
    """
    options["silent"] = tuple(options.get("silent", ()))
    busy = [*(write[0] for write in writes), *options["silent"]]
    if len({*busy}) < len(busy):
        raise IGLensError(f"expected every block to be told one thing, got {busy}")
    model = random_model(**options)
    for layer, token, logit in sorted(writes):  # in the order of the blocks: each sees what the ones before wrote
        plant(model, layer, token, logit)
    return model


def _attend(model: LlamaForCausalLM, layer: int, mark: Tensor) -> tuple[Tensor, nn.Linear, Tensor]:
    """Make head 0 of the block read the mark at all positions alike, into its first channel, which writes nothing yet.

    Only the source token's embedding gets the mark. Returns the residual stream at the prompt's end [n + 1, d], the
    projection whose column 0 the channel is, and the channel's value there.
    """
    model.model.embed_tokens.weight[ALPHABET.index(SOURCE)] += 2 * D**0.5 * mark
    attention, norm = block(model, layer).self_attn, block(model, layer).input_layernorm
    width = D // model.config.num_attention_heads
    attention.q_proj.weight[:width] = 0  # scores of 0: uniform attention
    attention.v_proj.weight[:width] = 0
    attention.v_proj.weight[0] = mark / norm.weight
    attention.o_proj.weight[:, 0] = 0
    stream, mixed = _seen(attention.o_proj, model, ids(PROMPT))
    return stream, attention.o_proj, mixed[0]


def _speak(model: LlamaForCausalLM, layer: int, mark: Tensor, logit: float) -> None:
    """Make one neuron of the block read the mark and write the answer's direction."""
    mlp, norm = block(model, layer).mlp, block(model, layer).post_attention_layernorm
    for linear in (mlp.gate_proj, mlp.up_proj):
        linear.weight[0] = mark / norm.weight
    mlp.down_proj.weight[:, 0] = 0
    stream, active = _seen(mlp.down_proj, model, ids(PROMPT))
    mlp.down_proj.weight[:, 0] = _step(model, stream[layer], ANSWER, logit) / active[0]


def _marked(options: dict) -> Tensor:
    """[d], the third free direction, that no head row reads."""
    return _free(D, options.get("seed", 0))[2]


def _ordered(model: LlamaForCausalLM, finder: int, speaker: int) -> None:
    if block(model, finder) is block(model, speaker) or finder > speaker:
        raise IGLensError(f"expected the finder before the speaker, got blocks {finder} and {speaker}")


@torch.no_grad()
def moved(layer: int, logit: float = 24.0, **options) -> LlamaForCausalLM:
    """A random model whose block `layer` moves the answer by attention from wherever the source token stands.

    The source token's embedding alone has a mark, which no head row reads. The block's head 0 attends to all positions
    alike, its value reads the mark and its output is the answer's direction. The logit is met within a few per cent:
    the block's own MLP still writes after it. options: see random_model.
    """
    model = random_model(**options)
    stream, output, value = _attend(model, layer, _marked(options))
    output.weight[:, 0] = _step(model, stream[layer], ANSWER, logit) / value
    return model


@torch.no_grad()
def relayed(finder: int, speaker: int, logit: float = 24.0, **options) -> LlamaForCausalLM:
    """A random model whose block `finder` writes a mark that no head row reads, and `speaker` makes it the answer.

    The finder's write is of rank one; one neuron of the speaker reads the mark. options: see random_model.
    """
    model, mark = random_model(**options), _marked(options)
    down = block(model, finder).mlp.down_proj
    _ordered(model, finder, speaker)
    stream, active = _seen(down, model, ids(PROMPT))
    down.weight += torch.outer(mark, active) * stream[finder].norm() / 2 / (active @ active)
    _speak(model, speaker, mark, logit)
    return model


@torch.no_grad()
def fetched(finder: int, speaker: int, logit: float = 24.0, **options) -> LlamaForCausalLM:
    """As relayed, but block `finder` fetches the mark by attention from wherever the source token stands."""
    model, mark = random_model(**options), _marked(options)
    _ordered(model, finder, speaker)
    stream, output, value = _attend(model, finder, mark)
    output.weight[:, 0] = mark * stream[finder].norm() / 2 / value
    _speak(model, speaker, mark, logit)
    return model


# ---------------------------------------------------------------------------------------------------------------------
# A trained model: induction
# ---------------------------------------------------------------------------------------------------------------------

LETTERS, LENGTH = 26, 32  # tokens of the task, and of a training sequence


def sequences(count: int, generator: torch.Generator, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Sequences [count, length] that repeat 5 to 16 different random letters, and where the next one is certain.

    The second, [count, length − 1], is True at the positions whose token occurred before: what followed it then
    follows again. The period differs from sequence to sequence, so that no fixed distance helps.
    """
    order = torch.rand(count, LETTERS, generator=generator).argsort(1)
    period = torch.randint(5, 17, (count, 1), generator=generator)
    return order.gather(1, torch.arange(length) % period), torch.arange(length - 1) >= period


def accuracy(model: LlamaForCausalLM, count: int = 1000, seed: int = 1) -> float:
    """The share of certain next tokens that the model predicts, in fresh sequences."""
    tokens, certain = sequences(count, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        right = model(input_ids=tokens).logits[:, :-1].argmax(-1) == tokens[:, 1:]
    return float(right[certain].float().mean())


def train(seed: int = 0, steps: int = 1500) -> LlamaForCausalLM:
    """A Llama of two blocks trained on the sequences, from scratch: about half a minute on two cores."""
    model = llama(LETTERS, 64, 2, seed).train()
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    warm = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=max(steps, 40), pct_start=0.05)
    for _ in tqdm(range(steps), desc="training"):
        tokens, certain = sequences(64, generator)
        logits = model(input_ids=tokens).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits[certain], tokens[:, 1:][certain])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        warm.step()
    return model.eval()


def store(model: LlamaForCausalLM, path: Path = INDUCTION) -> None:
    """Write the model with its configuration to a safetensors file."""
    save_tensors(path, model.state_dict(), {"config": json.dumps(model.config.to_diff_dict())})


def induction(path: Path = INDUCTION) -> LlamaForCausalLM:
    """The trained model that comes with the project, float32."""
    try:
        with safe_open(path, "pt") as file:
            config = LlamaConfig(attn_implementation="eager", **json.loads(file.metadata()["config"]))
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
            with torch.device("meta"):  # before anything is allocated: a foreign configuration may ask for gigabytes
                wanted = {name: list(value.shape) for name, value in LlamaForCausalLM(config).state_dict().items()}
            if shapes != wanted:
                raise ValueError("its weights do not fit its configuration")
            weights = {name: file.get_tensor(name) for name in shapes}
        model = LlamaForCausalLM(config)
        model.load_state_dict(weights)
    except Exception as error:  # a foreign file may fail in any of these steps
        raise IGLensError(f"{path} does not hold the toy ({error}); make it: python -m iglens_lab.toy") from error
    return model.eval()


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes that run without an error: each gives the right result and the wrong one
# ---------------------------------------------------------------------------------------------------------------------


def capped(cap: float | None = 4.0, seed: int = 0) -> Gemma2ForCausalLM:
    """A random Gemma 2, which bounds its logits: cap · tanh(z / cap); None leaves them as they are."""
    config = Gemma2Config(
        vocab_size=len(ALPHABET), hidden_size=D, intermediate_size=2 * D, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, head_dim=D // 4, final_logit_softcapping=cap, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, attn_implementation="eager",
    )  # fmt: skip
    generator, model = torch.Generator().manual_seed(seed), Gemma2ForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise / D**0.5 if parameter.ndim > 1 else 0.3 * noise)
        model.lm_head.weight.mul_(6)
    return model


def _misread(right: Attribution, readout: Readout, states: Tensor) -> Attribution:
    """The result with credits and levels of other states, or of another readout: complete in itself."""
    credits, levels = path_credits(readout, states, right.target_ids)
    return replace(right, credits=credits, levels=levels, delta=levels[:, -1] - levels[:, 0])


def double_norm(model, tokenizer, prompt: str, answer: str) -> tuple[Attribution, Attribution]:
    """Wrong: the last state as `output_hidden_states` gives it, after the final norm, read through the norm again."""
    readout, trace = Readout(model), read(model, tokenizer, prompt, answer=answer)
    states, _ = residual_path(trace)
    right = attribute(readout, trace)
    with torch.no_grad():
        states[-1] = model(input_ids=trace.input_ids[None], output_hidden_states=True).hidden_states[-1][
            0, trace.positions
        ]
    return right, _misread(right, readout, states)


def absolute_credits(model, tokenizer, prompt: str, answer: str) -> tuple[Attribution, Attribution]:
    """Wrong: the sizes of the credits without their signs."""
    right = explain(model, tokenizer, prompt, answer=answer)
    return right, replace(right, credits=right.credits.abs())


def own_position(model, tokenizer, prompt: str, answer: str) -> tuple[Attribution, Attribution]:
    """Wrong: a token read at the position where it stands, which predicts the one after it."""
    readout, trace = Readout(model), read(model, tokenizer, prompt, answer=answer)
    shifted = replace(trace, positions=trace.positions + 1)
    right = attribute(readout, trace)
    return right, _misread(right, readout, residual_path(shifted)[0])


def missing_cap(model, tokenizer, prompt: str, answer: str) -> tuple[Attribution, Attribution]:
    """Wrong: norm and head alone, without what the model does to its logits (a Gemma 2)."""
    if not getattr(model.config, "final_logit_softcapping", None):
        raise IGLensError(f"missing_cap: expected a model that caps its logits, got {type(model).__name__} without one")
    readout, trace = Readout(model), read(model, tokenizer, prompt, answer=answer)
    bare = deepcopy(model)
    bare.config.final_logit_softcapping = None
    right = attribute(readout, trace)
    return right, _misread(right, Readout(bare), residual_path(trace)[0])


def hook_left_on(model, tokenizer, prompt: str, answer: str, layer: int) -> tuple[Attribution, Attribution]:
    """Wrong: explained while the hook of an earlier ablation is still there."""
    right = explain(model, tokenizer, prompt, answer=answer)
    with skipped(model, layer):
        return right, explain(model, tokenizer, prompt, answer=answer)


if __name__ == "__main__":
    made = train()
    store(made)
    print(f"{INDUCTION.name}: {accuracy(made):.4f} of the certain next tokens are right")
