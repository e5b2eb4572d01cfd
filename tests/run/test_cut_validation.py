"""Validation rows whose prompts fill the window have no loss: nobody chooses, stops or sizes anything by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_tasks import write_generation_task, write_rows

import pf2lora

NAMES = ("north", "south")
LONG = {"prompt": "long " * 60, "target": ["x y"]}
SHORT = {"prompt": "Tea", "target": ["ok"]}


def settings(folder: Path, rows: dict[str, list[dict[str, Any]]], **changes: Any) -> dict[str, Any]:
    model, files = write_generation_task(folder, NAMES)
    chosen_by = [write_rows(folder / "validation" / f"{name}.jsonl", rows[name]) for name in NAMES]
    sizes = {"rounds": 3, "steps": 1, "batch_size": 2, "rank": 4, "max_length": 32, "max_new_tokens": 0}
    return {
        **sizes,
        "model": str(model),
        "clients": [str(file) for file in files],
        "validation": [str(file) for file in chosen_by],
        "task": "generation",
        "method": "pf2lora",
        "evaluate_every": 1,
        **changes,
    }


def test_a_run_whose_validation_rows_are_all_cut_has_none(tmp_path: Path) -> None:
    """Nor does `patience` stop it by a mean of nothing."""
    given = settings(tmp_path, {"north": [LONG] * 3, "south": [LONG]}, patience=1)
    result = pf2lora.federate(**given)
    (run,) = result.methods["pf2lora"].runs
    assert run.choices is None and [r.validation_loss for r in run.rounds] == [None] * 3
    for name, count in (("north", 3), ("south", 1)):
        line = f"client {name!r}: none of its {count} validation rows has a target within max_length"
        assert any(said.startswith(line) for said in run.warnings)
    assert [client.validation for client in result.clients] == [0, 0]


def test_one_clients_are_cut_and_the_other_chooses(tmp_path: Path) -> None:
    given = settings(tmp_path, {"north": [LONG] * 3, "south": [SHORT, LONG]}, patience=3)
    (run,) = pf2lora.federate(**given).methods["pf2lora"].runs
    assert [said for said in run.warnings if "nothing to choose by" in said and "'north'" in said]
    assert not [said for said in run.warnings if "'south'" in said and "nothing to choose by" in said]
    for record in run.rounds:
        assert record.validation_loss is not None
        assert record.validation_loss[0] is None and record.validation_loss[1] is not None
