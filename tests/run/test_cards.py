"""Every adapter's folder has a model card: sizes, scores, versions, what the hub reads; nothing of anybody's texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from little_world import FAST, SECRETS, World, command_line, make_world, opened, sentences, write_jsonl

import pf2lora
from pf2lora.run import trial
from pf2lora.run.cards import CARD
from pf2lora.run.numbers import score
from pf2lora.run.onboarding import onboard


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = make_world(tmp_path_factory.mktemp("cards"))
    settings = FAST | {"method": ["pf2lora", "homlora"], "validation_ratio": 0.1}
    pf2lora.federate(**world.settings(**settings, out=world.root / "run"))
    return world


def head(card: str) -> dict[str, Any]:
    """What the hub reads."""
    _, front, _ = card.split("---\n", 2)
    return yaml.safe_load(front)


def test_every_adapter_has_a_card_with_its_sizes_scores_and_versions(world: World) -> None:
    result = pf2lora.load_result(world.root / "run")
    cards = sorted((world.root / "run").rglob(CARD))
    folders = sorted(p.parent for p in (world.root / "run").rglob("adapter_config.json"))
    assert [card.parent for card in cards] == folders and len(cards) == 8
    metric = result.metrics["accuracy"]
    for method in result.methods:
        for k, client in enumerate(result.clients):
            text = (world.root / "run" / "methods" / method / "clients" / client.name / CARD).read_text()
            (run,) = result.methods[method].runs
            assert run.deploy is not None
            deployed = score(run.deploy["accuracy"].per_client[k], metric)
            served = score(run.served["accuracy"].per_client[k], metric)
            assert f"| accuracy in % | {deployed} | {served} |" in text
            assert (
                f"{client.train} rows ({client.validation} more to choose by) of {client.name}; with 2 other"
                in text
            )
            assert f"On {client.name}'s {client.test} test rows." in text
            assert f"pf2lora {pf2lora.__version__}, torch " in text
            assert f"| method | {result.methods[method].label}: " in text


def test_a_card_tells_neither_texts_nor_other_clients_nor_places(world: World) -> None:
    for card in (world.root / "run").rglob(CARD):
        text = card.read_text()
        assert not [secret for secret in SECRETS.values() if secret in text]
        assert str(world.root) not in text, "where somebody's base model lies"
        others = set(SECRETS) - {card.parent.name}
        assert not [name for name in others if name in text]
        found = head(text)
        assert found["license"] == "unknown" and found["library_name"] == "peft"
        assert found["pipeline_tag"] == "text-classification" and "base_model" not in found


def test_a_card_says_how_long_was_trained_and_of_which_round_the_adapter_is(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that stops early: not the rounds that were asked for. The first of three rounds is made the best one on the
    validation rows, for the clients and for the common adapter."""
    worse, looked = iter([0.0, 1.0, 1.0]), trial.Deployment.look

    def look(self: Any, *args: Any) -> Any:
        more, original = next(worse), self.judge
        self.judge = lambda models: ((asked := original(models))[0] + more, asked[1])
        try:
            return looked(self, *args)
        finally:
            self.judge = original

    monkeypatch.setattr(trial.Deployment, "look", look)
    settings = FAST | {"rounds": 30, "evaluate_every": 1, "patience": 2, "validation_ratio": 0.2}
    settings |= {"personal_steps": 0}
    result = pf2lora.federate(**world.settings(**settings, method=["homlora"], out=tmp_path / "run"))
    (run,) = result.methods["homlora"].runs
    assert run.choices is not None and run.common_round == 1
    assert [record.round for record in run.rounds] == [1, 2, 3]
    cards = {card.parent.name: card.read_text() for card in (tmp_path / "run").rglob(CARD)}
    assert all("| training | 3 rounds of " in text for text in cards.values())
    assert "| holds | what all clients share, round 1 of 3: chosen by" in cards["common"]
    assert "after the last round (3); that of round 1, this one, was not measured." in cards["common"]
    for client, choice in zip(result.clients, run.choices):
        assert f", round {choice.round} of 3: chosen on" in cards[client.name]
    assert 1 in {choice.round for choice in run.choices}


def test_a_base_model_of_the_hub_is_named_and_the_snippet_compiles(world: World) -> None:
    from dataclasses import replace

    from pf2lora.run import cards
    from pf2lora.run.saved import read_config

    config = read_config(world.root / "run")
    config = replace(config, model=replace(config.model, name="FacebookAI/roberta-base"))
    peft = {"r": 10, "target_modules": ["a"], "modules_to_save": None, "task_type": "CAUSAL_LM"}
    about = cards.About("A | B", "3 rows", {"this adapter": {"accuracy": None}}, "On it", "served", 3)
    text = cards.card(
        config, "homlora", about, pf2lora.load_result(world.root / "run").metrics, "2026-11-16", peft
    )
    assert head(text)["base_model"] == "FacebookAI/roberta-base"
    assert head(text)["pipeline_tag"] == "text-generation"
    compile(text.split("```python\n")[1].split("```")[0], "card", "exec")


def test_newcomers_and_exports_have_theirs(
    world: World, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    run = world.root / "run"
    record = onboard(
        opened(run, "pf2lora"), "east", write_jsonl(tmp_path / "east.jsonl", sentences(40, seed=5)), 1
    )
    text = (run / "methods" / "pf2lora" / "clients" / "east" / CARD).read_text()
    shown = score(record.deploy["accuracy"], pf2lora.load_result(run).metrics["accuracy"])
    assert f"| accuracy in % | {shown} |" in text and f"{record.client.train} rows" in text
    assert "| training | 1 round of " in text  # its own, not the run's
    out = tmp_path / "out"
    code, _, _ = command_line(
        monkeypatch, capsys, "export", run, "--method", "pf2lora", "--client", "east", "--out", out
    )
    assert code == 0 and (out / CARD).read_text() == text


def test_with_noise_the_common_card_has_its_price_and_no_rows(world: World, tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    settings = FAST | {"method": "homlora", "rounds": 1, "dp_epsilon": 8.0}
    result = pf2lora.federate(**world.settings(**settings, out=tmp_path / "run"))
    text = (tmp_path / "run" / "common" / CARD).read_text()
    assert "| privacy | the common adapter: ε = " in text and "| trained on | 3 clients |" in text
    assert result.methods["homlora"].runs[0].privacy is not None
    own = (tmp_path / "run" / "clients" / "north" / CARD).read_text()
    assert "what is the client's own, and its choice, are not covered" in own
