"""Many prompts with progress, and parameters that arrive as strings."""

from __future__ import annotations

import ast
import difflib
import re
import warnings
from collections.abc import Iterable, Iterator
from types import SimpleNamespace

from IPython import get_ipython
from tqdm.auto import tqdm

from iglens_core import Attribution, IGLensError, Readout, attribute, read

READ = ("answer", "chat", "scope", "max_new_tokens")  # options of read; the others are attribute's


def explain_many(model, tokenizer, prompts, *, stop: bool = False, **options) -> Iterator[Attribution | None]:
    """Explain one prompt after the other, with a progress bar: one Attribution for each, None for one that failed.

    A failure is warned of with the prompt's index and does not stop the others unless stop is True. options: those of
    iglens_core.explain, the same for all prompts.
    """
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
        raise IGLensError(f"prompts: expected a list of prompts, got {str(prompts)[:60]!r}; for one use explain()")
    readout = Readout(model)
    if isinstance(options.get("layers"), Iterator):  # the first prompt would use it up
        options["layers"] = list(options["layers"])
    reading = {name: options.pop(name) for name in READ if name in options}
    return _each(model, tokenizer, readout, prompts, stop, reading, options)


def _each(model, tokenizer, readout, prompts, stop, reading, options) -> Iterator[Attribution | None]:
    for i, prompt in enumerate(tqdm(prompts, desc="prompts")):
        try:
            result = attribute(readout, read(model, tokenizer, prompt, **reading), **options)
        except IGLensError as error:
            if stop:
                raise IGLensError(f"prompt {i}: {error}") from error
            warnings.warn(f"prompt {i} failed: {error}", stacklevel=2)
            result = None
        yield result


def _literal(value):
    """What a string stands for: papermill hands "[0,5]" over as text; other values as they are."""
    try:
        return ast.literal_eval(value.strip()) if isinstance(value, str) else value
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return value


def _text(name: str, value, optional: bool = False):
    """A text, unchanged. A number was a text once (007 became 7), so it is refused and not written back."""
    if optional and (value is None or value == "None"):
        return None
    if not isinstance(value, str):
        raise IGLensError(f"{name}: expected text, got {value!r}; papermill keeps text as it is with -r {name} '…'")
    return value


def _layers(name: str, value):
    value = _literal(value)
    whole = [value] if not isinstance(value, (list, tuple)) else list(value)
    if value is not None and not (whole and all(type(layer) is int for layer in whole)):
        raise IGLensError(
            f"{name}: expected None, a number of layers such as 6, or a list such as [0,5], got {value!r}"
        )
    return list(value) if isinstance(value, tuple) else value


def _names(name: str, value, optional: bool = False):
    """A list of names; one alone may stand without its brackets."""
    if optional and (value is None or value == "None"):
        return None
    value = _literal(value)
    names = [value] if isinstance(value, str) else list(value) if isinstance(value, (list, tuple)) else []
    if not (names and all(isinstance(one, str) for one in names)):
        raise IGLensError(f"{name}: expected names such as ['one', 'other'], got {value!r}")
    return names


def _whole(low: int, high: int):
    def reader(name: str, value):
        value = _literal(value)
        if type(value) is not int or not low <= value <= high:
            raise IGLensError(f"{name}: expected a whole number, {low} … {high}, got {value!r}")
        return value

    return reader


READERS = {
    "answer": lambda name, value: _text(name, value, optional=True),
    "baseline": _text,
    "count": _whole(1, 100_000),
    "interventions": _names,
    "kinds": lambda name, value: _names(name, value, optional=True),
    "layers": _layers,
    "max_new_tokens": _whole(1, 100_000),
    "model": lambda name, value: _text(name, value, optional=True),
    "n_prompts": _whole(1, 100_000),
    "other_prompt": lambda name, value: _text(name, value, optional=True),
    "prompt": _text,
    "seed": _whole(0, 2**31 - 1),
    "steps": _whole(1, 1000),
}


def _injected() -> set[str]:
    """The names that papermill's own cell assigned in the running notebook."""
    shell = get_ipython()
    cells = shell.user_ns.get("In", []) if shell else []
    trees = [ast.parse(cell) for cell in cells if re.match(r"# Parameters\n(?![\s\S]*^[%!])", cell, re.MULTILINE)]
    targets = [
        target for tree in trees for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
    ]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def parameters(**given) -> SimpleNamespace:
    """A notebook's parameters, each understood or refused: name=value as they stand in its tagged cell.

    Raises IGLensError on a value that is no such parameter's, and on a name that papermill injected but the notebook
    does not have, which would otherwise be ignored in silence.
    """
    for name in sorted(_injected() - set(given)):
        close = difflib.get_close_matches(name, given, 1)
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(sorted(given))}"
        raise IGLensError(f"this notebook has no parameter {name!r}; {hint}")
    if unknown := set(given) - set(READERS):
        raise IGLensError(f"parameters(): expected some of {', '.join(READERS)}, got {', '.join(sorted(unknown))}")
    return SimpleNamespace(**{name: READERS[name](name, value) for name, value in given.items()})
