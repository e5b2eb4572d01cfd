"""Mutants of the files that the numbers come from: which of them do the tests let pass? `make mutate` runs this.

mutmut makes the mutants in a copy of the tree under `build/mutation`, and runs for each, in a fork, the tests that
reach its function. A survivor must be in `mutations.toml` with its class and reason; any other fails. A second run goes
on where the first stopped, and tries such survivors again; names as arguments (`'pf2lora.methods.hetlora*'`) try those
mutants and no others.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parents[1]
COPY = HERE / "build" / "mutation"


class Mutant(NamedTuple):
    """One change of one function: `becomes` is the changed code, its lines joined."""

    name: str
    file: str
    function: str
    becomes: str
    status: str


def copy_tree() -> None:
    """The working tree's tracked and new files; what mutmut found so far stays."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=HERE, capture_output=True, text=True, check=True).stdout.split("\0")
    wanted = {n for n in names if n.startswith(("src/", "tests/", "pyproject.toml")) and (HERE / n).is_file()}
    for folder in ("src", "tests", "mutants/tests"):
        for path in (COPY / folder).rglob("*.py"):
            if str(path.relative_to(COPY)).removeprefix("mutants/") not in wanted:
                path.unlink()
    for name in wanted:
        (COPY / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(HERE / name, COPY / name)


def run(arguments: list[str]) -> None:
    """mutmut in this process and folder, the quickest tests first."""
    import pytest
    from mutmut import __main__ as mutmut
    from mutmut.runners.harness import PytestRunner
    from mutmut.state import state

    if not hasattr(pytest.Item, "_nodeid"):  # pytest 9.2 has it no longer; mutmut 3.8 asks for it
        pytest.Item._nodeid = property(lambda item: item.nodeid)  # type: ignore[attr-defined]
    in_any_order = PytestRunner._pytest_args_regular_run

    def quickest_first(self: Any, tests: Iterable[str]) -> list[str]:
        seconds = state().duration_by_test
        return in_any_order(self, sorted(tests, key=lambda t: (t.startswith("tests/run"), seconds.get(t, 0))))

    PytestRunner._pytest_args_regular_run = quickest_first
    mutmut.cli(["run", "--max-children", "1", *arguments], standalone_mode=False)


def mutants() -> Iterator[Mutant]:
    """All of them, as mutmut left them in this folder."""
    from mutmut.mutation.diff_apply import get_diff_for_mutant
    from mutmut.stats import status_by_exit_code

    for meta in sorted(Path("mutants").rglob("*.meta")):
        file = str(meta.relative_to("mutants")).removesuffix(".meta")
        for name, code in json.loads(meta.read_text())["exit_code_by_key"].items():
            status = {"no tests": "survived", "timeout": "killed"}.get(s := status_by_exit_code[code], s)
            becomes = ""
            if status != "killed":
                diff = get_diff_for_mutant(name, path=Path(file)).splitlines()
                added = [line[1:].strip() for line in diff if line[:1] == "+" and line[:3] != "+++"]
                becomes = " ".join(added)
            module, mangled = name.rsplit(".", 1)
            function = (
                mangled.rsplit("__mutmut_", 1)[0].removeprefix("x_").removeprefix("xǁ").replace("ǁ", ".")
            )
            yield Mutant(name, file, f"{module.removeprefix('pf2lora.')}.{function}", becomes, status)


def forget(known: Collection[tuple[str, str]]) -> None:
    """Survivors without a reason are tried again: a test may have come since."""
    again = {m.name for m in mutants() if m.status == "survived" and (m.function, m.becomes) not in known}
    for meta in Path("mutants").rglob("*.meta"):
        found = json.loads(meta.read_text())
        found["exit_code_by_key"] |= {n: None for n in found["exit_code_by_key"] if n in again}
        meta.write_text(json.dumps(found))


def main() -> None:
    known = {
        (entry["in"], becomes): entry["class"]
        for entry in tomllib.loads((HERE / "tests" / "mutations.toml").read_text("utf8"))["survivor"]
        for becomes in entry["becomes"]
    }
    copy_tree()
    os.chdir(COPY)
    forget(known)
    Path("mutants/mutmut-stats.json").unlink(missing_ok=True)  # a changed test may reach other functions now
    run(sys.argv[1:])
    counts: dict[str, Counter[str]] = {}
    unknown = []
    for mutant in mutants():
        kind = mutant.status
        if kind == "survived":
            kind = known.get((mutant.function, mutant.becomes), "unexplained")
        if kind not in ("killed", "equivalent", "tolerated"):
            unknown.append(f"{kind}: {mutant.name}\n    {mutant.function}: {mutant.becomes}")
        counts.setdefault(mutant.file, Counter())[kind] += 1
    print("\n".join(unknown))
    for file, found in counts.items():
        print(f"{file}: {found.total()} mutants: " + ", ".join(f"{n} {kind}" for kind, n in found.items()))
    print(f"all: {sum(c.total() for c in counts.values())} mutants: {sum(counts.values(), Counter())}")
    sys.exit(bool(unknown))


if __name__ == "__main__":
    main()
