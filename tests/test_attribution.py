"""The result: its checks, its table, its file, and the answer as a whole."""

import dataclasses
import json
import math
import os

import pytest
import tiny
import torch
from safetensors.torch import save_file
from tiny import N

from iglens_core import Attribution, CompletenessError, FaithfulnessError, IGLensError, explain

TENSORS = ("credits", "levels", "delta", "model_level", "positions", "token_ids", "target_ids")


@pytest.fixture(scope="module")
def result() -> Attribution:
    return explain(tiny.speaker(), tiny.tokenizer(), "the cat", answer=" sat on the mat")


def same(a: Attribution, b: Attribution) -> bool:
    """Equal to the last bit, NaN equal to NaN, types included."""
    for field in dataclasses.fields(Attribution):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if field.name in TENSORS:
            equal = x.dtype == y.dtype and x.shape == y.shape and x.numpy().tobytes() == y.numpy().tobytes()
        else:
            equal = x == y and type(x) is type(y)
        if not equal:
            return False
    return True


# ---------------------------------------------------------------------------------------------------------------------
# Labels and checks
# ---------------------------------------------------------------------------------------------------------------------


def test_labels_say_what_was_computed(result):
    assert (result.scalar, result.baseline, result.estimator, result.steps) == ("prob", "embedding", "observed", 1)
    assert (result.model, result.dtype) == ("LlamaForCausalLM", "float32")
    assert result.layers == (1, 2, 3)
    assert (result.credits.shape, result.levels.shape) == ((4, N), (4, N + 1))
    assert result.delta.shape == result.model_level.shape == result.target_ids.shape == (4,)


def test_a_result_cannot_be_changed(result):
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.steps = 2


def test_a_sound_result_passes_its_check_and_returns_itself(result):
    assert result.check() is result
    assert result.check(1e-6) is result
    assert 0 <= result.completeness_error <= 1e-6
    assert 0 <= result.faithfulness_error <= 1e-6


@pytest.mark.parametrize("sign", [1, -1])
def test_a_credit_that_is_off_is_a_completeness_error_with_the_numbers(result, sign):
    credits = result.credits.clone()
    credits[2, 1] += sign * 0.03
    broken = dataclasses.replace(result, credits=credits)
    assert broken.completeness_error == pytest.approx(0.03, abs=1e-5)
    with pytest.raises(CompletenessError, match=r"off by 3\.0e-02, allowed 1e-05"):
        broken.check()
    with pytest.raises(CompletenessError, match=r"off by 3\.0e-02, allowed 1e-03"):
        broken.check(1e-3)
    assert broken.check(0.04) is broken


def test_errors_of_opposite_sign_do_not_cancel(result):
    credits = result.credits.clone()
    credits[0, 0] += 0.03
    credits[1, 0] -= 0.03
    with pytest.raises(CompletenessError):
        dataclasses.replace(result, credits=credits).check()


def test_a_level_off_the_models_own_is_a_faithfulness_error_with_the_numbers(result):
    own = result.model_level.clone()
    own[1] += 0.02
    broken = dataclasses.replace(result, model_level=own)
    assert broken.faithfulness_error == pytest.approx(0.02, abs=1e-5)
    with pytest.raises(FaithfulnessError, match=r"off by 2\.0e-02, allowed 1e-05"):
        broken.check()
    assert broken.check(0.03) is broken


def test_a_result_that_was_never_compared_does_not_pass(result):
    blind = dataclasses.replace(result, model_level=torch.full((4,), math.nan))
    assert math.isnan(blind.faithfulness_error)
    with pytest.raises(FaithfulnessError, match="NaN"):
        blind.check()
    partly = result.model_level.clone()
    partly[1:] = math.nan
    assert dataclasses.replace(result, model_level=partly).check().faithfulness_error <= 1e-6


@pytest.mark.parametrize("field", ["credits", "delta", "levels"])
def test_nan_never_passes_a_check(result, field):
    broken = getattr(result, field).clone()
    broken.view(-1)[-1] = math.nan
    with pytest.raises((CompletenessError, FaithfulnessError)):
        dataclasses.replace(result, **{field: broken}).check()


@pytest.mark.parametrize(
    ("dtype", "passes", "fails"), [("float32", 9e-6, 2e-5), ("bfloat16", 1.5e-2, 3e-2), ("float16", 4e-3, 6e-3)]
)
def test_the_allowed_error_is_that_of_the_models_dtype(result, dtype, passes, fails):
    exact = dataclasses.replace(result, delta=result.credits.sum(1), model_level=result.levels[:, -1], dtype=dtype)
    dataclasses.replace(exact, model_level=exact.model_level + passes).check()
    with pytest.raises(FaithfulnessError):
        dataclasses.replace(exact, model_level=exact.model_level + fails).check()


# ---------------------------------------------------------------------------------------------------------------------
# The answer as a whole
# ---------------------------------------------------------------------------------------------------------------------


def product(model, ids: torch.Tensor, first: int) -> torch.Tensor:
    """[n + 1], the product over the tokens ids[first:] of the oracle's probabilities at every layer."""
    per_token = [tiny.levels(model, ids, t - 1, int(ids[t])) for t in range(first, len(ids))]
    return torch.stack(per_token).prod(0)


def test_the_whole_answer_moves_as_the_product_of_its_tokens(result):
    expected = product(tiny.speaker(), torch.tensor(tiny.tokenizer().encode("the cat sat on the mat")), 2)
    whole = result.answer()
    assert whole.levels.shape == (1, N + 1)
    assert torch.allclose(whole.levels[0], expected, rtol=1e-4, atol=0)
    assert torch.allclose(whole.credits[0], expected.diff(), rtol=1e-3, atol=1e-4 * float(expected.max()))
    assert float(whole.model_level[0]) == pytest.approx(float(expected[-1]), rel=1e-4)
    assert float(whole.delta[0]) == pytest.approx(float(expected[-1] - expected[0]), rel=1e-3)
    assert whole.tokens == (" sat on the mat",)
    assert (whole.layers, whole.scalar) == (result.layers, "prob")
    assert len(whole.positions) == len(whole.token_ids) == len(whole.target_ids) == 1
    assert whole.check() is whole


def test_the_whole_answer_in_nats_is_its_logarithm(result):
    expected = product(tiny.speaker(), torch.tensor(tiny.tokenizer().encode("the cat sat on the mat")), 2).log()
    whole = result.answer(log=True)
    assert whole.scalar == "log_prob"
    assert torch.allclose(whole.levels[0], expected, rtol=0, atol=1e-4)
    assert torch.allclose(whole.credits[0], expected.diff(), rtol=0, atol=2e-4)
    whole.check(1e-4)


def test_a_long_answer_underflows_as_a_product_and_not_as_a_logarithm(result):
    tiny_levels = torch.full((200, N + 1), 1e-4)
    tiny_levels[:, -1] = 1e-3
    many = torch.arange(200)
    long = dataclasses.replace(
        result, levels=tiny_levels, credits=tiny_levels.diff(dim=1), model_level=tiny_levels[:, -1],
        positions=many, token_ids=many, target_ids=many, tokens=("x",) * 200,
    )  # fmt: skip
    assert float(long.answer().levels[0, -1]) == 0
    assert float(long.answer(log=True).levels[0, -1]) == pytest.approx(200 * math.log(1e-3), rel=1e-6)
    assert float(long.answer(log=True).delta[0]) == pytest.approx(200 * math.log(10), rel=1e-6)


def test_an_answer_of_one_token_is_that_token():
    one = explain(tiny.speaker(), tiny.tokenizer(), "the cat", answer=" sat")
    whole = one.answer()
    assert torch.allclose(whole.levels, one.levels.double(), rtol=1e-6, atol=0)
    assert whole.tokens == one.tokens


def test_an_answer_is_compared_by_those_of_its_tokens_that_were(result):
    partly = result.model_level.clone()
    partly[1] = math.nan
    whole = dataclasses.replace(result, model_level=partly).answer()
    own = torch.where(partly.isnan(), result.levels[:, -1], partly).double().prod()
    assert float(whole.model_level[0]) == pytest.approx(float(own), rel=1e-6)
    off = partly.clone()
    off[2] *= 2
    doubled = dataclasses.replace(result, model_level=off).answer()
    assert float(doubled.model_level[0]) == pytest.approx(2 * float(own), rel=1e-6)


def test_an_answer_of_which_nothing_was_compared_is_not_compared(result):
    whole = dataclasses.replace(result, model_level=result.model_level * math.nan).answer()
    assert whole.model_level.isnan().all()
    assert float(whole.delta[0]) == pytest.approx(float(whole.credits.sum()), abs=1e-9)
    with pytest.raises(FaithfulnessError):
        whole.check()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target_ids": torch.tensor([7, 7, 7, 7])}, "the answer's own tokens as targets"),
        ({"positions": torch.tensor([1, 2, 4, 5])}, "contiguous positions"),
        ({"positions": torch.tensor([4, 3, 2, 1])}, "contiguous positions"),
        ({"estimator": "midpoint"}, "expected 'observed' and 'prob' or 'log_prob', got midpoint"),
        ({"scalar": "entropy"}, "got observed, entropy"),
    ],
)
def test_the_whole_answer_is_refused_where_it_has_no_meaning(result, change, words):
    with pytest.raises(IGLensError, match=words):
        dataclasses.replace(result, **change).answer()


# ---------------------------------------------------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------------------------------------------------


def test_the_table_has_a_row_for_each_token_and_layer(result):
    frame = result.to_frame()
    assert list(frame.columns) == ["position", "token_id", "token", "layer", "level", "credit", "scalar"]
    assert len(frame) == 4 * N
    for t in range(4):
        for j in range(N):
            row = frame.iloc[t * N + j]
            assert row["position"] == int(result.positions[t])
            assert row["token_id"] == int(result.target_ids[t])
            assert row["token"] == (" sat", " on", " the", " mat")[t]
            assert row["layer"] == j + 1
            assert row["level"] == float(result.levels[t, j + 1])
            assert row["credit"] == float(result.credits[t, j])
            assert row["scalar"] == "prob"
    totals = frame.groupby("position")["credit"].sum().to_numpy()
    assert totals == pytest.approx(result.delta.numpy(), abs=1e-6)


def test_the_table_names_the_targets_and_not_the_tokens_that_stand_there():
    other = explain(tiny.speaker(), tiny.tokenizer(), "the cat", answer=" sat on", targets=264, layers=[0, 2])
    frame = other.to_frame()
    assert frame["token_id"].tolist() == [264] * 6
    assert frame["token"].tolist() == [" cat"] * 6
    assert frame["layer"].tolist() == [0, 2, 3] * 2


# ---------------------------------------------------------------------------------------------------------------------
# The file
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("baseline", ["embedding", "zero"])
@pytest.mark.parametrize("name", ["result.safetensors", "ein Ergebnis — 結果", "no_suffix"])
def test_what_was_saved_is_loaded_to_the_last_bit(tmp_path, baseline, name):
    ids = [3 + 7 * i % 200 for i in range(80)]
    for options in ({"prompt": "the cat", "answer": "日本 <s>\n$x$"}, {"prompt": ids[:1], "answer": ids[1:]}):
        made = explain(tiny.speaker(), tiny.tokenizer(), **options, scope="all", baseline=baseline)
        for path in (tmp_path / name, str(tmp_path / name)):
            made.save(path)
            assert same(Attribution.load(path), made)
    assert os.listdir(tmp_path) == [name]


def test_float64_and_whole_answers_are_loaded_to_the_last_bit(tmp_path, result):
    double = explain(tiny.cast(tiny.speaker(), torch.float64), tiny.tokenizer(), "the cat", answer=" sat")
    for made in (double, result.answer(), result.answer(log=True)):
        made.save(tmp_path / "x")
        assert same(Attribution.load(tmp_path / "x"), made)


def test_views_are_saved_as_what_they_show(tmp_path, result):
    view = dataclasses.replace(result, credits=result.levels[:, 1:], delta=result.levels[:, 0])
    view.save(tmp_path / "x")
    assert same(Attribution.load(tmp_path / "x"), view)


def test_saving_again_replaces_the_file(tmp_path, result):
    result.save(tmp_path / "x")
    other = dataclasses.replace(result, credits=result.credits * 2)
    other.save(tmp_path / "x")
    assert same(Attribution.load(tmp_path / "x"), other)


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, result):
    result.save(tmp_path / "x")
    before = (tmp_path / "x").read_bytes()
    for broken in ({"scalar": object()}, {"credits": result.credits.to_sparse()}, {"levels": None}):
        with pytest.raises((TypeError, AttributeError, RuntimeError, ValueError)):
            dataclasses.replace(result, **broken).save(tmp_path / "x")
        assert os.listdir(tmp_path) == ["x"]
        assert (tmp_path / "x").read_bytes() == before
    assert same(Attribution.load(tmp_path / "x"), result)


def test_a_disk_that_is_full_leaves_the_old_file_and_nothing_else(tmp_path, result):
    resource = pytest.importorskip("resource")  # not on Windows
    result.save(tmp_path / "x")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # no file may grow beyond 100 bytes
    try:
        with pytest.raises(IGLensError, match=r"save: cannot write .*x"):
            dataclasses.replace(result, steps=2).save(tmp_path / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == ["x"]
    assert same(Attribution.load(tmp_path / "x"), result)


def test_a_save_that_cannot_take_its_place_leaves_nothing_behind(tmp_path, result):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "inside").write_text("kept", encoding="utf-8")
    with pytest.raises(IGLensError, match=r"save: cannot write .*x"):
        result.save(tmp_path / "x")
    assert os.listdir(tmp_path) == ["x"]
    assert os.listdir(tmp_path / "x") == ["inside"]


def test_saving_into_a_folder_that_does_not_exist_is_refused(tmp_path, result):
    with pytest.raises(IGLensError, match=r"folder .*nowhere"):
        result.save(tmp_path / "nowhere" / "x")


def _labels(result) -> dict:
    fields = [field.name for field in dataclasses.fields(Attribution) if field.name not in TENSORS]
    return {name: getattr(result, name) for name in fields}


def _write_bytes(content):
    return lambda path, result: path.write_bytes(content)


def _truncated(path, result):
    result.save(path)
    path.write_bytes(path.read_bytes()[:-9])


def _headless(path, result):
    result.save(path)
    path.write_bytes(path.read_bytes()[:20])


def _with(labels=None, drop=()):
    def write(path, result):
        tensors = {name: getattr(result, name).clone() for name in TENSORS if name not in drop}
        text = json.dumps(_labels(result)) if labels is None else labels
        save_file(tensors, path, {"iglens": text})

    return write


BAD_FILES = {
    "nothing": lambda path, result: None,
    "a folder": lambda path, result: path.mkdir(),
    "empty": _write_bytes(b""),
    "text": _write_bytes(b"position,token\n1,2\n"),
    "random bytes": _write_bytes(bytes(range(256)) * 8),
    "truncated": _truncated,
    "cut in its header": _headless,
    "another program's": lambda path, result: save_file({"weight": torch.ones(2)}, path),
    "another program's with metadata": lambda path, result: save_file({"w": torch.ones(2)}, path, {"format": "pt"}),
    "labels not JSON": _with(labels="{"),
    "labels not a dictionary": _with(labels="[1, 2]"),
    "a label missing": _with(labels=json.dumps({"layers": [1]})),
    "a label too many": _with(labels=json.dumps({"more": 1})),
    "a tensor missing": _with(drop=("delta",)),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_what_save_did_not_write_is_refused(tmp_path, result, what):
    path = tmp_path / "x.safetensors"
    BAD_FILES[what](path, result)
    with pytest.raises(IGLensError, match=r"load: .*x\.safetensors is not a file written by Attribution\.save"):
        Attribution.load(path)


def test_what_the_test_above_writes_is_loaded_when_nothing_is_wrong(tmp_path, result):
    _with()(tmp_path / "x", result)
    assert same(Attribution.load(tmp_path / "x"), result)
