"""The paper's data sets in a few rows of their official formats, and tiny random models in place of the paper's."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import torch
from tiny_tasks import byte_tokenizer, saved, word_tokenizer
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
)

CLIENTS = 8
WORDS = (
    "stone",
    "iron",
    "wood",
    "salt",
    "glass",
    "paper",
    "river",
    "cloud",
    "where",
    "is",
    "the",
    "key",
    "?",
)
CATEGORIES = ("Airport", "Astronaut", "Building", "City", "Food", "Monument", "SportsTeam", "University")
PUBS = ("Blue Spice", "The Mill", "The Vaults", "Wildwood", "The Punter", "Aromi", "Zizzi", "Cotto")


def write_world(root: Path) -> Path:
    """`data/` with every set, and `classifier`, `reader` and `writer`."""
    write_glue(root / "data")
    write_squad(root / "data")
    write_e2e(root / "data" / "e2e")
    write_webnlg(root / "data" / "webnlg2017")
    write_models(root)
    return root


def write_models(root: Path) -> None:
    words, letters = word_tokenizer(WORDS), byte_tokenizer()
    small = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=384,
    )
    torch.manual_seed(0)
    saved(BertForSequenceClassification(small), words, root / "classifier")
    saved(BertForQuestionAnswering(small), words, root / "reader")
    ends = {"bos_token_id": letters.bos_token_id, "eos_token_id": letters.eos_token_id}
    writer = GPT2Config(vocab_size=len(letters), n_embd=16, n_layer=1, n_head=2, n_positions=576, **ends)
    saved(GPT2LMHeadModel(writer), letters, root / "writer")


def write_lines(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf8")


def texts(count: int) -> list[str]:
    return [f"{WORDS[i % 6]} {WORDS[(i + 1) % 8]} is {WORDS[i % 8]}" for i in range(count)]


def write_glue(root: Path) -> None:
    for part, count in (("train", 24), ("dev", 24)):
        rows = list(enumerate(texts(count)))
        write_lines(root / "CoLA" / f"{part}.tsv", *(f"x\t{i % 2}\t\t{t}" for i, t in rows))
        write_lines(root / "SST-2" / f"{part}.tsv", "sentence\tlabel", *(f"{t}\t{i % 2}" for i, t in rows))
        head = "question1\tquestion2\tis_duplicate"
        write_lines(root / "QQP" / f"{part}.tsv", head, *(f"{t}\t{t[::2]}\t{i % 2}" for i, t in rows))
        answers = ("entailment", "not_entailment")
        head = "question\tsentence\tlabel"
        write_lines(root / "QNLI" / f"{part}.tsv", head, *(f"{t}\t{t}\t{answers[i % 2]}" for i, t in rows))
        answers3 = ("entailment", "neutral", "contradiction")
        files = ["train.tsv"] if part == "train" else ["dev_matched.tsv", "dev_mismatched.tsv"]
        for file in files:
            head = "sentence1\tsentence2\tgold_label"
            write_lines(root / "MNLI" / file, head, *(f"{t}\t{t}\t{answers3[i % 3]}" for i, t in rows))


def write_squad(root: Path) -> None:
    for version, folder in (("v1.1", "squad"), ("v2.0", "squad_v2")):
        topics = []
        for k in range(6):
            context = f"{WORDS[k]} river cloud"
            found = [{"text": WORDS[k], "answer_start": 0}]
            asked: list[dict[str, Any]] = [
                {"id": f"{k}-{i}", "question": "where is the key ?", "answers": found} for i in range(6)
            ]
            if version == "v2.0":
                asked[0] |= {"answers": [], "is_impossible": True}
            topics.append({"title": f"topic {k}", "paragraphs": [{"context": context, "qas": asked}]})
        write_lines(root / folder / f"train-{version}.json", json.dumps({"version": version, "data": topics}))


def write_e2e(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file, count in (("trainset.csv", 3), ("testset_w_refs.csv", 1)):
        with (folder / file).open("w", newline="", encoding="utf8") as opened:
            writer = csv.writer(opened)
            writer.writerow(["mr", "ref"])
            for pub in PUBS:
                writer.writerows([[f"name[{pub}], area[riverside]", f"{pub} is there."]] * count)
            if file == "testset_w_refs.csv":  # the paper's first example, as the official file has it
                meaning = "name[Blue Spice], eatType[pub], food[English], area[riverside]"
                meaning += ", familyFriendly[yes], near[Rainbow Vegetarian Café]"
                writer.writerow([meaning, "An English pub."])


def write_webnlg(folder: Path) -> None:
    for place, count in (("train/1.xml", 3), ("testdata_with_lex.xml", 1)):
        entries = "".join(
            f'<entry category="{category}" eid="Id{k}{i}" size="1"><modifiedtripleset><mtriple>a | is | {category}'
            f'</mtriple></modifiedtripleset><lex comment="good" lid="Id1">It is {category} {i}.</lex></entry>'
            for k, category in enumerate(CATEGORIES)
            for i in range(count)
        )
        write_lines(folder / place, f"<benchmark><entries>{entries}</entries></benchmark>")
