"""The house can be walked through: arrows point one way, rooms are small, and methods are named in one place."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pf2lora.methods import METHODS

SOURCE = Path(__file__).parents[1] / "src" / "pf2lora"
FILES = sorted(SOURCE.rglob("*.py"))

ROOMS = {  # each room with those that it may look into; everybody may use what lies beside them all
    "core": set[str](),
    "data": {"core"},
    "engines": {"core"},
    "methods": {"core"},
    "adapters": {"core"},
    "tasks": {"core", "data", "engines", "adapters"},
    "run": {"core", "data", "engines", "adapters", "methods", "tasks", "report"},
    "report": {"methods", "run", "tasks"},
    "reproduce": {"core", "data", "engines", "methods", "adapters", "run"},
    "federation": {"core", "data", "engines", "adapters", "methods", "tasks", "run", "report"},
    "serve": {"core", "data", "adapters", "engines", "tasks", "run"},
    "cli": {"data", "methods", "tasks", "run", "report", "reproduce", "federation", "adapters", "serve"},
}
BESIDE = {"folder_lock", "errors", "settings", "registry", "atomic", "parsing"}


def imports(path: Path, *, types: bool = False) -> set[str]:
    """The modules of this package that a file imports, also inside functions; with `types` what only they need."""
    found: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf8"))
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in for_types and not types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "pf2lora":
            if node.module == "pf2lora":
                found |= {f"pf2lora.{alias.name}" for alias in node.names}
            else:
                found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("pf2lora.")}
    return found


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_point_one_way(room: str) -> None:
    for path in FILES:
        if room_of(path) != room:
            continue
        for module in imports(path):
            target = module.split(".")[1]
            allowed = target in {room, *ROOMS[room], *BESIDE} or target.startswith("__")
            assert allowed, f"{path.relative_to(SOURCE)} looks into {module}"


def test_every_room_is_known() -> None:
    assert {room_of(p) for p in FILES} - {"__init__", "__main__"} == ROOMS.keys() | BESIDE


@pytest.mark.parametrize("package", ["nvflare", "transformers"])
def test_packages_stay_in_their_rooms(package: str) -> None:
    """FLARE is one adapter deep, and the mathematics knows no transformers."""
    for path in FILES:
        text = path.read_text(encoding="utf8")
        if re.search(rf"^\s*(?:from|import) {package}\b", text, flags=re.MULTILINE):
            place = path.relative_to(SOURCE).as_posix()
            if package == "nvflare":
                assert place.startswith("federation/flare/"), place
            else:
                assert not place.startswith(("core/", "methods/", "data/")), place


def test_flare_is_at_arms_length() -> None:
    """One package names it, and one door leads there: `federation/engine.py`, which loads it when it is asked for.
    What only types need counts, too: what goes through the door is no engine's."""
    door, front = "federation/engine.py", "pf2lora.federation.flare"
    for path in FILES:
        place, text = path.relative_to(SOURCE).as_posix(), path.read_text(encoding="utf8")
        if place.startswith("federation/flare/"):
            continue
        assert place == "federation/__init__.py" or not re.search(r"\bnvflare\b", text), (
            f"{place} names FLARE"
        )
        called = {module for module in imports(path, types=True) if module.startswith(front)}
        assert not called or (place == door and called == {front}), f"{place} goes past the door: {called}"


def test_the_door_has_what_an_engine_must_do_and_loads_it_late() -> None:
    from pf2lora.federation.engine import Engine

    asked = {name for name in vars(Engine) if not name.startswith("_")}
    tree = ast.parse((SOURCE / "federation" / "flare" / "front.py").read_text(encoding="utf8"))
    (offered,) = (
        {name.value for name in node.value.elts if isinstance(name, ast.Constant)}
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List)
    )
    assert len(asked) > 15 and asked == offered
    line = "import sys, pf2lora.federation.engine; sys.exit(bool({'nvflare', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", line], check=False).returncode == 0


def test_methods_are_named_in_one_place() -> None:
    """No `name == "hetlora"` and no isinstance of a method outside its own file."""
    classes = {METHODS[name].__name__ for name in METHODS} | {"Bilevel", "Ranked"}
    for path in FILES:
        place = path.relative_to(SOURCE).as_posix()
        if place.startswith("methods/"):
            continue
        text = path.read_text(encoding="utf8")
        for name in METHODS:
            assert not re.search(rf"""[=!]= ?["']{name}["']""", text), f"{place} asks for {name!r} by name"
        for call in re.findall(r"(?:isinstance|issubclass)\([^)]*\)", text):
            assert not classes & set(re.findall(r"\w+", call)), f"{place}: {call}"


def test_no_file_is_too_long() -> None:
    root = SOURCE.parents[1]
    for path in [*FILES, *root.glob("tests/**/*.py"), *root.glob("benchmarks/*.py")]:
        lines = path.read_text(encoding="utf8").count("\n")
        assert lines <= 350, f"{path.relative_to(root)} has {lines} lines"


KERNELS = "short_attention_kernels"


def test_the_core_needs_little() -> None:
    """What a bare machine has: torch, transformers, numpy, safetensors; the rest is imported where it is used. Kernels
    cannot be written without Triton, so theirs is a module that is imported where it is used."""
    little = {"torch", "numpy", "safetensors", "transformers", "pf2lora"}
    for path in FILES:
        if room_of(path) not in ("core", "methods", "engines", "adapters", "data", "tasks", "run"):
            continue
        for node in ast.parse(path.read_text(encoding="utf8")).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for name in names:
                top = name.split(".")[0]
                assert name != f"pf2lora.adapters.{KERNELS}", f"{path.relative_to(SOURCE)} needs Triton"
                if (path.stem, top) == (KERNELS, "triton"):
                    continue
                assert top in little or top in sys_stdlib(), f"{path.relative_to(SOURCE)} imports {name}"


def sys_stdlib() -> frozenset[str]:
    return sys.stdlib_module_names


def test_the_walk_through_the_house_is_as_written() -> None:
    """CONTRIBUTING's walk of a row: the files it names are there, and they are as many as it says."""
    text = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf8")
    walk = text.split("## A walk through the house")[1].split("Around the walk")[0]
    said = re.search(r"You pass (\d+) files", walk)
    named: list[str] = []
    for line in walk.splitlines():
        folder = ""
        for path in re.findall(r"`([\w/]+\.py)`", line):
            folder = path.rpartition("/")[0] or folder
            named.append(path if "/" in path else f"{folder}/{path}")
    assert said and int(said[1]) == len(set(named)) <= 22
    assert [path for path in named if not (SOURCE / path).is_file()] == []
