"""Write data/architectures.csv: what became of every type in transformers' causal-LM mapping. Takes half a minute.

python tests/architectures.py
"""

from __future__ import annotations

import csv
import os
import warnings
from collections import Counter
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import families
import torch
import transformers as hf

TABLE = Path(__file__).resolve().parent.parent / "data" / "architectures.csv"
COLUMNS = ("model_type", "class", "blocks", "verdict", "log_prob_error", "reason", "transformers")


def bound(error: float | None) -> str:
    """The power of ten above an error, from 1e-6 on: the digits below differ between machines."""
    power = next((power for power in (-6, -5, -4, -3, -2, -1) if error is not None and error < 10.0**power), None)
    return "" if error is None else f"<1e{power}" if power else f"{error:.0e}"


def rows() -> list[dict[str, str]]:
    found = []
    for name in families.CLASSES:
        finding = families.examine(name)
        blocks = "" if finding.blocks is None else str(finding.blocks)
        values = (name, finding.kind, blocks, finding.verdict, bound(finding.error), finding.reason, hf.__version__)
        found.append(dict(zip(COLUMNS, values, strict=True)))
    return found


def line(table: list[dict[str, str]]) -> str:
    counts = Counter(row["verdict"] for row in table)
    return f"{counts['faithful']} faithful, {counts['refused']} refused, {counts['wrong']} wrong"


def stored() -> list[dict[str, str]]:
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(table: list[dict[str, str]], path: Path = TABLE) -> None:
    """The file appears whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(table)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    hf.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    table = rows()
    write(table)
    print(line(table))
