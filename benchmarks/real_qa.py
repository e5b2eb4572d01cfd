"""Question answering on SQuAD v2 (squad_partial), clients by topic: HOMLoRA and PF2LoRA, served scores.

PYTHONPATH=src python benchmarks/real_qa.py --model carry/minilm --out qa.json
"""

from __future__ import annotations

from real_runs import few, parser, print_table, run

from pf2lora.adapters.base_model import load_tokenizer
from pf2lora.tasks.question_answering.squad import load_squad
from pf2lora.tasks.question_answering.task import QuestionAnswering, Reading

if __name__ == "__main__":
    options = parser(
        __doc__,
        rounds=100,
        steps=10,
        batch_size=16,
        rank=8,
        client_rank=4,
        lr=2e-3,
        client_lr=0.03,
        scaling=1.0,
        seed=0,
        max_length=384,
        stride=128,
        heterogeneity=0.5,
    )
    options.add_argument(
        "--answerable", action="store_true", help="only questions that have an answer, as in v1.1"
    )
    given = options.parse_args()
    notes: list[str] = []
    file = given.data / "squad_partial" / "cs224n_dev-v2.0.json"
    clients = load_squad("squad_v2", file, heterogeneity=given.heterogeneity, seed=given.seed, notes=notes)
    if given.answerable:
        clients = [
            type(c)(c.name, [r for r in c.train if r.answers], [r for r in c.test if r.answers])
            for c in clients
        ]
    clients = few(clients, given)
    task = QuestionAnswering(
        load_tokenizer(str(given.model)),
        max_length=given.max_length,
        no_answers=not given.answerable,
        reading=Reading(stride=given.stride),
    )
    questions = [[(r.question, r.answers) for r in c.test] for c in clients]
    result = run(task, clients, given, lambda answer: answer.text, notes=notes, questions=questions)
    print_table(result)
    for method, found in result["methods"].items():
        print(f"\n{method}:")
        for answer, row in list(zip(found["outputs"][0], clients[0].test))[:5]:
            print(f"  {row.question}  →  {answer!r}  (gold: {list(dict.fromkeys(row.answers)) or 'none'})")
