"""`pf2lora reproduce ranks`: do the learned ranks follow the clients' data? Read from finished runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pf2lora.atomic import make_folder, write_json, write_text
from pf2lora.cli.options import WRITTEN
from pf2lora.errors import UserError


def ranks(
    results: Annotated[
        list[Path], typer.Argument(help="Finished runs: run folders, result.json files, or folders of them.")
    ],
    method: Annotated[
        str, typer.Option("--method", help="Of this method (default: the first two-level one).")
    ] = "",
    out: Annotated[Path, typer.Option("--out", help="Folder of the result.", **WRITTEN)] = Path("runs/ranks"),
) -> None:
    """Beside the paper: learned ranks against how different and how hard a client's data is."""
    from pf2lora.reproduce.ranks import points, two_level
    from pf2lora.reproduce.ranks_page import draw, draw_layers, markdown, to_json
    from pf2lora.run.result import FILE, load_result

    files = [file for path in results for file in (sorted(path.rglob(FILE)) if path.is_dir() else [path])]
    if not files:
        raise UserError(f"{results[0]}: no {FILE} in it")
    found = []
    for file in files:
        result = load_result(file)
        known = two_level(result)
        if not known or (method and method not in known):
            raise UserError(f"{file}: no run of a method with client adapters ({', '.join(result.methods)})")
        found += points(result, method or known[0])
    make_folder(out)
    text = markdown(found, method or known[0])
    write_text(out / "ranks.md", text)
    write_json(out / "ranks.json", to_json(found, method or known[0]))
    typer.echo(text)
    for file in (out / "ranks.md", out / "ranks.json", *draw(found, out), *draw_layers(found, out)):
        typer.echo(file)
