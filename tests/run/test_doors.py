"""Doors: a method and a task from outside, as CONTRIBUTING writes them, through every way in; and the public names."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from little_world import World, command_line, make_world, opened, write_jsonl
from tiny import regression_problem

import pf2lora
from pf2lora.core.method import Method
from pf2lora.engines.local import Schedule, train
from pf2lora.errors import UserError
from pf2lora.methods.homlora import HomLoRA
from pf2lora.run.result import Result

CONTRIBUTING = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf8")


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The files of CONTRIBUTING in a folder that Python finds, as an installed package's would be."""
    folder = tmp_path_factory.mktemp("outside")
    for block in re.findall(r"```python\n(.*?)```", CONTRIBUTING, flags=re.DOTALL):
        name = re.match(r"# (\w+\.py)\n", block)
        assert name, "a whole file begins with its name"
        (folder / name[1]).write_text(block, encoding="utf8")
    declared = folder / "outsiders-1.0.dist-info"
    declared.mkdir()
    (declared / "METADATA").write_text("Metadata-Version: 2.1\nName: outsiders\nVersion: 1.0\n")
    (declared / "entry_points.txt").write_text(
        "[pf2lora.methods]\nfedsam = fedsam:FedSAM\n[pf2lora.tasks]\nrating = rating:RatingSettings\n"
    )
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def rated(folder: Path) -> list[str]:
    """Two clients' texts with stars."""
    files = []
    for name, best in (("north", 5.0), ("south", 4.0)):
        rows: list[Any] = [
            {
                "text": "the film was superb" if i % 2 else "the plot was tedious",
                "stars": best if i % 2 else 1,
            }
            for i in range(20)
        ]
        files.append(str(write_jsonl(folder / f"{name}.jsonl", rows)))
    return files


# --- a method ----------------------------------------------------------------------------------------------


def test_a_method_from_outside_in_all_its_ways(
    outside: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    fedsam = importlib.import_module("fedsam")
    by_class = pf2lora.federate(**world.settings(method=[fedsam.FedSAM, "homlora"], out=tmp_path / "one"))
    assert list(by_class.methods) == ["fedsam", "homlora"] and by_class.methods["fedsam"].label == "FedSAM"
    args = ["train", *world.base, "--method", "fedsam:FedSAM", "--out", tmp_path / "two"]
    assert command_line(monkeypatch, capsys, *args)[0] == 0
    by_path = pf2lora.load_result(tmp_path / "two")
    assert scores(by_path) == scores(by_class)
    assert opened(tmp_path / "one", "fedsam").client("north")[0].isfinite().all()
    assert opened(tmp_path / "two").saved.method == "fedsam:FedSAM"
    further = pf2lora.federate(**world.settings(method=fedsam.FedSAM), methods={"fedsam": {"rho": 1.0}})
    assert scores(further) != scores(by_class)


def scores(result: Result) -> list[float | None]:
    return result.methods["fedsam"].runs[0].served["loss"].per_client


def test_an_installed_packages_names_work_like_ours(outside: Path, world: World, tmp_path: Path) -> None:
    """In a process of its own: what is installed is looked up once."""
    code = (
        f"import sys; sys.path.insert(0, {str(outside)!r})\n"
        "from pf2lora.methods import METHODS; from pf2lora.tasks import TASKS; from pf2lora.cli import main\n"
        "assert 'fedsam' in METHODS and 'rating' in TASKS and 'torch' not in sys.modules\n"
        "from pf2lora.federation.protocol.plan import Plan; from pf2lora.run.config import from_settings\n"
        "plan = Plan.of(from_settings({'method': ['fedsam'], 'task': 'rating'}), 'first', ('north',), ())\n"
        "assert (plan.method, plan.config['task']['name']) == ('fedsam', 'rating')\n"
        f"sys.argv = ['pf2lora', 'train', *{[str(a) for a in world.base]!r}, '--method', 'fedsam', "
        f"'--out', {str(tmp_path / 'run')!r}]\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert list(pf2lora.load_result(tmp_path / "run").methods) == ["fedsam"]


def test_without_a_radius_it_is_homlora(outside: Path) -> None:
    fedsam = importlib.import_module("fedsam")
    ends = []
    ways: list[tuple[type[Method], dict[str, Any]]] = [
        (HomLoRA, {}),
        (fedsam.FedSAM, {"rho": 0.0}),
        (fedsam.FedSAM, {"rho": 1.0}),
    ]
    for kind, options in ways:
        p = regression_problem()
        method = kind(p.layout, lr=0.01, **options)
        *_, last = train(method, p.F, method.init(p.x, p.y), p.source, Schedule(rounds=3, steps=4))
        ends.append(last.common)
    assert torch.equal(ends[0], ends[1]) and not torch.allclose(ends[0], ends[2])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fedprocks", r"unknown method 'fedprocks'.*package\.module:Class"),
        ("nowhere:Method", r"the method 'nowhere:Method' cannot be imported: No module named 'nowhere'"),
        ("json:Method", r"cannot be imported: module 'json' has no attribute 'Method'"),
        ("json:loads", r"'json:loads' is no method"),
    ],
)
def test_what_is_no_method(world: World, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        pf2lora.federate(**world.settings(method=name))


def test_a_class_that_could_not_be_found_again_is_refused(world: World) -> None:
    class Hidden(HomLoRA):
        name = "hidden"

    with pytest.raises(UserError, match="must be defined at the top of a module"):
        pf2lora.federate(**world.settings(method=Hidden))


# --- a task ------------------------------------------------------------------------------------------------


def test_a_task_from_outside(
    outside: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    rating = importlib.import_module("rating")
    files = rated(tmp_path)
    settings = world.settings(clients=files, rounds=10, lr=0.02) | {"out": tmp_path / "one"}
    result = pf2lora.federate(**settings, task=rating.RatingSettings, rating="stars")
    losses = [r.train_loss[0] or 0 for r in result.methods["pf2lora"].runs[0].rounds]
    assert result.task == "rating" and losses[-1] < losses[0]
    error = result.served("error")["north"]
    args = ["evaluate", tmp_path / "one", files[0], "--client", "north", "--json"]
    code, out, _ = command_line(monkeypatch, capsys, *args)
    assert code == 0 and 0 < json.loads(out)["error"] < 5 and error is not None
    assert (tmp_path / "one" / "report.html").is_file()
    settings |= {"out": None, "rounds": 2, "client_lr": "auto", "validation_ratio": 0.2}
    chosen = (
        pf2lora.federate(**settings, task=rating.RatingSettings, rating="stars").methods["pf2lora"].runs[0]
    )
    assert chosen.choices and all(choice.validation_loss for choice in chosen.choices)
    assert chosen.rounds[-1].validation_loss and all(chosen.rounds[-1].validation_loss)
    (tmp_path / "run.toml").write_text('[task]\nname = "rating:RatingSettings"\nrating = "stars"\n')
    args = ["train", tmp_path / "run.toml", *world.base, "--clients", *files, "--out", tmp_path / "two"]
    kept = [a for a in args if a not in [str(p) for p in world.clients]]
    assert command_line(monkeypatch, capsys, *kept)[0] == 0
    assert pf2lora.load_result(tmp_path / "two").task == "rating"


# --- public names ------------------------------------------------------------------------------------------


def test_every_public_name_is_there_and_documented() -> None:
    for name in pf2lora.__all__:
        assert getattr(pf2lora, name) is not None
        assert name in dir(pf2lora)
        if callable(getattr(pf2lora, name)):
            assert getattr(pf2lora, name).__doc__, name
    assert {
        "federate",
        "Config",
        "Method",
        "METHODS",
        "load_run",
        "load_result",
        "build_report",
        "errors",
    } <= set(pf2lora.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = pf2lora.nothing


def test_importing_the_package_loads_no_torch() -> None:
    code = (
        "import sys, pf2lora; pf2lora.METHODS, pf2lora.TASKS, pf2lora.errors; print('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_a_result_is_read_by_name(world: World, tmp_path: Path) -> None:
    result = pf2lora.federate(**world.settings(method=["pf2lora", "local"], seeds=2, out=tmp_path / "run"))
    served = result.served("accuracy", "local")
    runs = result.methods["local"].runs
    assert served["south"] == pytest.approx(sum(r.served["accuracy"].per_client[1] or 0 for r in runs) / 2)
    assert served.mean == pytest.approx(sum(r.served["accuracy"].mean or 0 for r in runs) / 2)
    assert result.client("north")["loss"] == result.served("loss")["north"]
    assert result.before_averaging(method="local").mean is None
    table = result.table()
    assert list(table.index) == ["pf2lora", "local"]
    assert table.loc["local", "served"] == pytest.approx(result.served("accuracy", "local").mean)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pandas", None)  # without pandas, the same as a list
        rows = result.table()
        assert [row["method"] for row in rows] == ["pf2lora", "local"]
        assert rows[1]["served"] == pytest.approx(table.loc["local", "served"])
        assert "pf2lora" in result._repr_html_()
    assert "pf2lora" in result._repr_html_()
    assert pf2lora.load_result(tmp_path / "run") == result
    for wrong in (
        lambda: result.client("nobody"),
        lambda: result.served("f1"),
        lambda: result.served(None, "x"),
    ):
        with pytest.raises(UserError, match="unknown"):
            wrong()
