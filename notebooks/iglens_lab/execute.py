"""Execute the notebooks in place, so that an unchanged notebook gives the same bytes: python -m iglens_lab.execute

Without arguments all notebooks of the folder above, else those that are named. Time stamps, the patch version of Python
and random widget ids are left out of the stored file. The picture of a cell tagged `picture:NAME` is also written to
data/NAME, for the README.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HOME = Path(__file__).resolve().parent.parent
WIDGETS = "application/vnd.jupyter.widget-state+json"
WIDGET_ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a fresh run in its own folder."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
        for key in ("execution", "papermill"):
            cell.metadata.pop(key, None)
    for key in ("widgets", "papermill"):
        notebook.metadata.pop(key, None)
    folder = {"metadata": {"path": str(path.resolve().parent)}}
    options = {"record_timing": False, "coalesce_streams": True, "store_widget_state": True, "timeout": 1200}
    NotebookClient(notebook, kernel_name="python3", resources=folder, **options).execute()
    notebook.metadata["language_info"] = {"name": "python"}
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    return _numbered(notebook, path.name)


def _numbered(notebook: nbformat.NotebookNode, name: str) -> nbformat.NotebookNode:
    """Widget ids by order of appearance instead of random ones, and their states sorted by id."""
    states = notebook.metadata.get("widgets", {}).get(WIDGETS, {}).get("state", {})
    shown = json.dumps([cell.get("outputs", []) for cell in notebook.cells]) + json.dumps(states)
    ids = [i for i in dict.fromkeys(WIDGET_ID.findall(shown)) if i in states]
    new = {old: hashlib.sha256(f"{name}:{i}".encode()).hexdigest()[:32] for i, old in enumerate(ids)}
    text = WIDGET_ID.sub(lambda found: new.get(found[0], found[0]), nbformat.writes(notebook))
    notebook = nbformat.reads(text, as_version=4)
    if states:
        kept = notebook.metadata["widgets"][WIDGETS]
        kept["state"] = dict(sorted(kept["state"].items()))
    return notebook


def pictures(notebook: nbformat.NotebookNode) -> dict[str, bytes]:
    """The PNG of every cell tagged picture:NAME, by NAME."""
    found = {}
    for cell in notebook.cells:
        for tag in cell.metadata.get("tags", []):
            if tag.startswith("picture:"):
                images = [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]
                found[tag.removeprefix("picture:")] = base64.b64decode(images[0])
    return found


def _write(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    os.replace(part, path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Execute notebooks in place, byte-stable.")
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all of the project's")
    for path in parser.parse_args().notebooks or sorted(HOME.glob("*.ipynb")):
        notebook = executed(path)
        nbformat.validate(notebook)
        _write(path, (nbformat.writes(notebook).rstrip("\n") + "\n").encode())
        for name, content in pictures(notebook).items():
            _write(HOME.parent / "data" / name, content)
        print(path)


if __name__ == "__main__":
    main()
