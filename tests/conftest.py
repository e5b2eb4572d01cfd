"""Fixtures that several test modules share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from small_federation import Small

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests never reach for a hub

SHARED = Path(os.environ.get("PF2LORA_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets; tests that need it are skipped where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"no data folder at {SHARED} (set PF2LORA_SHARED_DATA)")
    return SHARED


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tensors as small as a test's only wait for a second thread, above all on a busy machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def small(tmp_path: Path) -> Small:
    """A federation in one process whose sites have said hello."""
    from small_federation import make_plan, make_small

    made = make_small(tmp_path, make_plan("pf2lora"))
    made.greet()
    return made
