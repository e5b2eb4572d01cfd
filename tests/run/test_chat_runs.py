"""Runs on conversations, from files to answers: trained, packed, scored, saved, asked again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from little_world import command_line
from tiny_tasks import write_chat_task
from transformers import AutoTokenizer

import pf2lora
from pf2lora.errors import UserError
from pf2lora.run.saved import load_run
from pf2lora.tasks.generation.conversations import Conversation

NAMES = ["north", "south", "west"]
SETTINGS: dict[str, Any] = {
    **{"task": "generation", "max_length": 64, "max_new_tokens": 4, "rounds": 2, "steps": 2, "batch_size": 2},
    **{"method": "pf2lora", "lr": 0.03, "packing": True, "targets": ["all-linear"], "device": "cpu"},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path], Any]:
    folder = tmp_path_factory.mktemp("chat")
    model, files = write_chat_task(folder, NAMES)
    result = pf2lora.federate(clients=files, model=model, out=folder / "run", **SETTINGS)
    return folder / "run", files, result


def test_scores_and_what_is_said(trained: tuple[Path, list[Path], Any]) -> None:
    folder, _, result = trained
    metrics = json.loads((folder / "result.json").read_text())
    text = json.dumps(metrics)
    for name in ("rouge_l", "rouge_1", "rouge_2", "exact_match", "perplexity"):
        assert f'"{name}"' in text
    (run,) = result.methods["pf2lora"].runs
    assert any("no chat template" in line for line in run.warnings)
    assert any("are packed into" in line for line in run.warnings)


def test_a_saved_run_knows_that_it_talks(
    trained: tuple[Path, list[Path], Any], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Answers to rows of any form, to a typed question, and by `generate`, are the same."""
    folder, files, _ = trained
    loaded = load_run(folder, device="cpu")
    assert loaded.saved.labels == ["chat"] and loaded.task.labels == ["chat"]
    whose = (folder, "--client", "north")
    code, out, err = command_line(monkeypatch, capsys, "predict", *whose, "--file", files[0], "--json")
    assert code == 0, err
    rows = loaded.config.task.questions(loaded.config.task.read_records(files[0]), ["chat"])
    questions = [row.prompt for row in rows if isinstance(row, Conversation)]
    assert len(questions) == 5
    code, again, err = command_line(monkeypatch, capsys, "generate", *whose, *questions, "--json")
    assert code == 0, err
    predicted = [row["predicted"] for row in json.loads(out)]
    assert predicted == [row["text"] for row in json.loads(again)]
    code, drawn, err = command_line(
        monkeypatch, capsys, "predict", *whose, *questions, "--temperature", "5", "--json"
    )
    assert code == 0 and [row["predicted"] for row in json.loads(drawn)] != predicted


def test_decoding_is_for_texts(
    trained: tuple[Path, list[Path], Any], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    folder, _, _ = trained
    args = ("predict", folder, "--client", "north", "pizza?", "--temperature", "1", "--beams", "2")
    code, _, err = command_line(monkeypatch, capsys, *args)
    assert code == 2 and "temperature 1.0 draws a text, and beams 2 search for one" in err


def test_a_prompt_that_is_cut_is_told(
    trained: tuple[Path, list[Path], Any], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    folder, _, _ = trained
    args = ("predict", folder, "--client", "north", "pizza? " * 20, "soup?")
    code, _, err = command_line(monkeypatch, capsys, *args)
    assert code == 0, err
    assert "1 of 2 prompts are cut at the left to fit the window of 64 tokens (max_length)" in err


def test_a_tokenizer_that_is_larger_than_the_model(tmp_path: Path) -> None:
    model, files = write_chat_task(tmp_path, NAMES)
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer.add_tokens(["pizza"]) == 1
    tokenizer.save_pretrained(model)
    with pytest.raises(
        UserError, match=r"writes token 258 \(pizza\), but the model has embeddings of 258 tokens"
    ):
        pf2lora.federate(clients=files, model=model, **SETTINGS)
