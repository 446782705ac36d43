"""Every type in transformers' causal-LM mapping is read faithfully at every layer, or refused with a reason."""

import re
from collections import Counter
from pathlib import Path

import architectures
import families
import pytest
import tiny
import torch
import transformers as hf
from families import APART, CLASSES, NOT_BUILT, examine

README = Path(__file__).resolve().parent.parent / "README.md"
BUILT = [name for name in CLASSES if name not in NOT_BUILT]


@pytest.fixture(autouse=True)
def _quiet():
    """Tiny configs make transformers warn about their sizes."""
    before = hf.utils.logging.get_verbosity()
    hf.utils.logging.set_verbosity_error()
    yield
    hf.utils.logging.set_verbosity(before)


@pytest.mark.parametrize("name", CLASSES)
def test_every_layer_agrees_with_the_model_or_it_is_refused_with_a_reason(name):
    finding = examine(name)
    if finding.verdict == "not built":
        pytest.skip(finding.reason)
    assert finding.verdict in ("faithful", "refused"), finding
    if finding.verdict == "faithful":
        assert finding.error <= families.TOLERANCE
        assert finding.blocks >= 2
    else:
        assert finding.reason.startswith(finding.kind)
        assert re.search(
            r"expected|gives no number|could not follow|fails on \d+ ids: \S|changes earlier|misses", finding.reason
        )
        assert "\n" not in finding.reason and len(finding.reason) < 300


def test_none_is_wrong_and_nearly_all_with_one_residual_stream_are_faithful():
    verdicts = {name: examine(name).verdict for name in BUILT}
    assert [name for name, verdict in verdicts.items() if verdict == "wrong"] == []
    assert len(BUILT) >= 0.95 * len(CLASSES)
    single = Counter(verdict for name, verdict in verdicts.items() if name not in APART)
    assert single["faithful"] >= 0.95 * single.total(), single


def test_the_types_set_apart_are_refused():
    assert {examine(name).verdict for name in APART} == {"refused"}


@pytest.mark.parametrize("name", ["gemma2", "granite", "cohere", "inkling_text", "opt", "mamba", "phi", "zamba2"])
def test_a_built_model_spreads_its_logits_and_is_the_same_again(name):
    model, again = families.build(name), families.build(name)
    assert tiny.logit_spread(model) >= 3
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not any(module.training for module in model.modules())
    assert model.config._attn_implementation == "eager"


def test_caps_and_scales_of_the_logits_stand_away_from_neutral():
    seen = set()
    for name in BUILT:
        for key, value in families.config(name).get_text_config().to_dict().items():
            if re.fullmatch(r"final_logit.*|output_logit.*|logits?_(soft|scal|mup).*|lm_head_mult.*", key):
                assert value not in (None, 0, 1, 1.0), f"{name}: {key} = {value}"
                seen.add(key)
    assert {"final_logit_softcapping", "logits_soft_cap", "logit_scale", "logits_scaling", "lm_head_multiplier"} <= seen


def test_both_tied_and_untied_heads_are_among_the_models():
    assert families.is_tied(families.build("gemma2"))
    assert not families.is_tied(families.build("llama"))


# ---------------------------------------------------------------------------------------------------------------------
# What is written down
# ---------------------------------------------------------------------------------------------------------------------


def test_the_stored_table_says_what_is_found():
    """After a change, `python tests/architectures.py` writes it anew."""
    stored = {row["model_type"]: (row["class"], row["blocks"], row["verdict"]) for row in architectures.stored()}
    found = {row["model_type"]: (row["class"], row["blocks"], row["verdict"]) for row in architectures.rows()}
    assert stored == found
    assert all(row["reason"] for row in architectures.stored() if row["verdict"] != "faithful")


def test_the_readme_has_the_numbers_of_the_stored_table():
    text = " ".join(README.read_text(encoding="utf-8").split())
    assert re.findall(r"\d+ faithful, \d+ refused, \d+ wrong", text) == [architectures.line(architectures.stored())]


def test_the_table_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "architectures.csv"
    table = architectures.stored()
    architectures.write(table, path)
    assert path.read_bytes() == architectures.TABLE.read_bytes()
    with pytest.raises(ValueError, match="dict contains fields"):
        architectures.write([{"unknown": ""}], path)
    assert [found.name for found in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == architectures.TABLE.read_bytes()


@pytest.mark.parametrize(
    ("error", "text"), [(0.0, "<1e-6"), (9e-7, "<1e-6"), (1e-6, "<1e-5"), (5e-6, "<1e-5"), (2.0, "2e+00"), (None, "")]
)
def test_errors_are_written_as_the_power_of_ten_above(error, text):
    assert architectures.bound(error) == text
