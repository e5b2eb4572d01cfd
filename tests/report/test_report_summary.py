"""The report's first half page: plain words that the figures carry."""

from __future__ import annotations

import copy
from typing import Any

from result_example import make_result, small, typed
from result_extras import with_classes

from pf2lora.report import render
from pf2lora.report.summary import SHOWN, summary
from pf2lora.run.measured import by_measured_metric


def said(result: dict[str, Any]) -> str:
    return " ".join(summary(typed(result))["sentences"])


def test_it_says_what_was_found_without_a_formula() -> None:
    text = said(with_classes(make_result(clients=3)))
    assert "3 clients trained a model to sort texts into classes. 7 ways to train it were compared." in text
    assert "PF2LoRA (joint) reaches " in text and "% accuracy, the mean over clients, against 51.0" in text
    assert "% untrained (round 0) and 61.0 % majority label" in text
    assert "Training together is better than each client training alone." in text
    assert "3 training runs: the mean is known to about ±" in text and "One warning came up" in text
    assert not any(sign in text for sign in "‖σ√Σ∇")


def test_it_claims_no_more_than_the_seeds_carry() -> None:
    assert "cannot be told apart on this data" in said(small(pf2lora=[0.9, 0.8], local=[0.89, 0.82]))
    assert "cannot be told from one run" in said(small(pf2lora=[0.9], local=[0.8]))
    assert "brought nothing here" in said(small(pf2lora=[0.5, 0.51], local=[0.9, 0.91]))
    assert "how far another run would differ is not known" in said(small(pf2lora=[0.9]))


def test_each_client_has_what_it_should_deploy_in_plain_words() -> None:
    result = make_result(clients=2, seeds=1, rounds=3)
    result["methods"] = {"pf2lora": result["methods"]["pf2lora"]}
    run = result["methods"]["pf2lora"]["runs"][0]
    base = {"validation_loss": 0.1, "last_round": {}}
    run["choices"] = [
        {"candidate": "common", "round": 3} | base,
        {"candidate": "served", "round": 2} | base,
    ]
    found = summary(typed(result))
    assert [row["deploy"] for row in found["rows"]] == [
        "the shared model, without a part of its own",
        "the model it was given, after round 2 of 3",
    ]
    assert found["advice"] == "" and found["more"] == 0 and found["trivial"] == ""


def test_who_would_do_as_well_without_a_model_is_named() -> None:
    result = with_classes(make_result(clients=3))
    assert "not ready" not in said(result)
    result["baselines"]["trivial"]["scores"]["accuracy"]["per_client"][1] = 0.999
    assert f"For {result['clients'][1]['name']} the model is no better than the majority label" in said(
        result
    )


def test_who_trains_alone_was_given_nothing() -> None:
    found = summary(typed(small(local=[0.9, 0.91])))
    assert {row["deploy"] for row in found["rows"]} == {"its own model"}


def test_a_hundred_clients_leave_it_half_a_page() -> None:
    found = summary(typed(make_result(clients=30, seeds=1, rounds=2)))
    assert len(found["rows"]) == SHOWN and found["more"] == 30 - SHOWN


def test_nothing_is_said_where_every_method_failed() -> None:
    result = small(pf2lora=[0.9])
    result["methods"]["pf2lora"] |= {"runs": [], "failed": "it diverged"}
    assert summary(typed(result)) == {} and 'id="summary"' not in render([typed(result)])


def without(result: dict[str, Any], *metrics: str) -> dict[str, Any]:
    """Scores are missing, as those of text that nothing here can score."""
    result = copy.deepcopy(result)
    nothing = {"per_client": [None] * len(result["clients"]), "mean": None, "worst": None, "spread": None}
    for method in result["methods"].values():
        for run in method["runs"]:
            for table in (run["served"], run["before_averaging"], run["deploy"]):
                if table:
                    table |= dict.fromkeys(metrics, nothing)
    return result


def test_a_result_without_its_headline_is_shown_by_the_next_score() -> None:
    result = typed(without(make_result(clients=2, seeds=2, rounds=3), "accuracy"))
    shown = by_measured_metric(result)
    assert shown.metric == "matthews"
    page = render([result])
    assert "Matthews correlation in %: mean over clients" in page
    whole = typed(make_result(clients=2, seeds=1, rounds=2))
    assert by_measured_metric(whole) is whole


def test_text_without_scores_is_shown_by_perplexity() -> None:
    """Which comes behind the loss, and says more."""
    result = without(make_result(clients=2, seeds=1, rounds=2, task="generation"), "accuracy", "matthews")
    about = {"label": "perplexity", "higher_is_better": False, "percent": False}
    result["metrics"] = result["metrics"] | {"perplexity": about}
    for method in result["methods"].values():
        for run in method["runs"]:
            for table in (run["served"], run["before_averaging"], run["deploy"]):
                if table:
                    table["perplexity"] = table["loss"]
    assert by_measured_metric(typed(result)).metric == "perplexity"
    assert "perplexity (lower is better): mean over clients" in render([typed(result)])
    assert "perplexity (lower is better), the mean over clients" in said(
        without(result, "accuracy") | {"metric": "perplexity"}
    )


def test_the_interval_of_the_mean_is_in_the_table() -> None:
    page = render([typed(make_result(clients=2, seeds=3, rounds=2))])
    assert "95 % interval" in page
    assert "95 % interval</th>" not in render([typed(small(pf2lora=[0.9]))])
