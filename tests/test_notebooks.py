"""Every notebook of notebooks/, as a user runs it: with papermill, from another folder. A new one joins by being there.

What nbval checks, that the stored outputs are those of the code, is not repeated here.
"""

import base64
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from iglens_lab import execute

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def papermill(path, folder, **given):
    """Run it from the folder; returns the finished process and the notebook it wrote."""
    options = [part for name, value in given.items() for part in ("-p", name, str(value))]
    command = [sys.executable, "-m", "papermill", str(path), "out.ipynb", "--no-progress-bar", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    return done, nbformat.read(folder / "out.ipynb", as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@every_notebook
def test_stored_notebook_is_whole(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    assert [cell.execution_count for cell in code(notebook)] == list(range(1, len(code(notebook)) + 1))
    assert not any(output.output_type == "error" for cell in code(notebook) for output in cell.outputs)
    assert sum("parameters" in cell.metadata.get("tags", []) for cell in notebook.cells) == 1
    assert path.stat().st_size < 1_500_000
    assert str(ROOT) not in path.read_text(encoding="utf-8")


@every_notebook
def test_stored_notebook_shows_no_progress_bar_and_no_warning(path):
    outputs = [output for cell in code(nbformat.read(path, as_version=4)) for output in cell.outputs]
    assert not [output.text for output in outputs if output.get("name") == "stderr"]


@every_notebook
def test_runs_from_another_folder_with_other_parameters(path, tmp_path):
    given = nbformat.read(path, as_version=4).metadata["iglens"]["test_parameters"]
    assert given, "name a parameter other than the default in the notebook's metadata, iglens.test_parameters"
    done, notebook = papermill(path, tmp_path, **given)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sum("injected-parameters" in cell.metadata.get("tags", []) for cell in notebook.cells) == 1
    assert all(cell.execution_count for cell in code(notebook))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.ipynb"]  # nothing else is left behind


@every_notebook
def test_a_misspelt_parameter_fails_and_names_the_right_one(path, tmp_path):
    name = next(iter(nbformat.read(path, as_version=4).metadata["iglens"]["test_parameters"]))
    done, _ = papermill(path, tmp_path, **{name + "s": "x"})
    assert done.returncode != 0
    assert f"this notebook has no parameter '{name}s'; did you mean {name}?" in done.stderr


def test_pictures_of_the_readme_are_those_of_the_notebooks():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = {}
    for path in NOTEBOOKS:
        found |= execute.pictures(nbformat.read(path, as_version=4))
    assert found
    for name, content in found.items():
        assert (ROOT / "data" / name).read_bytes() == content
        assert f"](data/{name})" in readme


def test_executing_twice_gives_the_same_bytes(tmp_path):
    source = "import ipywidgets\nprint('a', flush=True)\nprint('b')\nipywidgets.IntSlider(description='x')"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source, id="one")])
    notebook.metadata["papermill"] = {"start_time": "now"}
    path = tmp_path / "made.ipynb"
    nbformat.write(notebook, path)
    first = nbformat.writes(execute.executed(path))
    path.write_text(first, encoding="utf-8")
    assert nbformat.writes(execute.executed(path)) == first
    assert "papermill" not in first and "iopub" not in first and '"version": "3' not in first
    assert "IntSliderModel" in first  # the widget's state is kept


def test_pictures_are_taken_from_the_tagged_cell():
    image = nbformat.v4.new_output("display_data", {"image/png": base64.b64encode(b"png").decode()})
    cell = nbformat.v4.new_code_cell("", id="a", outputs=[image], metadata={"tags": ["picture:a.png"]})
    assert execute.pictures(nbformat.v4.new_notebook(cells=[cell])) == {"a.png": b"png"}
