"""Generation on E2E (clients by restaurant) or WebNLG (by category): any methods of the package, served scores.

PYTHONPATH=src python benchmarks/real_generation.py e2e --model carry/smollm2 --out e2e.json

`--clients FILE...` are files of your own instead, decoded and scored like the set that is named. Every setting of the
package is a flag. A machine without Java or the extra `nlg` leaves scores out; the outputs are in the JSON file, so
another machine can add them: `python benchmarks/real_generation.py --rescore e2e.json [--summary FILE]`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from package_runs import DATA, config_of, parser, print_answers, print_table, run, save, workload_of

from pf2lora.data.loading import load_clients
from pf2lora.run.evaluation import over_clients
from pf2lora.tasks.generation.java import one_meteor
from pf2lora.tasks.generation.settings import GenerationSettings
from pf2lora.tasks.generation.task import SCORES, TEXT_METRICS, Generation

TASK = GenerationSettings.name
DEFAULTS: dict[str, Any] = {
    "method": ["homlora", "pf2lora"],
    "rounds": 100,
    "steps": 10,
    "batch_size": 4,
    "rank": 4,
    "client_rank": 2,
    "lr": 2e-3,
    "client_lr": 0.03,
    "max_length": 256,
    "beams": 10,
    "max_new_tokens": 64,
}
SETS: dict[str, dict[str, Any]] = {  # the length penalties are the LoRA paper's
    "e2e": {"data_dir": str(DATA / "e2e"), "length_penalty": 0.9},
    "webnlg": {"data_dir": str(DATA / "webnlg2017"), "length_penalty": 0.8},
}


def rescore(file: Path, summary: Path | None) -> None:
    """Add the text scores that the machine of the run could not compute."""
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf8"))
    scorer, names = SCORES[result["scored_as"]]
    references = [[item["references"] for item in client] for client in result["items"]]
    absent: dict[str, str] = {}
    for row in result["methods"].values():
        with one_meteor():
            for scores, texts, golds in zip(row["per_client"], row["outputs"], references):
                found = scorer(texts, golds)
                absent |= found.absent
                scores.update({name: found.values.get(name) for name in names})
        for name in names:
            values = [scores[name] for scores in row["per_client"]]
            row["scores"][name] = over_clients(values, TEXT_METRICS[name]).mean
    result["notes"] = [note for note in result["notes"] if not note.startswith("no ")]
    result["notes"] += [f"no {TEXT_METRICS[name].label}: {reason}" for name, reason in absent.items()]
    print_table(result)
    save(result, file, summary)


def rescore_only(arguments: list[str]) -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rescore", type=Path, required=True)
    options.add_argument("--summary", type=Path)
    given = options.parse_args(arguments)
    rescore(given.rescore, given.summary)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = parser(__doc__, TASK)
    options.add_argument("set", choices=list(SETS), help="the data set")
    options.add_argument("--generation-batch", type=int, default=8, help="prompts of each client in one pass")
    given = options.parse_args(arguments)
    config = config_of(given, TASK, DEFAULTS | SETS[given.set] | {"dataset": given.set, "scores": given.set})
    notes: list[str] = []
    clients = load_clients(config.task, config.data, config.training.seed, notes=notes)
    workload = workload_of(config, clients, notes, given)
    assert isinstance(workload.task, Generation)
    workload.task.generation_batch = given.generation_batch
    scored_as = workload.task.settings.scores
    result = run(workload, given, scored_as=scored_as, generation_batch=given.generation_batch)
    print_table(result)
    print_answers(result, clients=3, answers=1)
    return result


if __name__ == "__main__":
    if "--rescore" in sys.argv:
        rescore_only(sys.argv[1:])
    else:
        main()
