"""A whole small world to train in: a saved model with its tokenizer, and clients' files of data that can be learned."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from pf2lora import cli
from pf2lora.run.saved import LoadedRun, load_run

GOOD, BAD = ("superb", "lovely", "brilliant"), ("dreadful", "tedious", "clumsy")
FILLING = ("the", "film", "story", "actor", "scene", "was", "and", "with", "a", "music", "ending", "plot")
SECRETS = {"north": "quartzite", "south": "marmalade", "west": "xylophone"}
"""A word that only this client's texts hold: it must not be found where nothing private may be."""

FAST: dict[str, Any] = {
    "rounds": 2,
    "steps": 2,
    "batch_size": 8,
    "max_length": 16,
    "rank": 4,
    "client_lr": 0.03,
    "validation_ratio": 0,  # every row is to learn from or to be tested on
    "device": "cpu",
}
LEARNING: dict[str, Any] = FAST | {
    "rounds": 15,
    "steps": 10,
    "lr": 0.006,
    "client_lr": 0.3,
    "hypergradient_mode": "none",
}

Row = Mapping[str, str]


def sentences(count: int, seed: int, secret: str = "", flipped: bool = False) -> list[Row]:
    """Texts whose label one word decides; where `flipped`, the same words mean the opposite."""
    random = np.random.default_rng(seed)
    rows: list[Row] = []
    for i in range(count):
        positive = bool(random.integers(2)) if i > 1 else bool(i)
        word = random.choice(GOOD if positive else BAD)
        words = [*random.choice(FILLING, 4), word, *([secret] if secret and i % 2 else [])]
        random.shuffle(words)
        rows.append({"text": " ".join(words), "label": "pos" if positive != flipped else "neg"})
    return rows


def write_jsonl(path: Path, rows: Sequence[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(dict(row)) + "\n" for row in rows), encoding="utf8")
    return path


def write_csv(path: Path, rows: Sequence[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each of the world's words: [CLS] text [SEP], as BERT has it."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *GOOD, *BAD, *FILLING, *SECRETS.values()]
    number = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(number, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(
        ("[SEP]", number["[SEP]"]), ("[CLS]", number["[CLS]"])
    )
    special = {f"{kind}_token": f"[{kind.upper()}]" for kind in ("pad", "unk", "cls", "sep")}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def write_model(folder: Path) -> Path:
    """A random BERT, as save_pretrained writes it, that knows the world's words."""
    tokenizer = word_tokenizer()
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=32,
            initializer_range=0.2,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class World:
    """Where everything is."""

    root: Path

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def clients(self) -> list[Path]:
        return sorted((self.root / "clients").glob("*.jsonl"))

    @property
    def base(self) -> list[str]:
        """The arguments of a fast run, but for its output folder."""
        files = [str(path) for path in self.clients]
        return ["--model", str(self.model), "--clients", *files, *flags(FAST)]

    def settings(self, **changes: Any) -> dict[str, Any]:
        """The same for `federate()`."""
        return FAST | {"model": str(self.model), "clients": [str(p) for p in self.clients]} | changes


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings as the command line takes them."""
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def make_world(root: Path) -> World:
    """Three clients of different sizes; to the third, good words are bad."""
    write_model(root / "model")
    for i, (name, secret) in enumerate(SECRETS.items()):
        rows = sentences(60 + 20 * i, i, secret, flipped=name == "west")
        write_jsonl(root / "clients" / f"{name}.jsonl", rows)
    return World(root)


def command_line(monkeypatch: Any, capsys: Any, *args: object) -> tuple[int, str, str]:
    """`pf2lora ARGS…` in this process: exit code, standard output, standard error."""
    monkeypatch.setattr("sys.argv", ["pf2lora", *map(str, args)])
    capsys.readouterr()
    try:
        cli.main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def opened(folder: Path, method: str | None = None) -> LoadedRun:
    return load_run(folder, method, "cpu")
