"""Shared settings: no network, no windows, the fast tests first."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import matplotlib
import pytest

matplotlib.use("Agg")  # not by MPLBACKEND: the notebooks' kernels would inherit it


def _rank(item) -> int:
    """0 for fast tests, 1 for those that load the default model, 2 for notebooks."""
    if item.path.suffix == ".ipynb" or "notebook" in item.path.name:
        return 2
    return int("smol" in getattr(item, "fixturenames", ()) or item.path.name == "test_models.py")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    items.sort(key=_rank)  # stable: the cells of a notebook stay in order
    if "slow" not in config.getoption("markexpr"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))


def pytest_collection_finish(session):
    """Notebooks find the default model and its translators in place: a first fetch would show in their outputs."""
    if any(_rank(item) == 2 for item in session.items) and not session.config.option.collectonly:
        from iglens_lab import models, translators

        translators.for_model(*models.load_model())


@pytest.fixture(autouse=True)
def _threads(request):
    """One thread for tiny matrices: more only wait for each other on a busy machine."""
    import torch

    before = torch.get_num_threads()
    if "smol" not in request.fixturenames:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smol():
    """(model, tokenizer, readout) of the default model, float32."""
    from iglens_core import Readout
    from iglens_lab.models import load_model

    model, tokenizer = load_model()
    return model, tokenizer, Readout(model)
