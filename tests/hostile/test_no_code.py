"""No file that is read can bring code along: what the source may not say, and saved folders with a pickle in them."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from little_world import make_world, opened, write_model

from pf2lora.adapters.base_model import check_reachable
from pf2lora.errors import UserError
from pf2lora.parsing import read_tensors, xml_root

SOURCE = Path(__file__).parents[2] / "src" / "pf2lora"
FILES = sorted(SOURCE.rglob("*.py"))

CALLS = (
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "torch.save",
    "yaml.load",
    "np.load",
    "numpy.load",
)
MODULES = ("pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml", "imp")
XML = ("xml.etree", "xml.dom", "xml.sax", "xml.parsers", "lxml")
# Classes that a user names, and the names in two tables of our own.
IMPORTERS = {"registry.py", "__init__.py", "run/trackers.py"}


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf8")))


def name_of(call: ast.expr) -> str:
    return ast.unparse(call)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(SOURCE).as_posix())
def test_nothing_runs_what_a_file_holds(path: Path) -> None:
    place = path.relative_to(SOURCE).as_posix()
    for node in nodes(path):
        if isinstance(node, ast.Call):
            called = name_of(node.func)
            assert called not in CALLS, f"{place}:{node.lineno}: {called}"
            assert not any(word.arg == "trust_remote_code" for word in node.keywords), (
                f"{place}:{node.lineno}"
            )
            assert not any(
                word.arg == "shell" and ast.unparse(word.value) != "False" for word in node.keywords
            ), f"{place}:{node.lineno}: shell"
            if called.endswith("import_module"):
                assert place in IMPORTERS, f"{place}:{node.lineno}: imports what is named to it"
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module]
        for module in modules:
            assert module.split(".")[0] not in MODULES, f"{place}: {module}"
            if module.startswith(XML):
                assert place == "parsing.py", f"{place}: XML is parsed in parsing.py alone"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(SOURCE).as_posix())
def test_files_from_outside_are_parsed_in_one_place(path: Path) -> None:
    place = path.relative_to(SOURCE).as_posix()
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and name_of(node) in (
            "tomllib.loads",
            "tomllib.load",
            "expat.ParserCreate",
        ):
            assert place == "parsing.py", f"{place}:{node.lineno}"


class Trap:
    """Unpickled, it would write a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.touch, (self.file,))


def test_a_pickle_in_a_run_is_not_loaded(tmp_path: Path) -> None:
    from pf2lora import federate

    world, sprung = make_world(tmp_path / "world"), tmp_path / "sprung"
    federate(**world.settings(out=tmp_path / "run"))
    trap = pickle.dumps(Trap(sprung))
    clients = tmp_path / "run" / "state" / "clients"
    for name in ("north.pt", "north.bin", "north.pkl", "adapter_model.bin"):
        (clients / name).write_bytes(trap)
    run = opened(tmp_path / "run")
    run.client("north")
    (clients / "south.safetensors").write_bytes(trap)
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        run.client("south")
    run.model.remove()
    assert not sprung.exists()


def test_a_pickle_is_no_safetensors(tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    torch.save({"a": torch.zeros(1), "b": Trap(sprung)}, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        read_tensors(tmp_path / "a.safetensors")
    assert not sprung.exists()


def test_a_model_folder_with_pickled_weights_alone_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"no weights .*model\.safetensors"):
        check_reachable(str(folder))


@pytest.mark.parametrize(
    "declared",
    [
        "<!DOCTYPE a>",
        "<!DOCTYPE a SYSTEM 'file:///etc/passwd'>",
        "<!DOCTYPE a [<!ENTITY b SYSTEM 'file:///etc/passwd'>]>",
        "<!DOCTYPE a [<!ENTITY b 'x'>]>",
        "<!DOCTYPE a [<!ENTITY % b SYSTEM 'http://example.org/x'> %b;]>",
    ],
)
def test_xml_has_no_entities(declared: str) -> None:
    with pytest.raises(UserError, match="a DOCTYPE"):
        xml_root(f"<?xml version='1.0'?>{declared}<a>&b;</a>".encode(), "file")


def test_xml_is_not_deep() -> None:
    with pytest.raises(UserError, match="nested more than 64 deep"):
        xml_root(b"<a>" * 100_000, "file")
    assert xml_root(b"<a>" * 64 + b"</a>" * 64, "file").tag == "a"
