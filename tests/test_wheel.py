"""What is built is what is used: the wheel has every file of the package, and works where the source is not."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "pf2lora"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what git has: what happens to lie beside it must not help."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in listed.decode().split("\0"):
        if name.startswith("src/") or name in ("pyproject.toml", "README.md", "LICENSE"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
    ]
    subprocess.run([*pip, str(out), str(source)], check=True)
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel; its dependencies are those here, lent by a path file."""
    home = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    own = home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    lent = tmp_path_factory.mktemp("lent")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "pf2lora" not in path.name and path.suffix != ".pth":  # an editable install would be found first
            (lent / path.name).symlink_to(path)
    (own / "lent.pth").write_text(f"{lent}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
    return home / "bin" / "python"


def run(python: Path, *args: str, folder: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV_"))}
    done = subprocess.run(
        [str(python), *args], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    wanted = {
        f"pf2lora/{path.relative_to(PACKAGE)}"
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert inside == wanted


def test_it_works_where_the_source_is_not(python: Path, tmp_path: Path) -> None:
    where = run(python, "-c", "import pf2lora; print(pf2lora.__file__)", folder=tmp_path)
    assert Path(where.strip()).is_relative_to(python.parents[1])
    command = str(python.parent / "pf2lora")
    version = run(python, command, "--version", folder=tmp_path).strip()
    assert version == run(python, "-m", "pf2lora", "--version", folder=tmp_path).strip()
    listed = run(python, command, "reproduce", "--list", folder=tmp_path)
    assert "glue-roberta-base" in listed  # the presets came along


@pytest.mark.slow
def test_the_demo_runs_from_the_wheel(python: Path, tmp_path: Path) -> None:
    out = run(python, str(python.parent / "pf2lora"), "demo", "--out", "demo", folder=tmp_path)
    assert "report: demo/report.html" in out and (tmp_path / "demo" / "result.json").is_file()
