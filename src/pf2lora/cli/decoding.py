"""How texts are written, for the commands that write some: by the run's settings, but for what is given."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pf2lora.errors import UserError

if TYPE_CHECKING:
    from pf2lora.run.saved import LoadedRun

Beams = Annotated[
    int | None, typer.Option("--beams", min=1, help="Beam width; 1 is greedy (default: the run's).")
]
MaxNewTokens = Annotated[
    int | None, typer.Option("--max-new-tokens", min=1, help="Longest text in tokens (default: the run's).")
]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", help="Above 0: tokens are drawn, not searched for (default: the run's)."),
]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", help="With a temperature: from the likeliest tokens with this share together."),
]
Seed = Annotated[
    int | None, typer.Option("--sampling-seed", min=0, help="With a temperature: another seed, other texts.")
]


def set_decoding(
    run: LoadedRun,
    *,
    beams: int | None = None,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    sampling_seed: int | None = None,
) -> None:
    """Let the run's task write so; what is None stays as the run has it. Beams that are given end a run's drawing, a
    temperature that is given ends its search."""
    from pf2lora.tasks.generation.task import Generation

    given: dict[str, Any] = {
        "beams": beams,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "sampling_seed": sampling_seed,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return
    if not isinstance(run.task, Generation):
        raise UserError(
            f"--{next(iter(given)).replace('_', '-')} is for texts, and this run is of {run.task.name}"
        )
    ended: dict[str, Any] = {"temperature": 0.0} if beams is not None and temperature is None else {}
    ended |= {"beams": None} if temperature and beams is None else {}
    run.task.settings = replace(run.task.settings, **ended | given)
