"""What a lead's kit remembers of the runs that were submitted with it: where their base model is, for `fetch`.

No plan says it: at each site the model lies elsewhere.
"""

from __future__ import annotations

from pathlib import Path

from pf2lora import atomic
from pf2lora.errors import UserError
from pf2lora.parsing import read_json

FILE = "submitted.json"


def remember(kit: Path, run: str, model: str) -> None:
    """Note the base model that a run was submitted with; a folder as it is found from anywhere."""
    place = str(Path(model).resolve()) if Path(model).is_dir() else model
    atomic.write_json(kit / FILE, known(kit) | {run: place})


def model_of(kit: Path, run: str) -> str:
    """The base model of a run, if it was submitted from this kit with one; else a UserError."""
    found = known(kit).get(run)
    if not found:
        raise UserError(
            f"the base model of the run {run!r} is not known here: --model names your copy, a folder or one on the hub"
        )
    return found


def known(kit: Path) -> dict[str, str]:
    """All that is remembered."""
    file = kit / FILE
    found = read_json(file) if file.is_file() else {}
    return {str(run): str(model) for run, model in found.items()} if isinstance(found, dict) else {}
