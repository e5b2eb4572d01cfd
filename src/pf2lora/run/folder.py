"""The folder of a run: what is written while it goes on.

    config.toml      every setting
    metrics.jsonl    one line per round, as it happens
    result.json      docs/result.md
    report.html      the report
    common/          the common adapter, a PEFT folder with its model card
    clients/NAME/    each client's adapter (common and own in one), a PEFT folder with its model card
    state/           x and each client's own y as this package loads them again (safetensors)

    checkpoints/     what an interrupted run goes on from (run/checkpoints.py); gone when it has ended

A run of several methods keeps common/, clients/ and state/ of each under methods/METHOD/ (first seed).
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath

import torch
from safetensors.torch import save
from torch import Tensor

from pf2lora.adapters.peft import ADAPTER_CONFIG, BASE_CONFIG, save_peft
from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.atomic import PARTIAL, append_line, check_writable, make_folder, write_bytes, write_json, writing
from pf2lora.core.layout import Layout
from pf2lora.data.files import READERS, kind_of
from pf2lora.errors import UserError, check_path, reading
from pf2lora.methods import METHODS
from pf2lora.run import checkpoints
from pf2lora.run.config import Config
from pf2lora.run.result import RoundRecord
from pf2lora.run.trial import Outcome
from pf2lora.run.workload import Workload

ASIDE = ".newcomer"  # where a newcomer's files wait until all of them are there
JOINED = "onboarding.json"  # beside the adapter of a client that joined later
ADAPTER_FILES = (
    "common/README.md",
    "common/adapter_*",
    "common/config.json",
    "clients/*/README.md",
    "clients/*/adapter_*",
    "clients/*/config.json",
    f"clients/*/{JOINED}",
    "state/run.json",
    "state/common.safetensors",
    "state/clients/*.safetensors",
)
RUN_FILES: tuple[str, ...] = (
    *("config.toml", "metrics.jsonl", "result.json", "report.html", "tensorboard/events.out.tfevents.*"),
    *ADAPTER_FILES,
    *(f"methods/*/{pattern}" for pattern in ADAPTER_FILES),
    *(f"{checkpoints.FOLDER}/{pattern}" for pattern in checkpoints.FILES),
)
RUN_FILES = (*RUN_FILES, *(f"{ASIDE}/{pattern}" for pattern in RUN_FILES))


def run_files(folder: Path) -> list[Path]:
    """The files in `folder` that a run wrote, and no others: a user's own `clients/` may well lie beside them."""
    found = [path for pattern in RUN_FILES for path in sorted(folder.glob(pattern))]
    # A model's config.json and a README.md are a run's only beside an adapter's.
    beside = (BASE_CONFIG, "README.md")
    found = [p for p in found if p.name not in beside or (p.parent / ADAPTER_CONFIG).exists()]
    return found + half_written(folder)


def half_written(folder: Path) -> list[Path]:
    """What a killed run was about to write (atomic.py)."""
    places = (PurePosixPath(pattern) for pattern in RUN_FILES)
    patterns = (str(p.parent / PARTIAL.format(name=p.name, process="[0-9]*")) for p in places)
    return [path for pattern in patterns for path in sorted(folder.glob(pattern))]


def clear_half_written(folder: Path) -> None:
    for path in half_written(folder):
        path.unlink(missing_ok=True)


def check_free(folder: Path, *, force: bool) -> None:
    """An output folder that holds another run is refused, unless it may be replaced."""
    with reading(check_path(folder), "output folder"):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"the output folder {str(folder)!r} is a file; choose another --out")
        held = run_files(folder)
    if held and not force:
        raise UserError(
            f"{str(folder)!r} holds another run ({held[0].relative_to(folder)}); choose another --out, or --force "
            f"to replace it"
        )
    check_no_data(folder)
    check_writable(folder)


def check_no_data(folder: Path) -> None:
    """An output folder that holds files of rows is somebody's data, and no place for a run."""
    with reading(folder, "output folder"):
        files = [p for p in sorted(folder.glob("*")) if kind_of(p) in READERS and p.name not in RUN_FILES]
    if files:
        raise UserError(
            f"the output folder {str(folder)!r} holds data ({files[0].name}); choose another --out, such as "
            f"{str(folder / 'run')!r}"
        )


def claim(folder: Path, *, force: bool) -> None:
    """Make the run folder. One that holds another run is left alone, unless forced; other files never go."""
    check_free(folder, force=force)
    with writing(folder):
        for path in run_files(folder):
            path.unlink()
            for parent in path.relative_to(folder).parents:  # deepest first; "." is the run folder itself
                if parent.name and not any((folder / parent).iterdir()):
                    (folder / parent).rmdir()
        make_folder(folder)


def append_metrics(folder: Path, method: str, seed: int, record: RoundRecord) -> None:
    """One line per round."""
    values = {name: value for name, value in asdict(record).items() if name != "ranks"}
    line = {"method": method, "seed": seed, "time": time.time()} | values
    append_line(folder / "metrics.jsonl", json.dumps(line, ensure_ascii=False))


@dataclass(frozen=True)
class SavedMethod:
    """What a run saves of a method: the names, what loading needs to know, and nobody's data.

    `method` is its name in the config; `shares_one_model`: all clients deploy the common adapter.
    """

    method: str
    seed: int
    task: str
    labels: list[str]
    clients: list[str]
    traits: list[str] = field(default_factory=list)  # of the task's rows, such as "pairs"
    shares_one_model: bool = False
    weights: str = ""  # a digest of the base model's
    revision: str | None = None  # the base model's on the hub


def place(folder: Path, config: Config, method: str) -> Path:
    """Where the adapters of the method that results call `method` are."""
    return folder if len(config.training.method) == 1 else folder / "methods" / method


def named(layout: Layout, flat: Tensor) -> dict[str, Tensor]:
    """The tensors of one client's flat row, by name."""
    views = layout.unpack(flat.detach().float().cpu()[None])
    return {name: t[0].contiguous().clone() for name, t in views.items()}


def save_client(
    where: Path,
    model: TwoLevelModel,
    name: str,
    common: Tensor,
    personal: Tensor,
    peft_type: str | None,
    base: str,
) -> None:
    """A client's PEFT folder, and its x and y as this package loads them again."""
    save_peft(where / "clients" / name, model, common, personal, peft_type, base)
    own = {f"personal.{n}": t for n, t in named(model.personal_layout, personal).items()} | {
        f"common.{n}": t for n, t in named(model.common_layout, common).items()
    }
    folder = where / "state" / "clients"
    write_bytes(make_folder(folder) / f"{name}.safetensors", save(own))


def save_common(where: Path, model: TwoLevelModel, common: Tensor, peft_type: str | None, base: str) -> None:
    """The common adapter: nothing of any client's own is in it."""
    personal = torch.zeros(model.personal_layout.size)
    save_peft(where / "common", model, common, personal, peft_type, base)
    state = make_folder(where / "state")
    write_bytes(state / "common.safetensors", save(named(model.common_layout, common)))


def save_description(where: Path, saved: SavedMethod) -> None:
    """What `load_run` needs to know of a method's adapters."""
    write_json(make_folder(where / "state") / "run.json", asdict(saved))


def save_outcome(out: Path, workload: Workload, asked: str, seed: int, outcome: Outcome) -> None:
    """The adapters of the method asked for: the common one, and what each client deploys unless that is the same."""
    config, task, kind = workload.config, workload.task, METHODS[asked]
    where = place(out, config, kind.name)
    shared = False
    if outcome.common is not None:
        save_common(where, outcome.model, outcome.common, task.peft_type, config.model.name)
        common = outcome.common.cpu()
        shared = kind.pooled and all(torch.equal(row, common) for row in outcome.common_of_client.cpu())
    if not shared:
        for k, name in enumerate(workload.names):
            save_client(
                where,
                outcome.model,
                name,
                outcome.common_of_client[k],
                outcome.personal_of_client[k],
                task.peft_type,
                config.model.name,
            )
    save_description(where, replace(description(workload, asked, seed), shares_one_model=shared))


def description(workload: Workload, asked: str, seed: int) -> SavedMethod:
    """What is remembered of a method and its workload."""
    return SavedMethod(
        asked,
        seed,
        workload.task.name,
        list(workload.task.labels),
        workload.names,
        workload.config.task.traits(workload.clients),
        shares_one_model=METHODS[asked].pooled,
        weights=workload.weights,
        revision=getattr(workload.base.config, "_commit_hash", None),
    )
