"""What reads files from outside: each with good files to begin with, how they are broken, and how they are read."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzz_mutations import (
    Mutation,
    bytes_changed,
    json_changed,
    jsonl_changed,
    lines_changed,
    tensors_changed,
)
from fuzz_seeds import (
    BOMB,
    CONFIG,
    CONVERSATIONS,
    E2E,
    INSTRUCTIONS,
    LAYOUT,
    NUMBERS,
    PROMPTS,
    QUESTIONS,
    SAVED,
    SITE,
    SQUAD,
    START,
    TEXTS,
    WEBNLG,
    archive,
    message_seeds,
    parquet_seeds,
    plan,
    preset_seeds,
    result_seeds,
    server_files,
    snapshot_seeds,
    state_files,
)
from safetensors.torch import save

from pf2lora.data.client import check_apart, check_name
from pf2lora.data.loading import load_clients
from pf2lora.data.settings import DataSettings
from pf2lora.errors import UserError
from pf2lora.federation.protocol import messages, server_checkpoint
from pf2lora.federation.protocol.allow_list import AllowList, read_request
from pf2lora.federation.protocol.checkpoints import CheckpointFolder
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.policy import Policy, read_policy, to_toml
from pf2lora.federation.protocol.run_status import read_status
from pf2lora.federation.protocol.site_setup import read_site_file
from pf2lora.federation.protocol.wire import Wire
from pf2lora.methods.homlora import HomLoRA
from pf2lora.parsing import read_json, read_tensors, read_text
from pf2lora.report import render
from pf2lora.reproduce.presets import parse as parse_preset
from pf2lora.run import config as configs
from pf2lora.run import snapshot
from pf2lora.run.decode import decode
from pf2lora.run.folder import SavedMethod
from pf2lora.run.result import load_result
from pf2lora.run.saved import flat, read_description
from pf2lora.tasks.classification.settings import ClassificationSettings
from pf2lora.tasks.generation.e2e import TEST, TRAIN, read_e2e
from pf2lora.tasks.generation.settings import GenerationSettings
from pf2lora.tasks.generation.webnlg import read_webnlg
from pf2lora.tasks.question_answering.scores import evaluate
from pf2lora.tasks.question_answering.settings import QuestionAnsweringSettings
from pf2lora.tasks.settings import TaskSettings

Read = Callable[[Path], object]


@dataclass(frozen=True)
class Target:
    """`read` is given the broken file, whose place below a folder is `file`. A UserError or one of `refusals` refuses
    it; it may also be taken. Anything else is a finding."""

    file: str
    seeds: Callable[[], list[bytes]]
    read: Read
    mutations: tuple[Mutation, ...]
    refusals: tuple[type[Exception], ...] = (UserError,)
    weight: int = field(default=1)


# --- reading -----------------------------------------------------------------------------------------------


def rows(task: TaskSettings[Any]) -> Read:
    def read(path: Path) -> object:
        return load_clients(task, DataSettings(clients=(str(path),)), 0)

    return read


def read_config(path: Path) -> None:
    """A config that is taken can be written and read again."""
    config = configs.from_toml(path)
    again = configs.from_dict(tomllib.loads(configs.to_toml(config)))
    assert again == config, "another config after it was written and read"


def read_preset(path: Path) -> object:
    return parse_preset("mine", configs.read_toml(path), str(path))


def read_adapter(path: Path) -> object:
    return flat(LAYOUT, read_tensors(path)[0], path)


def read_report(path: Path) -> object:
    return render([load_result(path)])


def read_squad_score(path: Path) -> object:
    content = read_json(path)
    if not isinstance(content, dict):
        raise UserError("an object is needed")
    return evaluate(content, {"0": "Nile", "1": ""}, {str(i): 0.5 for i in range(6)})


def read_checkpoint(path: Path) -> object:
    return CheckpointFolder(path.parent, "trial").newest_before(4, START)


def read_message(path: Path) -> None:
    data = path.read_bytes()
    for check in (
        read_request,
        AllowList(HomLoRA(LAYOUT), ("accuracy",), Wire()).check,
        AllowList(None, None, Wire()).check,
    ):
        try:
            check(data)
        except messages.Malformed as error:
            if not str(error).isprintable():
                raise ValueError("more than one line") from error


def read_snapshot(path: Path) -> None:
    found = snapshot.opened(path.parent)
    for name in found.digests:
        snapshot.unpacked(found.read(name))


def read_unpacked(path: Path) -> object:
    return snapshot.unpacked(path.read_bytes())


def read_names(path: Path) -> None:
    """Whatever a client is called, its folder is one below the clients' folder."""
    root, names = Path("/run/clients"), [line for line in read_text(path).split("\n") if line]
    for name in names:
        check_name(name, path)
        place = root / f"{name}.safetensors"
        assert place.parent == root and len(place.name.encode()) <= 255 and (root / name).parent == root
    check_apart(names, path)


def read_clients_of_run(path: Path) -> object:
    return read_description(path.parents[1])


# --- all of them ---------------------------------------------------------------------------------------------

TEXT, STRUCTURE = (bytes_changed, lines_changed), (bytes_changed, json_changed, json_changed)
ROWS, TENSORS = (
    (bytes_changed, lines_changed, jsonl_changed, jsonl_changed),
    (bytes_changed, tensors_changed, tensors_changed),
)
CLASSES, QUESTION, PROMPT = ClassificationSettings(), QuestionAnsweringSettings(), GenerationSettings()
TARGETS: dict[str, Target] = {
    "config": Target("c/config.toml", lambda: [CONFIG.encode()], read_config, TEXT, weight=3),
    "preset": Target("mine.toml", preset_seeds, read_preset, TEXT),
    "site": Target("site.toml", lambda: [SITE], read_site_file, TEXT),
    "policy": Target("policy.toml", lambda: [to_toml(Policy()).encode()], read_policy, TEXT),
    "jsonl": Target("a.jsonl", lambda: [TEXTS], rows(CLASSES), ROWS, weight=3),
    "json": Target(
        "a.json",
        lambda: [json.dumps([json.loads(x) for x in TEXTS.splitlines()]).encode()],
        rows(CLASSES),
        STRUCTURE,
    ),
    "csv": Target(
        "a.csv", lambda: [b'text,label\n"a ""film",x\nb,y\nc,x\nd,y\ne,x\n'], rows(CLASSES), TEXT, weight=2
    ),
    "tsv": Target("a.tsv", lambda: [b"sentence\tlabel\na\t1\nb\t0\nc\t1\nd\t0\ne\t1\n"], rows(CLASSES), TEXT),
    "parquet": Target("a.parquet", parquet_seeds, rows(CLASSES), (bytes_changed,), weight=2),
    "prompts": Target("a.jsonl", lambda: [PROMPTS], rows(PROMPT), ROWS),
    "conversations": Target("a.jsonl", lambda: [CONVERSATIONS, INSTRUCTIONS], rows(PROMPT), ROWS),
    "questions": Target("a.jsonl", lambda: [QUESTIONS], rows(QUESTION), ROWS),
    "squad": Target("a.json", lambda: [json.dumps(SQUAD).encode()], rows(QUESTION), STRUCTURE),
    "squad-score": Target("a.json", lambda: [json.dumps(SQUAD).encode()], read_squad_score, STRUCTURE),
    "webnlg": Target(
        "train/a.xml", lambda: [WEBNLG, BOMB], lambda p: read_webnlg(p.parents[1], "train"), TEXT, weight=2
    ),
    "webnlg-tar": Target(
        "a.tar",
        lambda: [archive({"train/a.xml": WEBNLG}, kind) for kind in ("w", "w:gz", "w:xz", "w:bz2")],
        lambda p: read_webnlg(p, "train"),
        (bytes_changed,),
    ),
    "e2e": Target("trainset.csv", lambda: [E2E], lambda p: read_e2e(p.parent, TRAIN), TEXT),
    "e2e-zip": Target(
        "a.zip", lambda: [archive({TEST: E2E}, "zip")], lambda p: read_e2e(p, TEST), (bytes_changed,)
    ),
    "run": Target("state/run.json", lambda: [json.dumps(SAVED).encode()], read_clients_of_run, STRUCTURE),
    "adapter": Target("a.safetensors", lambda: [save(NUMBERS)], read_adapter, TENSORS, weight=2),
    "result": Target("result.json", result_seeds, load_result, STRUCTURE, weight=2),
    "report": Target("result.json", result_seeds, read_report, (json_changed,)),
    "message": Target("message", message_seeds, read_message, TENSORS, weight=3),
    "plan": Target(
        "plan", lambda: [plan().to_json().encode()], lambda p: Plan.from_json(read_text(p)), STRUCTURE
    ),
    "status": Target(
        "status.json",
        lambda: [b'{"state": "running", "round": 1, "rounds": 3}'],
        lambda p: read_status(p.parent),
        STRUCTURE,
    ),
    "site-checkpoint": Target("round-000003.safetensors", state_files, read_checkpoint, TENSORS, weight=2),
    "server-checkpoint": Target("round-000003.safetensors", server_files, server_checkpoint.read, TENSORS),
    "snapshot": Target("manifest.json", snapshot_seeds, read_snapshot, STRUCTURE, (snapshot.Damaged,)),
    "snapshot-file": Target(
        "a.safetensors",
        lambda: [snapshot.packed(NUMBERS, {"round": 3, "which": [["served", 1]]})],
        read_unpacked,
        TENSORS,
        (snapshot.Damaged,),
    ),
    "names": Target("names", lambda: ["north\nKlinik Süd\nclient-2".encode()], read_names, TEXT),
    "saved": Target(
        "run.json",
        lambda: [json.dumps(SAVED).encode()],
        lambda p: decode(SavedMethod, read_json(p), str(p)),
        STRUCTURE,
    ),
}
