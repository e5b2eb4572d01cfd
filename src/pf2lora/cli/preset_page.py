"""Every preset on one page, made from the presets: `python -m pf2lora.cli.preset_page > docs/presets.md`."""

from __future__ import annotations

from pf2lora.cli.reproduce import listed
from pf2lora.methods import METHODS
from pf2lora.reproduce.markdown import table
from pf2lora.reproduce.preset import Preset, Run
from pf2lora.reproduce.presets import load_preset, preset_names

HEAD = """# The paper's tables and figures

Made by `python -m pf2lora.cli.preset_page`; do not edit. `pf2lora reproduce` with a name trains what a table or figure
of the paper needs, prints the paper's numbers beside the run's own, and draws the figure.

```bash
pf2lora reproduce --list
pf2lora reproduce glue-roberta-base --dry-run                  # what would run, what is missing, how long it takes
pf2lora reproduce parameters                                   # counted in seconds, without weights
pf2lora reproduce glue-roberta-base --only sst2 --seeds 3      # the model and the data from the hub
pf2lora reproduce glue-roberta-base --only sst2 --model all-mpnet-base-v2 --data-dir data --precision bfloat16
pf2lora reproduce squad --print-config > mine.toml             # a copy to edit
pf2lora reproduce mine.toml
pf2lora reproduce squad --only squad-v1 --print-config > run.toml    # one run, as `pf2lora compare run.toml` takes it
pf2lora reproduce glue-roberta-base --only cola --grid         # rates searched first, on the paper's grid
```

- **Settings** are the paper's: ranks, rates per method and data set, batch B, local steps I, rounds R, λ, γ, r_min,
  r_max, h, clients, beams. Flags override them for all runs; what was changed, a model that stands in for the paper's
  above all, is said under the table. Where the paper is silent or contradicts itself, a comment in the TOML file
  (`src/pf2lora/presets`) or a note under the table says what was chosen. Numbers of tables and figures are counted in
  the paper's source, whose labels stand beside them.
- **Two points of measurement**: served (after averaging, what a client deploys) and before averaging; the paper does
  not say which of them its numbers are of.
- **Files** in `--out` (default `runs/NAME`): `NAME.md` to be read and pasted, `NAME.json` with everything, the figure
  as SVG and PNG, and `RUN/result.json` of each run ([result.md](result.md)), of which `pf2lora report` makes a page.
- **Interrupted?** The same command goes on: methods that are done are read from `RUN/parts`. Results of other
  settings are never overwritten or mixed in; `--force` does everything anew.
- **`--data-dir`** is the folder of the data set's official files, or one that holds a folder for each set (`glue_sst2`,
  `SST-2`, `e2e`, `webnlg2017`, `squad_v2`, …).
- **`--grid`** gives every method as many tries, twice the grid: first all values for `lr`, then all values for its
  second rate at the best `lr` (PF2LoRA's α, Per-FedAvg-LoRA's adaptation rate), or, for a method with one rate, as many
  more between the neighbours of its best. A try is the whole run with the first seed, scored without the test rows;
  tries are kept in `RUN/grid.json`.
"""


def page() -> str:
    """The page, in Markdown."""
    rows = [(f"`{name}`", what, place, needs) for name, what, place, needs in listed()]
    parts = [HEAD, table(("name", "what", "in the paper", "needs"), rows)]
    parts += [section(load_preset(name)) for name in preset_names()]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def section(preset: Preset) -> str:
    """One preset: its settings, its notes."""
    parts = [f"## `{preset.name}`: {preset.title}", f"{preset.source}."]
    if preset.counted:
        parts.append(table(("run", "what is counted"), [(f"`{run.name}`", run.label) for run in preset.runs]))
    else:
        parts.append(table(("runs", "clients", "R × I", "B", "r, r̃", "h", "rates"), _merged(preset)))
    if preset.grid is not None:
        parts.append("Grid: " + ", ".join(f"{value:g}" for value in preset.grid.values) + ".")
    parts.append("\n".join(f"- {note}" for note in preset.notes))
    return "\n\n".join(part for part in parts if part)


def _merged(preset: Preset) -> list[tuple[str, ...]]:
    """A line for the runs that differ in nothing that is shown."""
    found: dict[tuple[str, ...], list[str]] = {}
    for run in preset.runs:
        found.setdefault(_settings(run), []).append(f"`{run.name}`")
    return [(", ".join(names), *settings) for settings, names in found.items()]


def _settings(run: Run) -> tuple[str, ...]:
    training, adapter, data = run.config.training, run.config.adapter, run.config.data
    return (
        str(data.num_clients),
        f"{training.rounds} × {training.steps}",
        str(training.batch_size),
        f"{adapter.rank}, {adapter.client_rank}",
        "–" if data.heterogeneity is None else f"{data.heterogeneity:g}",
        "; ".join(_rates(run, name) for name in training.method),
    )


def _rates(run: Run, method: str) -> str:
    """`HETLoRA lr 0.002, penalty 0.005, …`."""
    table = run.config.methods.get(method, {})
    given = ", ".join(
        f"{key} {value:g}" for key, value in sorted(table.items()) if isinstance(value, int | float)
    )
    return f"{METHODS[method].label} {given}"


if __name__ == "__main__":
    print(page(), end="")
