"""The peak of a long text, measured in a process of its own: it must not grow with tokens × vocabulary."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc"
)

MEASURE = """
import sys, torch
from pathlib import Path
import iglens_core as ig

def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) / 1024  # MB

def peak(call):
    "MB above what is resident before the call; the lesser of two, as pages that come back from disk count too."
    extras = []
    for _ in range(2):
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        result = call()
        extras.append(status("VmHWM") - before)
    return min(extras), result

torch.set_num_threads(1)
"""
TINY = """
sys.path.insert(0, TESTS)
import tiny
model = tiny.build("llama", vocab_size=200_000, max_position_embeddings=4096)
tokenizer, length = tiny.tokenizer(), 2048
"""
DEFAULT = """
from iglens_lab.models import load_model
model, tokenizer = load_model()
length = 2048
"""
# not a plain Linear, so it is called as a module, on chunks of rows
OWN_HEAD = """
class Head(torch.nn.Linear):
    pass
model.lm_head.__class__ = Head
"""
EXPLAIN = """
ids = [(7 * i) % 200 + 3 for i in range(length - 1)]
readout = ig.Readout(model)
def whole(ids, **options):
    trace = ig.read(model, tokenizer, ids, answer=[5], scope="all")
    return trace.stream.nbytes / 2**20, ig.attribute(readout, trace, **options).check()
whole(ids[:64])  # what is loaded on first use is no part of the peak
for budget in BUDGETS:
    extra, (stream, result) = peak(lambda: whole(ids, memory_mb=budget))
    assert len(result.tokens) == length - 1 and result.model_level.isnan().sum() == length - 1 - 64
    print(round(extra - stream))
"""


def extra_mb(model: str, *budgets: int) -> list[int]:
    tests = repr(str(Path(__file__).parent))
    code = MEASURE + (model + EXPLAIN).replace("TESTS", tests).replace("BUDGETS", repr(budgets))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    return [int(line) for line in done.stdout.split()[-len(budgets) :]]


# all logits of the tiny model at once would be 1,600 MB, at every layer 6,500 MB; its 64 compared rows alone are 50 MB


def test_every_token_of_a_long_text_stays_within_256_mb():
    assert extra_mb(TINY, 256)[0] <= 256


WIDE = """
from transformers import LlamaConfig, LlamaForCausalLM
shape = dict(hidden_size=2048, intermediate_size=64, num_hidden_layers=1, num_attention_heads=8, vocab_size=1000)
readout = ig.Readout(LlamaForCausalLM(LlamaConfig(**shape)).eval())
states, targets = torch.randn(9, 1000, 2048), torch.arange(1000)
ig.path_credits(readout, states[:, :8], targets[:8], memory_mb=64)
for options in ({}, {"estimator": "midpoint", "steps": 1}):
    extra, _ = peak(lambda: ig.path_credits(readout, states[:, :300], targets[:300], memory_mb=64, **options))
    print(round(extra))
"""


def test_rows_of_a_wide_model_count_as_well():
    done = subprocess.run([sys.executable, "-c", MEASURE + WIDE], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert max(int(line) for line in done.stdout.split()[-2:]) <= 96


def test_a_head_that_is_called_whole_stays_within_the_budget_that_is_set():
    # a group of 64 tokens at 4 points at once would be 410 MB with logsumexp's copy
    small, default = extra_mb((TINY + OWN_HEAD).replace("2048", "512"), 32, 256)
    assert small <= 192
    assert default <= 256


@pytest.mark.slow
def test_the_default_model_on_2048_tokens_stays_within_256_mb():
    assert extra_mb(DEFAULT, 256)[0] <= 256
