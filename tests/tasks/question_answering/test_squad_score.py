"""SQuAD scores: every expected value is worked out by hand from the rules of the official scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pf2lora.cli.score import app
from pf2lora.errors import UserError
from pf2lora.tasks.question_answering.scores import evaluate, exact_match, f1, is_v2, normalize


def data(golds: dict[str, list[str]], version: str = "") -> dict[str, Any]:
    """An official data file with these questions, each with these gold texts."""
    qas = [{"id": key, "answers": [{"text": text} for text in texts]} for key, texts in golds.items()]
    return {"version": version, "data": [{"paragraphs": [{"qas": qas[:1]}, {"qas": qas[1:]}]}]}


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("  The  Cat's\tan A-team! ", "cats ateam"),
        ("theatre and a banana", "theatre and banana"),
        ("The, (a)", ""),
        ("“The” Café", "“ ” café"),  # only ASCII punctuation goes, and an article inside other marks goes too
        ("$5,000.50", "500050"),
    ],
)
def test_normalisation(answer: str, normal: str) -> None:
    assert normalize(answer) == normal


def test_several_golds_count_by_the_best() -> None:
    golds = ["the big red dog", "a red dog"]
    assert exact_match("Red dog.", golds) == 1
    assert f1("red", golds) == pytest.approx(2 / 3)  # precision 1, recall 1/2 on the second gold
    assert f1("red red fox", ["red dog"]) == pytest.approx(2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2))
    assert exact_match("fox", golds) == f1("fox", golds) == 0


def test_golds_that_normalise_to_nothing() -> None:
    # v2.0 drops them: what is left decides, and if nothing is left only nothing is right.
    assert (exact_match("the", ["the", "cat"]), f1("the", ["the", "cat"])) == (0, 0)
    assert (exact_match("...", ["The"]), f1("...", ["The"])) == (1, 1)
    assert (exact_match("cat", ["the"]), f1("cat", ["the"])) == (0, 0)
    # v1.1 keeps them: they match exactly, with F1 0.
    assert (exact_match("the", ["the", "cat"], v2=False), f1("the", ["the", "cat"], v2=False)) == (1, 0)


def test_questions_without_an_answer() -> None:
    assert (exact_match("", []), f1("", [])) == (1, 1)
    assert (exact_match("a cat", []), f1("a cat", [])) == (0, 0)
    with pytest.raises(ValueError, match="at least one gold"):
        f1("cat", [], v2=False)


def test_version_is_read_from_the_data() -> None:
    assert not is_v2(data({"1": ["cat"]}, "1.1"))
    assert is_v2(data({"1": ["cat"]}, "v2.0"))
    assert is_v2(data({"1": ["cat"], "2": []}))
    impossible = data({"1": ["cat"]})
    impossible["data"][0]["paragraphs"][0]["qas"][0]["is_impossible"] = False
    assert is_v2(impossible)


def test_v1_scores_missing_predictions_zero(caplog: pytest.LogCaptureFixture) -> None:
    golds = {"1": ["red dog"], "2": ["cat"], "3": ["the"], "4": ["x"]}
    result = evaluate(data(golds, "1.1"), {"1": "red", "2": "The cat", "3": "a"})
    assert result == {
        "exact_match": pytest.approx(100 * 2 / 4),
        "f1": pytest.approx(100 * (2 / 3 + 1 + 0) / 4),
    }
    assert "1 of 4 questions have no prediction and score 0" in caplog.text


def test_v2_totals_by_kind_leave_missing_predictions_out(caplog: pytest.LogCaptureFixture) -> None:
    golds: dict[str, list[str]] = {"1": ["red dog"], "2": ["cat"], "3": [], "4": [], "5": ["x"], "6": []}
    result = evaluate(data(golds), {"1": "red", "2": "The cat", "3": "", "4": "fox"})
    assert result == {
        "exact": 50,
        "f1": pytest.approx(100 * (2 / 3 + 1 + 1 + 0) / 4),
        "total": 4,
        "HasAns_exact": 50,
        "HasAns_f1": pytest.approx(100 * (2 / 3 + 1) / 2),
        "HasAns_total": 2,
        "NoAns_exact": 50,
        "NoAns_f1": 50,
        "NoAns_total": 2,
    }
    assert "2 of 6 questions have no prediction and are left out" in caplog.text


def test_best_threshold_for_no_answer() -> None:
    golds: dict[str, list[str]] = {"sure": ["red dog"], "trap": [], "late": ["cat"], "none": []}
    predictions = {"sure": "red", "trap": "fox", "late": "cat", "none": ""}
    na_probs = {"late": 0.6, "trap": 0.4, "sure": 0.1, "none": 0.9, "other file": 0.0}
    result = evaluate(data(golds), predictions, na_probs)
    # Nothing answered: 2 right (trap, none). Then sure: +EM 0 or +F1 2/3; trap: -1; late: +1.
    assert (result["best_exact"], result["best_exact_thresh"]) == (50, 0.0)
    assert result["best_f1"] == pytest.approx(100 * (2 + 2 / 3) / 4)
    assert result["best_f1_thresh"] == 0.1
    assert result["exact"] == 50  # the default threshold of 1 silences no probability
    silenced = evaluate(data(golds), predictions, na_probs, na_threshold=0.3)
    assert silenced["f1"] == pytest.approx(result["best_f1"])
    assert silenced["NoAns_exact"] == 100
    assert silenced["HasAns_exact"] == 0


def test_gold_answers_score_full_on_real_files(shared_data: Path) -> None:
    for name, exact in (("cs224n_dev-v2.0.json", "exact"), ("xquad.en.json", "exact_match")):
        dataset = json.loads((shared_data / "squad_partial" / name).read_text())
        listed = [qa for a in dataset["data"] for p in a["paragraphs"] for qa in p["qas"]]
        golds = {qa["id"]: qa["answers"][0]["text"] if qa["answers"] else "" for qa in listed}
        assert evaluate(dataset, golds)[exact] == evaluate(dataset, golds)["f1"] == 100
        wrong = evaluate(dataset, dict.fromkeys(golds, "xyzzy"))
        assert wrong[exact] == wrong["f1"] == 0


@pytest.mark.parametrize(
    ("dataset", "predictions", "message"),
    [
        ([], {}, r"no list 'data'"),
        ({"data": [{"title": "x"}]}, {}, r"no list 'data\[0\].paragraphs'"),
        (
            {"data": [{"paragraphs": [{"qas": [{"answers": []}]}]}]},
            {},
            r"data\[0\].paragraphs\[0\].qas\[0\] has no",
        ),
        ({"data": [{"paragraphs": [{"qas": [{"id": "q"}]}]}]}, {}, r"id q\) has no list 'answers'"),
        (
            {"data": [{"paragraphs": [{"qas": [{"id": "q", "answers": ["x"]}]}]}]},
            {},
            r"needs a string 'text'",
        ),
        ({"data": []}, {"q": "x"}, "no questions"),
        (data({"q": ["x"]}), {"q": None}, "question q: None is not a string"),
        (data({"q": ["x"]}), {"other": "x"}, "none of the 1 predictions"),
    ],
)
def test_bad_input_is_named(dataset: Any, predictions: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        evaluate(dataset, predictions)


def test_bad_probabilities_are_named() -> None:
    with pytest.raises(UserError, match=r"v2\.0 data"):
        evaluate(data({"q": ["x"]}), {"q": "x"}, {"q": 0.5})
    with pytest.raises(UserError, match="no number for question q"):
        evaluate(data({"q": []}), {"q": "x"}, {"p": 0.5})


def test_command(tmp_path: Path) -> None:
    questions, answers, probabilities = (tmp_path / name for name in ("data.json", "pred.json", "na.json"))
    questions.write_text(json.dumps(data({"1": ["cat"], "2": []})))
    answers.write_text('{"1": "the cat", "2": "dog"}')
    probabilities.write_text('{"1": 0.1, "2": 0.8}')
    command = ["squad", "--data", str(questions), "--predictions", str(answers)]

    result = CliRunner().invoke(app, [*command, "--na-probs", str(probabilities), "--json"])
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert (values["exact"], values["total"], values["best_exact"], values["best_exact_thresh"]) == (
        50,
        2,
        100,
        0.1,
    )

    table = CliRunner().invoke(app, command).stdout
    assert "SQuAD v2.0" in table
    assert "50.0000" in table


def test_command_names_the_place_of_bad_json(tmp_path: Path) -> None:
    good, bad, listed = tmp_path / "good.json", tmp_path / "bad.json", tmp_path / "list.json"
    good.write_text(json.dumps(data({"1": ["cat"]})))
    bad.write_text('{"1": "cat",\n "2": }')
    listed.write_text("[1]")
    for predictions, message in (
        (bad, "line 2, column 7"),
        (listed, "a JSON object is needed"),
        (tmp_path / "none.json", "no such file"),
    ):
        result = CliRunner().invoke(app, ["squad", "--data", str(good), "--predictions", str(predictions)])
        assert isinstance(result.exception, UserError)
        assert message in str(result.exception)
        assert str(predictions) in str(result.exception)
