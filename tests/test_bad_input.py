"""Bad input of every public function: one IGLensError that says what was given, what was expected, what to do."""

import copy
import dataclasses
import math
from functools import cache

import numpy as np
import pytest
import tiny
import torch
from tiny import WORDS, D, N

from iglens_core import (
    Attribution,
    IGLensError,
    Readout,
    Trace,
    attribute,
    explain,
    path_credits,
    read,
    residual_path,
    residual_stream,
    token_id,
)

NAN, INF = math.nan, math.inf
BARE, CHATTY = tiny.tokenizer(), tiny.tokenizer(bos=True, chat=True)


@cache
def readout() -> Readout:
    return Readout(tiny.speaker())


@cache
def trace() -> Trace:
    return read(tiny.speaker(), BARE, "the cat", answer=" sat on the mat")


@cache
def result() -> Attribution:
    return attribute(readout(), trace())


@cache
def other() -> torch.nn.Module:
    """Another model of the same shape."""
    return tiny.build("llama", seed=5, vocab_size=WORDS)


def _refusing():
    tokenizer = copy.deepcopy(CHATTY)
    tokenizer.chat_template = "{{ raise_exception('only system messages') }}"
    return tokenizer


def _set(tensor, value):
    changed = tensor.clone()
    changed.view(-1)[0] = value
    return changed


def reads(prompt="the cat", tokenizer=BARE, model=None, **options):
    return lambda: read(model or tiny.speaker(), tokenizer, prompt, **options)


def explains(**options):
    return lambda: explain(tiny.speaker(), BARE, "the cat", **({"answer": " sat on the mat"} | options))


def attributes(**options):
    return lambda: attribute(readout(), trace(), **options)


def hand(**parts):
    """A trace changed by hand."""
    return lambda: attribute(readout(), dataclasses.replace(trace(), **parts))


def trace_positions():
    return trace().positions


def paths(**options):
    return lambda: residual_path(trace(), **options)


def credits(states=None, targets=(1, 2), **options):
    return lambda: path_credits(readout(), torch.zeros(3, 2, D) if states is None else states, targets, **options)


LAST = WORDS - 1
ONE_OR_IDS = "prompt: expected one string or one list of ids"
MANY = [ONE_OR_IDS, "iglens_lab.batch.explain_many"]
NOT_IDS = ["prompt: expected"]
BASELINE = ["baseline: expected 'embedding', 'mean', 'zero' or floats of shape [32] or [4, 32]"]
LAYERS = ["layers: expected an integer, "]
SCOPE = ["scope: expected 'answer' or 'all', got "]
TOO_LONG = ["this model's context is 256: shorten"]

# what: (call, the words that the message must hold)
CASES = {
    # the prompt
    "prompt empty": (reads(""), ["prompt: expected at least one character, got an empty string"]),
    "prompt empty with a template": (reads("", CHATTY), ["prompt: expected at least one character"]),
    "prompt an empty list": (reads([]), ["prompt: expected at least one id, got none"]),
    "prompt a list of strings": (reads(["the", "cat"]), [*MANY, "['the', 'cat']"]),
    "prompt a list of one string": (reads(["the"]), MANY),
    "prompt a tuple of strings": (reads(("the", "cat")), MANY),
    "prompt a list of lists of ids": (reads([[5, 6], [7, 8]]), MANY),
    "prompt chat messages": (reads([{"role": "user", "content": "the"}]), MANY),
    "prompt a batch of ids": (reads(torch.tensor([[5, 6], [7, 8]])), ["prompt: expected one sequence", "[2, 2]"]),
    "prompt None": (reads(None), NOT_IDS),
    "prompt an integer": (reads(7), NOT_IDS),
    "prompt a float": (reads(7.5), NOT_IDS),
    "prompt a bool": (reads(True), NOT_IDS),
    "prompt bytes": (reads(b"the cat"), NOT_IDS),
    "prompt a dictionary": (reads({"input_ids": [5]}), NOT_IDS),
    "prompt a set of ids": (reads({5, 6}), NOT_IDS),
    "prompt floats": (reads([1.0, 2.0]), ["prompt: expected integers, got torch.float32"]),
    "prompt bools": (reads([True, False]), ["prompt: expected integers, got torch.bool"]),
    "prompt ids past the head's rows": (
        reads([5, WORDS]),
        [f"prompt: expected ids of this model, 0 … {LAST}", "[273]"],
    ),
    "prompt negative ids": (reads([5, -1]), ["prompt: expected ids of this model", "[-1]"]),
    "prompt ids beyond 64 bits": (reads([2**70]), NOT_IDS),
    "prompt tokens past the head's rows": (
        reads("the cat", model=tiny.shared("llama")),
        ["prompt: expected ids of this model, 0 … 95, got [260, 264]"],
    ),
    "prompt longer than the context": (reads("x" * 300), ["prompt: 300 tokens", "max_new_tokens=20", *TOO_LONG]),
    "prompt just too long with its answer": (reads("x" * 250, max_new_tokens=7), ["make 257", *TOO_LONG]),
    "prompt just too long with a forced answer": (
        reads("x" * 250, answer="." * 7),
        ["250 tokens and an answer of 7 make 257", *TOO_LONG],
    ),
    # the answer
    "answer empty": (reads(answer=""), ["answer: expected at least one token, got ''", "None for the model's own"]),
    "answer empty in explain": (explains(answer=""), ["answer: expected at least one token"]),
    "answer an empty list": (reads(answer=[]), ["answer: expected at least one id, got none"]),
    "answer a list of strings": (reads(answer=[" sat", " on"]), ["answer: expected"]),
    "answer an integer": (reads(answer=7), ["answer: expected"]),
    "answer a bool": (reads(answer=True), ["answer: expected integers, got torch.bool"]),
    "answer bytes": (reads(answer=b" sat"), ["answer: expected"]),
    "answer floats": (reads(answer=[7.0]), ["answer: expected integers, got torch.float32"]),
    "answer ids past the head's rows": (reads(answer=[WORDS]), [f"answer: expected ids of this model, 0 … {LAST}"]),
    "answer negative ids": (reads(answer=[-3]), ["answer: expected ids of this model", "[-3]"]),
    "answer tokens past the head's rows": (
        lambda: read(tiny.shared("llama"), BARE, [5], answer=" cat"),
        ["answer: expected ids of this model, 0 … 95"],
    ),
    # how it is read
    "chat without a template": (reads(chat=True), ["chat=True: this tokenizer has no chat template", "chat=False"]),
    "chat with ids": (reads([5, 6], CHATTY, chat=True), ["chat=True: expected the prompt as a string", "chat=False"]),
    "chat a string": (reads(chat="yes"), ["chat: expected None, True or False, got 'yes'"]),
    "chat a string of None": (reads(chat="None"), ["chat: expected None, True or False, got 'None'"]),
    "chat an integer": (reads(chat=1), ["chat: expected None, True or False, got 1"]),
    "chat refused by its template": (reads("the", _refusing()), ["only system messages", "chat=False"]),
    "scope unknown": (reads(scope="prompt"), [*SCOPE, "'prompt'"]),
    "scope None": (reads(scope=None), [*SCOPE, "None"]),
    "scope a list": (reads(scope=["all"]), SCOPE),
    "max_new_tokens zero": (reads(max_new_tokens=0), ["max_new_tokens: expected an integer", "got 0"]),
    "max_new_tokens negative": (reads(max_new_tokens=-1), ["max_new_tokens: expected an integer", "got -1"]),
    "max_new_tokens a bool": (reads(max_new_tokens=True), ["max_new_tokens: expected an integer", "got True"]),
    "max_new_tokens NumPy's bool": (reads(max_new_tokens=np.True_), ["max_new_tokens: expected an integer", "True"]),
    "max_new_tokens a float": (reads(max_new_tokens=1.5), ["max_new_tokens: expected an integer", "got 1.5"]),
    "max_new_tokens a string": (reads(max_new_tokens="12"), ["max_new_tokens: expected an integer", "got '12'"]),
    "max_new_tokens None": (reads(max_new_tokens=None), ["max_new_tokens: expected an integer", "got None"]),
    "max_new_tokens for a forced answer": (reads(answer=" sat", max_new_tokens=0), ["max_new_tokens", "got 0"]),
    "tokenizer None": (reads(tokenizer=None), ["tokenizer: expected the model's tokenizer, got NoneType"]),
    "tokenizer a name": (reads(tokenizer="gpt2"), ["tokenizer: expected the model's tokenizer, got str"]),
    "tokenizer the model": (reads(tokenizer=tiny.speaker()), ["tokenizer: expected", "got LlamaForCausalLM"]),
    "model a name": (lambda: read("gpt2", BARE, "the"), ["model: expected a causal language model", "got str"]),
    "model the tokenizer": (lambda: read(BARE, BARE, "the"), ["model: expected a causal language model", "got "]),
    "model None": (lambda: Readout(None), ["model: expected a causal language model", "got NoneType"]),
    "model a bare module": (lambda: Readout(torch.nn.Linear(2, 2)), ["model: expected", "got Linear"]),
    # the stream
    "ids empty": (lambda: residual_stream(tiny.speaker(), []), ["input_ids: expected at least one id"]),
    "ids text": (lambda: residual_stream(tiny.speaker(), "the cat"), ["input_ids: expected integers, got 'the cat'"]),
    "ids None": (lambda: residual_stream(tiny.speaker(), None), ["input_ids: expected integers, got 'None'"]),
    "ids floats": (lambda: residual_stream(tiny.speaker(), [1.0]), ["input_ids: expected integers, got torch.float32"]),
    "ids a batch": (
        lambda: residual_stream(tiny.speaker(), [[1, 2], [3, 4]]),
        ["input_ids: expected one sequence, [S] or [1, S], got shape [2, 2]"],
    ),
    "ids ragged": (lambda: residual_stream(tiny.speaker(), [[1, 2], [3]]), ["input_ids: expected integers"]),
    "ids past the rows": (lambda: residual_stream(tiny.speaker(), [WORDS]), [f"0 … {LAST}, got [{WORDS}]"]),
    "mask too short": (
        lambda: residual_stream(tiny.speaker(), [5, 6], [1]),
        ["attention_mask: expected 2 values", "got [1]"],
    ),
    "mask all padding": (
        lambda: residual_stream(tiny.speaker(), [5, 6], [0, 0]),
        ["attention_mask: expected 2 values"],
    ),
    "mask of twos": (lambda: residual_stream(tiny.speaker(), [5, 6], [2, 1]), ["attention_mask: expected", "[2]"]),
    "mask text": (lambda: residual_stream(tiny.speaker(), [5, 6], "11"), ["attention_mask: expected"]),
    "mask halves": (lambda: residual_stream(tiny.speaker(), [5, 6], [0.5, 1.0]), ["attention_mask: expected"]),
    # the readout
    "states of another width": (lambda: readout().logits(torch.zeros(2, 16)), ["h: expected", "[R, 32], got [2, 16]"]),
    "states of one row": (lambda: readout().prob(torch.zeros(D), 1), ["h: expected", "[R, 32], got [32]"]),
    "states a list": (lambda: readout().logits([[0.0] * D]), ["h: expected", "[R, 32], got ['list']"]),
    "target past the rows": (
        lambda: readout().prob(torch.zeros(2, D), WORDS),
        [f"targets: expected ids of this model, 0 … {LAST}"],
    ),
    "target negative": (lambda: readout().log_prob(torch.zeros(2, D), -1), ["targets: expected ids", "[-1"]),
    "target a float": (lambda: readout().prob(torch.zeros(1, D), 1.5), ["targets: expected"]),
    "targets too many": (
        lambda: readout().prob(torch.zeros(2, D), [1, 2, 3]),
        ["targets: expected 2 ids, one for each explained token, got 3"],
    ),
    "k zero": (lambda: readout().topk(torch.zeros(2, D), 0), [f"k: expected an integer, 1 … {WORDS}, got 0"]),
    "k past the rows": (lambda: readout().topk(torch.zeros(2, D), WORDS + 1), ["k: expected an integer", "got 274"]),
    "k a bool": (lambda: readout().topk(torch.zeros(2, D), True), ["k: expected an integer", "got True"]),
    "k a float": (lambda: readout().topk(torch.zeros(2, D), 2.0), ["k: expected an integer", "got 2.0"]),
    # layers
    "layers past the last": (attributes(layers=[N + 1]), [*LAYERS, "0 … 3, got 4"]),
    "layers negative": (attributes(layers=[-1]), [*LAYERS, "got -1"]),
    "layers a float": (attributes(layers=[1.0]), [*LAYERS, "got 1.0"]),
    "layers a bool": (attributes(layers=[True]), [*LAYERS, "got True"]),
    "layers NumPy's bools": (attributes(layers=np.array([True, False])), [*LAYERS, "True"]),
    "layers torch's bools": (attributes(layers=torch.tensor([True])), [*LAYERS, "True"]),
    "layers torch's floats": (attributes(layers=torch.linspace(1, 3, 2)), [*LAYERS, "1."]),
    "layers NumPy's floats": (attributes(layers=np.linspace(1, 3, 2)), [*LAYERS, "1.0"]),
    "layers a string": (attributes(layers="1"), [*LAYERS, "got '1'"]),
    "layers a string of a list": (attributes(layers="[0,1]"), [*LAYERS, "got '['"]),
    "layers a list of strings": (attributes(layers=["1"]), [*LAYERS, "got '1'"]),
    "layers an empty string": (attributes(layers=""), ["layers: expected at least one layer", "None for all"]),
    "layers empty": (attributes(layers=[]), ["layers: expected at least one layer of 0 … 3, got none", "None for all"]),
    "layers nested": (attributes(layers=[[1, 2]]), LAYERS),
    "layers a count of zero": (attributes(layers=0), [*LAYERS, "1 … 3, got 0"]),
    "layers a count past the blocks": (attributes(layers=N + 1), [*LAYERS, "1 … 3, got 4"]),
    "layers a negative count": (attributes(layers=-1), [*LAYERS, "got -1"]),
    "layers a fraction": (attributes(layers=1.5), [*LAYERS, "got 1.5"]),
    "layers True": (attributes(layers=True), [*LAYERS, "got True"]),
    "layers of a path": (paths(layers=[N + 1]), [*LAYERS, "0 … 3, got 4"]),
    "layers in explain": (explains(layers=[99]), [*LAYERS, "got 99"]),
    # the baseline
    "baseline unknown": (attributes(baseline="average"), [*BASELINE, "got 'average'"]),
    "baseline in capitals": (attributes(baseline="Zero"), [*BASELINE, "got 'Zero'"]),
    "baseline None": (attributes(baseline=None), [*BASELINE, "got None"]),
    "baseline a number": (attributes(baseline=0.0), BASELINE),
    "baseline of another width": (attributes(baseline=torch.zeros(16)), [*BASELINE, "got torch.float32 [16]"]),
    "baseline for other tokens": (attributes(baseline=torch.zeros(3, D)), [*BASELINE, "[3, 32]"]),
    "baseline with an axis too many": (attributes(baseline=torch.zeros(1, 4, D)), [*BASELINE, "[1, 4, 32]"]),
    "baseline integers": (attributes(baseline=torch.zeros(D, dtype=torch.long)), [*BASELINE, "got torch.int64 [32]"]),
    "baseline complex": (attributes(baseline=torch.zeros(D, dtype=torch.cfloat)), [*BASELINE, "torch.complex64"]),
    "baseline NaN": (attributes(baseline=_set(torch.zeros(D), NAN)), ["baseline: expected finite values"]),
    "baseline infinite": (attributes(baseline=_set(torch.zeros(4, D), -INF)), ["baseline: expected finite values"]),
    "baseline strings": (attributes(baseline=["zero"]), BASELINE),
    "baseline empty": (attributes(baseline=[]), BASELINE),
    "baseline of a path": (paths(baseline="average"), [*BASELINE, "got 'average'"]),
    "baseline in explain": (explains(baseline="average"), [*BASELINE, "got 'average'"]),
    # estimator, steps, scalar, memory
    "estimator unknown": (
        attributes(estimator="riemann"),
        ["estimator: expected one of observed, midpoint, gauss-legendre", "got 'riemann'"],
    ),
    "estimator None": (
        attributes(estimator=None),
        ["estimator: expected one of observed, midpoint, gauss-legendre", "got None"],
    ),
    "estimator a list": (
        attributes(estimator=["observed"]),
        ["estimator: expected one of observed, midpoint, gauss-legendre"],
    ),
    "estimator in explain": (explains(estimator="riemann"), ["estimator: expected", "got 'riemann'"]),
    "estimator of a path": (credits(estimator="riemann"), ["estimator: expected", "got 'riemann'"]),
    "scalar unknown": (
        attributes(scalar="probability"),
        ["scalar: expected one of prob, log_prob, logit, entropy", "got 'probability'"],
    ),
    "scalar None": (attributes(scalar=None), ["scalar: expected one of prob, log_prob, logit, entropy", "got None"]),
    "scalar a pair": (attributes(scalar=("prob", 1)), ["scalar: expected one of", "('prob', A, B)", "got ('prob', 1)"]),
    "scalar a contrast of entropies": (attributes(scalar=("entropy", 1, 2)), ["scalar: expected one of"]),
    "scalar past the rows": (
        attributes(scalar=("logit", 1, WORDS)),
        ["scalar: expected ids of this model", f"[{WORDS}]"],
    ),
    "scalar a negative id": (attributes(scalar=("prob", -1, 2)), ["scalar: expected ids of this model", "got [-1]"]),
    "scalar half an id": (attributes(scalar=("prob", 1.5, 2)), ["scalar: expected integers"]),
    "scalar a bool": (attributes(scalar=("prob", True, False)), ["scalar: expected integers"]),
    "scalar a text of two tokens": (attributes(scalar=("prob", " cat sat", 2)), ["one ordinary token"]),
    "scalar a special token": (attributes(scalar=("prob", "</s>", 2)), ["one ordinary token"]),
    "scalar a text without a tokenizer": (credits(scalar=("prob", " cat", 2)), ["scalar: expected integers"]),
    "steps half": (attributes(estimator="midpoint", steps=2.5), ["steps: expected an integer", "got 2.5"]),
    "steps too many for Gauss-Legendre": (
        attributes(estimator="gauss-legendre", steps=10**6),
        ["steps: expected an integer, 1 … 1000"],
    ),
    "states on meta": (credits(torch.zeros(3, 2, D, device="meta")), ["states: expected floats"]),
    "states of integers": (credits(torch.zeros(3, 2, D, dtype=torch.long)), ["states: expected floats"]),
    "states infinite": (credits(torch.full((3, 2, D), float("inf"))), ["states: expected finite"]),
    "memory huge and not a number": (credits(memory_mb=float("nan")), ["memory_mb: expected a number"]),
    "baseline on meta": (attributes(baseline=torch.zeros(D, device="meta")), BASELINE),
    "baseline sparse": (attributes(baseline=torch.zeros(1, D).to_sparse()), BASELINE),
    "text of half a character": (reads("\ud800"), ["the tokenizer cannot encode"]),
    "scalar an integer": (attributes(scalar=1), ["scalar: expected one of prob, log_prob, logit, entropy", "got 1"]),
    "scalar in explain": (explains(scalar="probability"), ["scalar: expected", "got 'probability'"]),
    "scalar of a path": (credits(scalar="probability"), ["scalar: expected", "got 'probability'"]),
    "steps zero": (attributes(steps=0), ["steps: expected an integer", "got 0"]),
    "steps a bool": (attributes(steps=True), ["steps: expected an integer", "got True"]),
    "steps a float": (attributes(steps=4.0), ["steps: expected an integer", "got 4.0"]),
    "steps a string": (credits(steps="4"), ["steps: expected an integer", "got '4'"]),
    "memory zero": (attributes(memory_mb=0), ["memory_mb: expected a number of at least", "one row", "got 0"]),
    "memory negative": (attributes(memory_mb=-1), ["memory_mb: expected a number", "got -1"]),
    "memory less than a row": (attributes(memory_mb=1e-3), ["memory_mb: expected a number of at least", "got 0.001"]),
    "memory a bool": (attributes(memory_mb=True), ["memory_mb: expected a number", "got True"]),
    "memory a string": (attributes(memory_mb="x"), ["memory_mb: expected a number", "got 'x'"]),
    "memory NaN": (attributes(memory_mb=NAN), ["memory_mb: expected a number", "got nan"]),
    "memory None": (credits(memory_mb=None), ["memory_mb: expected a number", "got None"]),
    # the path
    "path of one point": (credits(torch.zeros(1, 2, D)), ["states: expected floats [k + 1, T, 32]", "got [1, 2, 32]"]),
    "path of two axes": (credits(torch.zeros(3, D)), ["states: expected floats [k + 1, T, 32]", "got [3, 32]"]),
    "path of another width": (credits(torch.zeros(3, 2, 16)), ["states: expected", "got [3, 2, 16]"]),
    "path a list": (credits([[[0.0] * D]] * 3), ["states: expected", "got ['list']"]),
    "path with NaN": (credits(_set(torch.zeros(3, 2, D), NAN)), ["states: expected finite values, got NaN"]),
    "path with infinity": (credits(_set(torch.zeros(3, 2, D), INF)), ["states: expected finite values"]),
    "path without tokens": (credits(torch.zeros(3, 0, D), []), ["states: expected floats", "got [3, 0, 32]"]),
    "path with targets too few": (credits(targets=[1]), ["targets: expected 2 ids", "got 1"]),
    "path with targets past the rows": (
        credits(targets=[1, WORDS]),
        [f"targets: expected ids of this model, 0 … {LAST}"],
    ),
    # targets
    "targets past the rows": (attributes(targets=WORDS), [f"targets: expected ids of this model, 0 … {LAST}"]),
    "targets negative": (attributes(targets=[1, 2, 3, -4]), ["targets: expected ids of this model", "[-4]"]),
    "targets a text of two tokens": (attributes(targets=" cat sat"), ["target ' cat sat'", "pass an id"]),
    "targets text past the head's rows": (
        lambda: attribute(
            Readout(tiny.shared("llama")), read(tiny.shared("llama"), BARE, [5], answer=[7]), targets=" cat"
        ),
        ["targets: expected", "95, got [264]"],
    ),
    "targets too few": (
        attributes(targets=[1, 2, 3]),
        ["targets: expected 4 ids, one for each explained token, got 3"],
    ),
    "targets empty": (attributes(targets=[]), ["targets: expected at least one id"]),
    "targets floats": (attributes(targets=[1.0] * 4), ["targets: expected integers, got torch.float32"]),
    "targets a float": (attributes(targets=1.5), ["targets: expected"]),
    "targets a bool": (attributes(targets=True), ["targets: expected integers, got torch.bool"]),
    "targets bools": (attributes(targets=[True] * 4), ["targets: expected integers, got torch.bool"]),
    "targets two-dimensional": (attributes(targets=torch.ones(4, 2).long()), ["targets: expected one sequence"]),
    "targets of two tokens": (
        explains(targets=" cat sat"),
        ["target ' cat sat'", "264 ' cat', 267 ' sat'", "pass an id"],
    ),
    "targets empty text": (explains(targets=""), ["target: expected a token's text, got ''"]),
    "targets a special token": (explains(targets="</s>"), ["target '</s>'", "one ordinary token", "pass an id"]),
    "targets too few texts": (explains(targets=[" cat"]), ["targets: expected 4 ids", "got 1"]),
    "target text None": (lambda: token_id(BARE, None), ["target: expected a token's text, got None"]),
    "target text an id": (lambda: token_id(BARE, 264), ["target: expected a token's text, got 264"]),
    # readout and trace
    "trace of another model": (lambda: attribute(Readout(other()), trace()), ["the model's own", "same", "model"]),
    "trace of a model of another depth": (
        lambda: attribute(Readout(tiny.build("llama", num_hidden_layers=2, vocab_size=WORDS)), trace()),
        ["trace: expected a stream [3, S, 32] of the readout's model, got [4, 6, 32]"],
    ),
    "trace of a model of another width": (
        lambda: attribute(Readout(tiny.build("llama", hidden_size=48, vocab_size=WORDS)), trace()),
        ["trace: expected a stream [4, S, 48]", "got [4, 6, 32]"],
    ),
    "trace and readout swapped": (lambda: attribute(trace(), readout()), ["expected a Readout", "got Trace"]),
    "model in the readout's place": (
        lambda: attribute(tiny.speaker(), trace()),
        ["expected a Readout", "got LlamaForCausalLM"],
    ),
    "trace with positions in a list": (
        hand(positions=[3, 4, 5, 6]),
        ["trace.positions: expected a tensor of integers"],
    ),
    "trace with positions of two axes": (
        hand(positions=trace_positions()[None]),
        ["trace.positions: expected", "one axis"],
    ),
    "trace with bytes as positions": (hand(positions=trace_positions().byte()), ["trace.positions: expected"]),
    "trace with positions past its end": (
        hand(positions=trace_positions() + 50),
        ["trace.positions: expected positions"],
    ),
    "trace with negative positions": (hand(positions=trace_positions() - 9), ["trace.positions: expected positions"]),
    "trace with the logits of a smaller head": (hand(logits=torch.zeros(4, 100)), [f"logits: expected [C, {WORDS}]"]),
    "trace with logits of one axis": (hand(logits=torch.zeros(4)), ["logits: expected"]),
    "trace with logits of fewer positions": (hand(logits=torch.zeros(2, WORDS)), ["trace.logits: expected"]),
    "trace of one layer": (hand(stream=torch.zeros(1, 6, D)), ["trace.stream: expected floats"]),
    "trace on meta": (hand(stream=torch.zeros(4, 6, D, device="meta")), ["trace.stream: expected floats"]),
    "trace without texts": (hand(tokens=None), ["trace.tokens: expected 4 texts, got None"]),
    "scalar a bool among ids": (attributes(scalar=("prob", True, 7)), ["scalar: expected integers"]),
    "targets a bool among ids": (attributes(targets=[True, 5, 6, 7]), ["targets: expected integers"]),
    "steps without end": (attributes(estimator="midpoint", steps=10**30), ["steps: expected an integer, 1 … 100000"]),
    "steps of many digits": (attributes(steps=10**5000), ["steps: expected an integer", "many digits"]),
    "baseline sparse of one axis": (attributes(baseline=torch.zeros(D).to_sparse()), BASELINE),
    "trace None": (lambda: attribute(readout(), None), ["a Trace", "NoneType"]),
    "trace whose states are NaN": (
        lambda: attribute(readout(), dataclasses.replace(trace(), stream=trace().stream * NAN, logits=None)),
        ["expected finite values, got NaN"],
    ),
    "path of no readout": (
        lambda: path_credits(None, torch.zeros(3, 2, D), [1, 2]),
        ["readout: expected a Readout", "NoneType"],
    ),
    "path of no trace": (lambda: residual_path(None), ["trace: expected a Trace, got NoneType"]),
    "translators no function": (attributes(translators="ridge"), ["translators: expected a function", "'ridge'"]),
    "translators of another width": (
        attributes(translators=lambda states, layers: states[..., :5]),
        ["expected", "5]"],
    ),
    "translators of another width beside a baseline": (
        attributes(translators=lambda states, layers: states[..., :5], baseline="zero"),
        ["translators: expected"],
    ),
    "translators that drop a layer": (
        attributes(translators=lambda states, layers: states[-2:]),
        ["translators: expected"],
    ),
    "translators that give NaN": (
        attributes(translators=lambda states, layers: states * NAN),
        ["states: expected finite values, got NaN"],
    ),
    # the result
    "mass zero": (lambda: result().onset(0), ["mass: expected a number above 0 and at most 1, got 0"]),
    "mass above one": (lambda: result().onset(1.01), ["mass: expected a number above 0", "got 1.01"]),
    "mass negative": (lambda: result().onset(-0.5), ["mass: expected a number above 0", "got -0.5"]),
    "mass NaN": (lambda: result().onset(NAN), ["mass: expected a number above 0", "got nan"]),
    "mass a bool": (lambda: result().onset(True), ["mass: expected a number above 0", "got True"]),
    "mass a string": (lambda: result().onset("0.5"), ["mass: expected a number above 0", "got '0.5'"]),
    "tolerance negative": (lambda: result().check(-1e-6), ["tolerance: expected a number, at least 0"]),
    "tolerance NaN": (lambda: result().check(NAN), ["tolerance: expected a number, at least 0", "got nan"]),
    "tolerance a bool": (lambda: result().check(True), ["tolerance: expected a number", "got True"]),
    "tolerance a string": (lambda: result().check("1e-5"), ["tolerance: expected a number", "got '1e-5'"]),
    "file missing": (lambda: Attribution.load("nowhere.safetensors"), ["nowhere.safetensors is not a file written by"]),
}


@pytest.mark.parametrize("what", CASES)
def test_bad_input_is_one_error_that_says_what_was_expected(what):
    call, words = CASES[what]
    with pytest.raises(IGLensError) as caught:
        call()
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
    assert "\n" not in message
    assert len(message) < 400


def test_options_are_keywords_only():
    for call in (
        lambda: read(tiny.speaker(), BARE, "the", " cat"),
        lambda: residual_path(trace(), [1]),
        lambda: attribute(readout(), trace(), [1, 2, 3, 4]),
        lambda: path_credits(readout(), torch.zeros(3, 2, D), [1, 2], "observed"),
        lambda: explain(tiny.speaker(), BARE, "the", " cat"),
    ):
        with pytest.raises(TypeError, match="positional argument"):
            call()


def test_a_misspelt_option_is_refused():
    with pytest.raises(TypeError, match="baselin"):
        explain(tiny.speaker(), BARE, "the", answer=" cat", baselin="zero")


def test_the_longest_text_that_fits_is_read():
    assert len(read(tiny.speaker(), BARE, "x" * 249, answer="." * 7).input_ids) == 256
    assert len(read(tiny.speaker(), BARE, "x" * 249, max_new_tokens=7).input_ids) <= 256


def test_integers_of_numpy_and_torch_are_integers():
    plain = attribute(readout(), trace(), layers=[1], targets=[5, 6, 7, 8])
    for kind in (np.array, torch.tensor):
        same = attribute(readout(), trace(), layers=kind([1]), targets=kind([5, 6, 7, 8]), steps=kind([2])[0])
        assert torch.equal(same.credits, plain.credits)
        assert same.steps == 2
        assert len(read(tiny.speaker(), BARE, "the", max_new_tokens=kind([2])[0]).tokens) == 2
    assert attribute(readout(), trace(), targets=np.int64(5)).target_ids.tolist() == [5] * 4
    assert attribute(readout(), trace(), targets=torch.tensor(5)).target_ids.tolist() == [5] * 4
    assert attribute(readout(), trace(), baseline=np.zeros(D)).baseline == "tensor"
