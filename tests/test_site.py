"""The documentation site: each page has its place, what is generated is whole, `make docs` finds what is broken."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import site_check

import pf2lora
from pf2lora.cli.command_page import commands, reference

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf8")


def in_navigation() -> set[Path]:
    """The pages that the contents lists name, from docs/index.md on."""
    found: set[Path] = set()
    waiting = [DOCS / "index.md"]
    while waiting:
        page = waiting.pop()
        found.add(page)
        for block in re.findall(
            r"^```\{toctree\}\n(.*?)^```$", page.read_text(encoding="utf8"), re.DOTALL | re.M
        ):
            for line in block.splitlines():
                name = (re.search(r"<(.+)>", line) or [None, line.strip()])[1]
                if name and not line.startswith(":"):
                    file = (page.parent / name).resolve()
                    waiting.append(file if file.suffix in (".md", ".ipynb") else file.with_suffix(".md"))
    return found


def test_every_page_has_its_place_in_the_navigation() -> None:
    """A new page is listed in docs/how-to.md, reference.md, explanation.md, tutorial.md or project.md."""
    pages = {
        *DOCS.glob("*.md"),
        *ROOT.glob("examples/*.md"),
        *ROOT.glob("examples/*/*.md"),
        *ROOT.glob("*.md"),
        *ROOT.glob("examples/*.ipynb"),
    }
    listed = in_navigation()
    assert sorted(str(p.relative_to(ROOT)) for p in pages - listed) == []
    assert sorted(str(p.relative_to(ROOT)) for p in listed - pages) == []


def cells(page: str, first: str) -> dict[tuple[str, str], str]:
    """A table's cells by their row's and column's heading; `first` begins the table's first line."""
    lines = page[page.index(first) :].split("\n\n")[0].splitlines()
    heads, *rows = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in lines)
    return {(row[0].strip("| "), head): cell for row in rows[1:] for head, cell in zip(heads, row)}


def test_what_to_expect_has_only_numbers_that_were_measured() -> None:
    part = text("docs/how-it-works.md").partition("## What to expect")[2].partition("\n## ")[0]
    measured = cells(text("docs/reproduction.md"), "|  | SST-2, 0.9 | SST-2, 100 rows | SST-2, 0.3 |")
    shown = cells(part, "| your clients |")
    kinds = {row for row, _ in shown}
    assert len(kinds) == 4
    for row in kinds:
        for method in ("Local", "HOMLoRA", "PF2LoRA, auto"):
            assert shown[row, method] == measured[method, shown[row, "task"]], (row, method)
    told = part.partition("Three more things")[2]
    assert [n for n in re.findall(r"\d+\.\d+", told) if n not in text("docs/reproduction.md")] == []


def test_the_api_page_has_every_public_name() -> None:
    page = text("docs/api.md")
    for name in pf2lora.__all__:
        assert name == "__version__" or re.search(rf"\b{name}\b", page), name
    for name, members in re.findall(r"autoclass:: pf2lora\.(\S+)\n +:members: (.*)", page):
        assert [m for m in members.split(", ") if not hasattr(getattr(pf2lora, name), m)] == []


def test_the_commands_page_has_every_command_with_its_own_options() -> None:
    import typer

    from pf2lora import cli

    assert text("docs/commands.md").count("<!-- commands -->") == 1
    page = reference()
    titles = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]
    listed = [" ".join(path) for path, _ in commands(typer.main.get_command(cli.app), ("pf2lora",))]
    assert titles == listed and {"pf2lora train", "pf2lora data show", "pf2lora federation join"} <= set(
        titles
    )
    assert (
        titles.count("pf2lora reproduce PRESET") == 1 and "pf2lora reproduce glue-roberta-base" not in titles
    )
    of_train, _, rest = page.partition("## pf2lora train")[2].partition("## pf2lora compare")
    assert (
        "`--dry-run`" in of_train
        and "every [setting](settings.md)" in of_train
        and "--rounds" not in of_train
    )
    assert "| `--kit` | required | The lead's kit. |" in rest
    assert "[dim]" not in page


def test_broken_links_and_what_would_be_fetched_are_found(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.html").write_text(
        '<h1 id="top">A</h1><a href="sub/b.html#here">b</a><a href="#top">t</a><a href="https://x.org/y">x</a>'
    )
    (tmp_path / "sub" / "b.html").write_text('<p id="here"></p><img src="../p.svg"><a href="../a.html">a</a>')
    (tmp_path / "p.svg").write_text("<svg/>")
    assert site_check.problems(tmp_path) == []
    (tmp_path / "sub" / "c.html").write_text(
        '<script src="https://cdn.org/x.js"></script><link rel="stylesheet" href="//f.org/x.css">'
        '<link rel="canonical" href="https://x.org/c"><a href="b.html#gone">b</a><a href="no.html">n</a>'
    )
    (tmp_path / "s.css").write_text('@font-face { src: url("https://fonts.org/x.woff2") }')
    assert site_check.problems(tmp_path) == [
        "sub/c.html: loads https://cdn.org/x.js",
        "sub/c.html: loads //f.org/x.css",
        "sub/c.html: b.html#gone: no such anchor",
        "sub/c.html: no.html: no such file",
        "s.css: loads from elsewhere",
    ]


@pytest.mark.slow
def test_the_site_builds_strictly_and_without_a_network(tmp_path: Path) -> None:
    """As `make docs` does; where this machine lets it, with no network at all."""
    pytest.importorskip("sphinx", reason="sphinx is not installed (pip install '.[docs]')")
    alone = ["unshare", "--net"] if shutil.which("unshare") else []
    if alone and subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        alone = []
    build = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "-c", "docs"]
    places = ["-d", str(tmp_path / "trees"), ".", str(tmp_path / "site")]
    done = subprocess.run([*alone, *build, *places], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert site_check.problems(tmp_path / "site") == []
