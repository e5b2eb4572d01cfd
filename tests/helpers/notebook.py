"""The example notebook, executed: `python tests/helpers/notebook.py` (`make notebook`) writes its outputs anew.

What a run prints depends on the model and the machine. The essentials do not: the code itself, and the kind and
shape of what each cell shows. Where these change, the stored outputs must be made anew.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "from-data-to-report.ipynb"
RECORDED = "outputs_of"  # in the metadata: the digest of the code that the stored outputs are of


def read(path: Path = NOTEBOOK) -> Any:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def digest(notebook: Any) -> str:
    """Of the code: outputs of other code are stale."""
    return hashlib.sha256("\0".join(cell.source for cell in code_cells(notebook)).encode()).hexdigest()[:16]


def executed(path: Path) -> Any:
    """The notebook after a run in its folder, without what a run says about itself (progress, times)."""
    notebook = read(path)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
    for cell in code_cells(notebook):
        cell.metadata.pop("execution", None)
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        RECORDED: digest(notebook),
    }
    return notebook


def essentials(cell: Any) -> list[tuple[str, ...]]:
    """What a cell shows, without its numbers: the kind of each output and the words in it."""
    found = []
    for output in cell.outputs:
        data = output.get("data", {"text/plain": output.get("text", "")})
        words = " ".join(re.findall(r"[^\W\d_]+", re.sub(r"\bNaN\b", "", str(data["text/plain"]))))
        found.append((output.output_type, *sorted(data), words))
    return found


if __name__ == "__main__":
    nbformat.write(executed(NOTEBOOK), NOTEBOOK)
    sys.stdout.write(f"{NOTEBOOK.name}: outputs written\n")
