"""Question answering on SQuAD v2 (squad_partial), clients by topic: any methods of the package, served scores.

PYTHONPATH=src python benchmarks/real_qa.py --model carry/minilm --out qa.json

`--clients FILE...` are files of your own instead. Every setting of the package is a flag.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from package_runs import DATA, config_of, parser, print_answers, print_table, run, workload_of

from pf2lora.data.loading import load_clients
from pf2lora.tasks.question_answering.settings import QuestionAnsweringSettings

TASK = QuestionAnsweringSettings.name
DEFAULTS: dict[str, Any] = {
    "method": ["homlora", "pf2lora"],
    "rounds": 100,
    "steps": 10,
    "batch_size": 16,
    "rank": 8,
    "client_rank": 4,
    "lr": 2e-3,
    "client_lr": 0.03,
    "max_length": 384,
    "stride": 128,
    "dataset": "squad_v2",
    "data_dir": str(DATA / "squad_partial" / "cs224n_dev-v2.0.json"),
    "heterogeneity": 0.5,
}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = parser(__doc__, TASK)
    options.add_argument(
        "--answerable", action="store_true", help="only questions that have an answer, as in v1.1"
    )
    given = options.parse_args(arguments)
    config = config_of(given, TASK, DEFAULTS)
    notes: list[str] = []
    clients = load_clients(config.task, config.data, config.training.seed, notes=notes)
    if given.answerable:
        clients = [
            replace(c, train=[r for r in c.train if r.answers], test=[r for r in c.test if r.answers])
            for c in clients
        ]
    result = run(workload_of(config, clients, notes, given), given, answerable=given.answerable)
    print_table(result)
    print_answers(result, clients=1, answers=5)
    return result


if __name__ == "__main__":
    main()
