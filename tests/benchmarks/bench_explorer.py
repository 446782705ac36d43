"""How long a change of selection takes to be redrawn: python -m pytest tests/benchmarks/bench_explorer.py -s

It is Python's share, from the change of a control to the data that the browser draws, on the default model with an
answer of 16 tokens and known levels: a median of 20. A browser is not part of it.
"""

import itertools
import statistics
import time

import pytest

from iglens_lab.explorer import Explorer

ROUNDS, LIMIT = 20, 0.15  # seconds
PROMPT = "The capital of France is a city that many people visit. The capital of France is"


@pytest.fixture(scope="module")
def explorer():
    from iglens_lab.models import load_model

    explorer = Explorer(*load_model(), PROMPT, max_new_tokens=16, chat=False)
    assert len(explorer.results[0].tokens) == 16
    yield explorer
    explorer.close()


def moved(explorer, name, values):
    """The median time of a change of a control, and the redraws that it made."""
    control, trait = (explorer.view, "selected") if name == "selected" else (getattr(explorer, name), "value")
    for value in values:  # what they show is known afterwards
        setattr(control, trait, value)
    times, turns = [], itertools.cycle(values)
    for _ in range(ROUNDS):
        before, value = explorer.view.data, next(turns)
        start = time.perf_counter()
        setattr(control, trait, value)
        times.append(time.perf_counter() - start)
        assert explorer.view.data is not before, f"{name} = {value!r} was not redrawn"
    return statistics.median(times)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("layers", [(5, 25), (1, 30)]),
        ("stride", [3, 1]),
        ("single", ["10, 20", ""]),
        ("selected", [[[0, 3]], [[0, 5], [0, 8]]]),  # tokens of the prompt
        ("show", ["levels", "credits"]),
        ("scalar", ["logit", "prob"]),
        ("baseline", ["zero", "mean", "embedding"]),
        ("target", ["␣London", ""]),
    ],
)
def test_a_change_of_selection_is_redrawn_at_once(explorer, name, values):
    median = moved(explorer, name, values)
    print(f"\n{name}: {1000 * median:.1f} ms")
    assert median <= LIMIT


def test_a_token_of_the_prompt_seen_for_the_first_time(explorer):
    """The one change that reads the head anew: a row of the map more."""
    times = []
    for position in range(9, 13):
        start = time.perf_counter()
        explorer.view.selected = [[0, position]]
        times.append(time.perf_counter() - start)
    print(f"\na token of the prompt, first seen: {1000 * statistics.median(times):.1f} ms")
    assert statistics.median(times) <= LIMIT
