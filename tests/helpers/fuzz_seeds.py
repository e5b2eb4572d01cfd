"""Good files of every kind that is read from outside, to be broken."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from result_example import make_result, small, sparse

from pf2lora.core.layout import Entry, Layout
from pf2lora.core.method import State
from pf2lora.federation.protocol import messages, server_checkpoint
from pf2lora.federation.protocol.checkpoints import Checkpoint, CheckpointFolder
from pf2lora.federation.protocol.plan import Plan
from pf2lora.reproduce.presets import FOLDER as PRESETS
from pf2lora.run import config as configs
from pf2lora.run import snapshot


def lines(*rows: dict[str, Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows * 3).encode()


TEXTS = lines(
    {"text": "a film", "label": "good"}, {"text": "a plot", "label": 1}, {"text": "so", "label": "bad"}
)
PROMPTS = lines(
    {"prompt": "a", "target": ["b", "c"], "group": "x"}, {"prompt": "d", "target": "e", "group": "y"}
)
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}]
CONVERSATIONS = lines(
    {"messages": TURNS, "group": "x"},
    {"messages": [{"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]},
    {"messages": json.dumps(TURNS)},
)
INSTRUCTIONS = lines(
    {"instruction": "a", "input": "b", "output": "c", "system": "d"},
    {"instruction": "e", "input": None, "output": "f"},
    {"instruction": TURNS[:1], "output": TURNS[1:]},
)
ANSWER = {"text": "Nile", "answer_start": 4}
QUESTIONS = lines(
    {"context": "The Nile is long", "question": "which?", "answers": [ANSWER], "id": "1", "title": "t"},
    {
        "context": "The Nile",
        "question": "q",
        "answers": {"text": ["Nile"], "answer_start": [4]},
        "title": "u",
    },
    {"context": "The Nile", "question": "none", "answers": [], "title": "t"},
)
QAS = [{"id": str(i), "question": "q", "answers": [ANSWER], "is_impossible": False} for i in range(6)]
SQUAD = {"version": "v2.0", "data": [{"title": "t", "paragraphs": [{"context": "The Nile is", "qas": QAS}]}]}
WEBNLG = (
    b"<?xml version='1.0' encoding='utf-8'?><benchmark><entries><entry category='Food' eid='1'><modifiedtripleset>"
    b"<mtriple>a | b | c</mtriple></modifiedtripleset><lex comment='good' lid='1'>a text</lex></entry></entries>"
    b"</benchmark>"
)
BOMB = WEBNLG.replace(
    b"<benchmark>",
    b"<!DOCTYPE x [<!ENTITY a 'aaaaaaaaaa'><!ENTITY b '&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;'>"
    + b"".join(b"<!ENTITY %c '%s'>" % (99 + i, b"&%c;" % (98 + i) * 10) for i in range(8))
    + b"]><benchmark>",
    1,
).replace(b"a text", b"&j;")
E2E = b'mr,ref\n"name[Blue Spice], eatType[pub]","A pub."\n"name[Alimentum], area[centre]","In the centre."\n'
MODEL = '[model]\nname = "m"\nprecision = "float32"\n'
CONFIG = f'{MODEL}[adapter]\nrank = 4\n[training]\nmethod = ["pf2lora", "hetlora"]\nrounds = 3\nlr = 1e-3\n'
CONFIG += (
    'client_lr = "auto"\n[task]\nname = "classification"\nmax_length = 16\n[data]\nclients = ["a.jsonl"]\n'
)
CONFIG += 'test_ratio = 0.5\n[output]\ntitle = "t"\n[methods.hetlora]\npenalty = 1e-3\n'
SITE = b'name = "a"\nmodel = "m"\nstate = "s"\n[data]\nclients = ["a.jsonl"]\ntext = "t"\n'
SAVED = {
    "method": "pf2lora",
    "seed": 0,
    "task": "classification",
    "labels": ["a", "b"],
    "clients": ["n", "s"],
}

ENTRIES = (Entry("q", "A", (2, 3)), Entry("q", "B", (3, 2)), Entry("classifier", "head", (2, 3), "weight"))
LAYOUT = Layout(ENTRIES, sum(entry.size for entry in ENTRIES))
NUMBERS = {entry.name: torch.zeros(entry.shape) for entry in ENTRIES}
START = State(torch.zeros(1, 4), torch.zeros(1, 2), (torch.zeros(1, 4),))


# --- good files --------------------------------------------------------------------------------------------


def parquet_seeds() -> list[bytes]:
    import pyarrow as pa
    from pyarrow import parquet

    texts = ["a film", "a plot", "so it is"] * 3
    broken = pa.StringArray.from_buffers(
        9, pa.py_buffer(b"".join(i.to_bytes(4, "little") for i in range(10))), pa.py_buffer(b"\xff" * 9)
    )
    tables = [
        pa.table({"text": texts, "label": ["a", "b", "c"] * 3}),
        pa.table({"text": pa.array(texts).dictionary_encode(), "label": pa.array([0, 1, None] * 3)}),
        pa.table({"text": broken, "label": ["a", "b", "c"] * 3}),
        pa.table({"text": texts, "label": pa.array([2**62] * 9, pa.timestamp("us"))}),
        pa.table(
            {"text": texts, "label": [1, 2, 3] * 3, "d": pa.array([2**62] * 9, pa.timestamp("ns", "Mars/X"))}
        ),
        pa.table(
            {"text": texts, "label": [{"a": [1]}] * 9, "m": pa.array([[("k", 1)]] * 9, pa.map_("str", "i8"))}
        ),
        pa.Table.from_arrays([pa.array(texts), pa.array(texts)], names=["text", "text"]),
    ]
    found = []
    for table in tables:
        for options in ({}, {"compression": "zstd"}):
            file = io.BytesIO()
            parquet.write_table(table, file, **options)
            found.append(file.getvalue())
    return found


def archive(files: dict[str, bytes], kind: Any) -> bytes:
    out = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as packed:
            for name, data in files.items():
                packed.writestr(name, data)
    else:
        with tarfile.open(fileobj=out, mode=kind) as tar:
            for name, data in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def plan() -> Plan:
    config = configs.from_settings({"rounds": 3, "rank": 4, "method": ["pf2lora"]})
    return Plan.of(config, "trial", ("site-1", "site-2"), ("a", "b"))


def state_files() -> list[bytes]:
    """A checkpoint of a site as it writes it."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = CheckpointFolder(Path(name), "trial")
        folder.save(Checkpoint(3, 30, START, START.x.clone()))
        return [(Path(name) / "round-000003.safetensors").read_bytes()]


def server_files() -> list[bytes]:
    import tempfile

    facts = {"layout": messages.describe(LAYOUT), "version": "1"}
    knowledge = server_checkpoint.Knowledge.of(3, {"site-1": None}, {"site-1": facts})
    with tempfile.TemporaryDirectory() as name:
        server_checkpoint.write(Path(name), knowledge, torch.zeros(LAYOUT.size), [torch.zeros(2)])
        return [(Path(name) / "round-000003.safetensors").read_bytes()]


def message_seeds() -> list[bytes]:
    hello = {
        "kind": "hello",
        "round": 1,
        "model": "a" * 64,
        "labels": "b" * 64,
        "label_count": 2,
        "train_rows": 9,
    }
    hello |= {"test_rows": 3, "layout": messages.describe(LAYOUT), "engine": "2.9", "version": "0.1"}
    update = {"kind": "update", "round": 1, "steps": 2, "loss": 0.5, "served": {"rows": 2, "accuracy": 1.0}}
    asked = {"kind": "train", "round": 2, "measure_served": True}
    return [
        *(messages.encode(hello), messages.encode(update, NUMBERS), messages.encode(asked, NUMBERS)),
        *(
            messages.encode({"kind": "problem", "round": 1, "code": "data"}),
            messages.encode({"kind": "hello", "round": 1}),
        ),
    ]


def snapshot_seeds() -> list[bytes]:
    manifest = {"format": snapshot.FORMAT, "about": {"round": 3}, "files": {}}
    return [snapshot.encoded(manifest | {"sha256": snapshot.digest(manifest)})]


def preset_seeds() -> list[bytes]:
    return [path.read_bytes() for path in sorted(PRESETS.glob("*.toml"))[:4]]


@cache
def result_seeds() -> list[bytes]:
    found = (
        small(pf2lora=[0.5, 0.6], local=[0.4]),
        sparse(),
        make_result(clients=2, seeds=1, rounds=2, layers=2),
    )
    return [json.dumps(result).encode() for result in found]
