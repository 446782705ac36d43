"""The project as a whole: style, imports that go one way, and a README whose words hold."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff_finds_nothing(command):
    done = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def imported(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def test_the_core_needs_no_plotting_no_widgets_and_nothing_of_ours():
    top = {name.partition(".")[0] for name in imported(ROOT / "iglens_core.py")}
    assert top - set(sys.stdlib_module_names) <= {"torch", "transformers", "safetensors", "numpy", "pandas"}
    code = "import sys, iglens_core; print({'pandas', 'matplotlib', 'ipywidgets', 'iglens_lab'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_modules_are_importable_from_any_folder(tmp_path):
    modules = [f"iglens_lab.{path.stem}" for path in (ROOT / "notebooks" / "iglens_lab").glob("[!_]*.py")]
    code = f"import iglens_core, {', '.join(modules)}"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def block(heading: str) -> str:
    """The first fenced block below a heading of the README."""
    return re.search(rf"^## {heading}$.*?^```\w*\n(.*?)^```$", README, re.MULTILINE | re.DOTALL).group(1)


def test_readme_gives_one_command_to_run_and_one_to_test():
    run, test = block("Run").splitlines(), block("Test").splitlines()
    assert run == [
        "python -m pip install -r requirements.txt && "
        "python -m papermill notebooks/03_capital_of_vietnam.ipynb vietnam.ipynb"
    ]
    assert test == ['python -m pip install -r requirements.txt -e ".[test]" && python -m pytest']
    assert test[0] in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_readme_example_prints_what_it_says(tmp_path):
    code, printed = re.search(r"^```python\n(.*?)^```\n+```text\n(.*?)^```$", README, re.MULTILINE | re.DOTALL).groups()
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed


def test_every_pin_is_exact_and_the_project_itself_comes_last():
    lines = [line for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    assert lines[-1] == "-e ." and "torch==2.13.0" in lines
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines[:-1])


def test_every_notebook_stands_in_the_readme():
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert f"(notebooks/{path.name})" in README


def test_every_file_of_data_has_its_source_and_licence():
    text = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
    for path in (ROOT / "data").iterdir():
        assert path.name == "README.md" or f"`{path.name}`" in text
