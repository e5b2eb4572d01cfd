"""Question answering and generation from files to a run folder, and from there to text, on tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tiny_tasks import write_generation_task
from tiny_text_models import TOKENIZER as WORDS
from tiny_text_models import causal, reader
from tokenizers_for_tests import byte_level
from transformers import AutoModelForCausalLM, AutoModelForQuestionAnswering
from typer.testing import CliRunner

from pf2lora import federate
from pf2lora.cli import app
from pf2lora.data.client import Client
from pf2lora.errors import UserError
from pf2lora.run.config import from_settings
from pf2lora.run.workload import load_workload
from pf2lora.tasks.generation.decoding import cut_at_end
from pf2lora.tasks.generation.prompts import PromptRow

FOODS = ("pizza", "noodles", "fish and chips", "tapas", "soup", "bread")
ANSWERS = {"north": "It is near the river.", "south": "No, there is no such place."}


def prompt_files(folder: Path) -> list[str]:
    paths = []
    for name, answer in ANSWERS.items():
        lines = [json.dumps({"prompt": food, "target": [answer, answer.lower()]}) for food in FOODS]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        paths.append(str(folder / f"{name}.jsonl"))
    return paths


def question_files(folder: Path) -> list[str]:
    paths = []
    for name, word in (("north", "stone"), ("south", "iron")):
        rows = [
            {"context": f"salt {word} river {other}", "question": "Where is the key?", "answers": answer}
            for other in ("cloud", "wood", "salt")
            for answer in (word, "river", "")
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        paths.append(str(folder / f"{name}.jsonl"))
    return paths


SHORT: dict[str, Any] = {
    "rounds": 3,
    "steps": 4,
    "batch_size": 4,
    "rank": 4,
    "client_rank": 2,
    "device": "cpu",
}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_generation_run(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PATH", ""
    )  # no Java: the run goes on, and the scores that need it say why they are absent
    base, out = tmp_path / "base", tmp_path / "run"
    causal(kind, torch.float32).save_pretrained(base)
    byte_level(ANSWERS.values(), padding=True).save_pretrained(base)
    result = federate(
        model=str(base),
        task="generation",
        clients=prompt_files(tmp_path),
        method=["homlora", "pf2lora"],
        out=out,
        max_length=64,
        max_new_tokens=10,
        beams=3,
        no_repeat_ngram=0,
        lr=0.02,
        **SHORT,
    )
    assert result.metric == "BLEU"
    (record,) = result.methods["pf2lora"].runs
    assert record.served["BLEU"].mean is not None and record.served["METEOR"].mean is None
    assert record.before_averaging and record.before_averaging["BLEU"].mean is not None
    assert any(line.startswith("no METEOR: ") for line in record.warnings)
    first, last = record.rounds[0], record.rounds[-1]
    assert first.served and first.served["BLEU"] == [None, None]
    assert last.served and last.served["BLEU"] != [None, None]
    assert sum(v or 0 for v in last.train_loss) < sum(v or 0 for v in first.train_loss)
    assert set(result.examples[0].outputs) == {"homlora", "pf2lora"}
    assert (out / "report.html").is_file()

    def generated(*options: str) -> list[str]:
        command = ["generate", str(out), *FOODS[:2], "--method", "pf2lora", "--json", *options]
        found = CliRunner().invoke(app, command)
        assert found.exit_code == 0, found.output
        return [row["text"] for row in json.loads(found.stdout)]

    north, south = generated("--client", "north"), generated("--client", "south")
    shown = {(e.client, e.prompt): e.outputs["pf2lora"] for e in result.examples}
    own = [(prompt, text) for prompt, text in zip(FOODS, north) if ("north", prompt) in shown]
    assert all(shown["north", prompt] == text for prompt, text in own)
    assert len(generated()) == 2
    assert len(generated("--beams", "1", "--max-new-tokens", "3")) == 2

    folder = out / "methods" / "pf2lora" / "clients" / "south"
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval()
    tokenizer = byte_level(ANSWERS.values(), padding=True)
    ends = [tokenizer.eos_token_id, model.generation_config.eos_token_id]  # Llama's own is another token here
    for prompt, text in zip(FOODS, south):
        ids = torch.tensor([[*tokenizer(prompt)["input_ids"], tokenizer.bos_token_id]])
        found = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            num_beams=3,
            length_penalty=0.8,
            max_new_tokens=10,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=ends,
        )
        written = cut_at_end(found[0, ids.shape[1] :].tolist(), ends)
        assert str(tokenizer.decode(written, skip_special_tokens=True)).strip() == text


@pytest.mark.parametrize("kind", ["bert", "deberta-v2"])
def test_question_answering_run(kind: str, tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "run"
    reader(kind, torch.float32).save_pretrained(base)
    WORDS.save_pretrained(base)
    files = question_files(tmp_path)
    result = federate(
        model=str(base), task="question-answering", clients=files, out=out, max_length=40, stride=8, **SHORT
    )
    assert list(result.metrics) == ["f1", "exact_match", "loss", "answerable_f1", "unanswerable_f1"]
    assert all(e.outputs["pf2lora"] for e in result.examples)
    found = CliRunner().invoke(app, ["evaluate", str(out), files[0], "--client", "north", "--json"])
    assert found.exit_code == 0, found.output
    scores = json.loads(found.stdout)
    assert scores["rows"] == 9 and 0 <= scores["f1"] <= 1

    model = PeftModel.from_pretrained(
        AutoModelForQuestionAnswering.from_pretrained(base), out / "clients" / "north"
    )
    from pf2lora.run.saved import load_run

    loaded = load_run(out, device="cpu")
    x, y = loaded.client("north")
    inputs = WORDS("Where is the key?", "salt stone river cloud", return_tensors="pt")
    # Not `model(…)`: PEFT's wrapper for question answering drops token_type_ids.
    ours, theirs = loaded.model(x, y, **inputs), model.eval().base_model(**inputs)
    torch.testing.assert_close(ours.start_logits, theirs.start_logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.end_logits, theirs.end_logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "generation", "dataset": "e2e"}, "--dataset e2e needs --data-dir"),
        (
            {"task": "generation", "dataset": "squad", "data_dir": "x"},
            "unknown data set for generation 'squad'",
        ),
        ({"task": "question-answering"}, "comes from files"),
        (
            {"task": "question-answering", "dataset": "squad", "text": "t"},
            "text is a setting of classification, and the task is question-answering",
        ),
        (
            {"task": "question-answering", "dataset": "squad", "partition": "column"},
            "--partition column needs --partition-column",
        ),
        (
            {"task": "question-answering", "dataset": "squad", "test": ["t.json"]},
            "--test is for your own files, not for --dataset squad",
        ),
        (
            {"task": "question-answering", "dataset": "squad", "context": "c"},
            "--context is for your own files, not for --dataset squad",
        ),
    ],
)
def test_choices_that_do_not_fit_are_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        federate(model="nowhere", **settings)


def test_generate_says_what_is_missing(tmp_path: Path) -> None:
    for command, message in (
        (["generate", str(tmp_path)], "nothing to continue"),
        (["generate", str(tmp_path), " "], "an empty prompt"),
        (["generate", str(tmp_path), "a"], "is no run folder"),
        (["generate", str(tmp_path), "--file", str(tmp_path / "a.txt")], "no such file"),
    ):
        found = CliRunner().invoke(app, command)
        assert isinstance(found.exception, UserError) and message in str(found.exception)


def test_test_prompts_that_all_fill_the_window_are_said_to(tmp_path: Path) -> None:
    """There is nothing to measure a loss on."""
    model, _ = write_generation_task(tmp_path, ["a"])
    short, long = PromptRow("tapas", ("Yes.",)), PromptRow("tapas or soup " * 20, ("Yes.",))
    config = from_settings({"task": "generation", "model": str(model), "max_length": 32, "device": "cpu"})
    with pytest.raises(UserError, match=r"every test prompt fills the window of 32 tokens.*--max-length"):
        load_workload(config, clients=[Client("a", [short] * 4, [long] * 2)])
    kept = load_workload(config, clients=[Client("a", [short] * 4, [long, short])])
    assert kept.test.sizes() == [1]
