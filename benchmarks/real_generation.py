"""Generation on E2E (clients by restaurant) or WebNLG (by category): HOMLoRA and PF2LoRA, served scores.

PYTHONPATH=src python benchmarks/real_generation.py e2e --model carry/smollm2 --out e2e.json

A machine without Java or the extra `nlg` leaves scores out; the outputs are in the JSON file, so another machine can
add them: `python benchmarks/real_generation.py --rescore e2e.json [--summary FILE]`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from real_runs import few, mean_scores, parser, print_table, run, without_texts, write

from pf2lora.adapters.base_model import load_tokenizer
from pf2lora.data.client import Client
from pf2lora.tasks.generation.e2e import load_e2e
from pf2lora.tasks.generation.java import one_meteor
from pf2lora.tasks.generation.prompts import PromptRow
from pf2lora.tasks.generation.task import SCORERS, Decoding, Generation
from pf2lora.tasks.generation.webnlg import load_webnlg

LENGTH_PENALTY = {"e2e": 0.9, "webnlg": 0.8}  # as in the LoRA paper


def load(name: str, data: Path, notes: list[str]) -> list[Client[PromptRow]]:
    return load_e2e(data / "e2e") if name == "e2e" else load_webnlg(data / "webnlg2017", notes=notes)


def rescore(file: Path, summary: Path | None) -> None:
    """Add the text scores that the machine of the run could not compute."""
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf8"))
    scorer, names = SCORERS[result["dataset"]]
    references = [[item["references"] for item in client] for client in result["items"]]
    absent: dict[str, str] = {}
    for found in result["methods"].values():
        with one_meteor():
            for scores, texts, golds in zip(found["per_client"], found["outputs"], references):
                values = scorer(texts, golds)
                absent |= values.absent
                scores.update({name: values.values.get(name) for name in names})
        found["scores"] = mean_scores(found["per_client"])
    result["notes"] = [note for note in result["notes"] if not note.startswith("no ")]
    result["notes"] += [f"no {name}: {reason}" for name, reason in absent.items()]
    print_table(result)
    write(result, file)
    if summary:
        write(without_texts(result), summary)


def main() -> None:
    options = parser(
        __doc__,
        rounds=100,
        steps=10,
        batch_size=4,
        rank=4,
        client_rank=2,
        lr=2e-3,
        client_lr=0.03,
        scaling=1.0,
        seed=0,
        max_length=256,
        beams=10,
        max_new_tokens=64,
        generation_batch=8,
    )
    options.add_argument("dataset", choices=list(LENGTH_PENALTY))
    given = options.parse_args()
    notes: list[str] = []
    clients = few(load(given.dataset, given.data, notes), given)
    decoding = Decoding(
        beams=given.beams, length_penalty=LENGTH_PENALTY[given.dataset], max_new_tokens=given.max_new_tokens
    )
    task = Generation(
        load_tokenizer(str(given.model)),
        max_length=given.max_length,
        decoding=decoding,
        scores=given.dataset,
        generation_batch=given.generation_batch,
    )
    result = run(
        task,
        clients,
        given,
        lambda prediction: prediction.text,
        dataset=given.dataset,
        notes=notes,
        max_length=given.max_length,
        decoding=decoding.__dict__,
        items=[[{"prompt": r.prompt, "references": r.targets} for r in c.test] for c in clients],
    )
    print_table(result)
    for k, client in enumerate(clients[:3]):
        print(f"\n{client.name}: {client.test[0].prompt}\n  reference: {client.test[0].targets[0]}")
        for method, found in result["methods"].items():
            print(f"  {method}: {found['outputs'][k][0]}")


if __name__ == "__main__":
    if "--rescore" in sys.argv:
        only = argparse.ArgumentParser(description=__doc__)
        only.add_argument("--rescore", type=Path, required=True)
        only.add_argument("--summary", type=Path)
        given = only.parse_args()
        rescore(given.rescore, given.summary)
    else:
        main()
