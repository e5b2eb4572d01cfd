"""The report: what its tables and its text say, the file, and the command that writes it."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from result_example import hostile, make_result, small, table, typed, write

from pf2lora import report as pages
from pf2lora.cli.report import report
from pf2lora.cli.show import score_table
from pf2lora.errors import UserError
from pf2lora.report import GENERATOR, choices, views
from pf2lora.report import findings as sentences
from pf2lora.report.payload import RANK_ROUNDS, payload
from pf2lora.run import numbers
from pf2lora.tasks.settings import Metric


def render(runs: list[dict[str, Any]], names: list[str] | None = None) -> str:
    return pages.render([typed(r) for r in runs], names)


def build(runs: list[dict[str, Any]], out: Path, names: list[str] | None = None) -> Path:
    return pages.build([typed(r) for r in runs], out, names)


def findings(result: dict[str, Any]) -> list[str]:
    return sentences.findings(typed(result))


def all_series(runs: list[dict[str, Any]], names: list[str]) -> list[views.Series]:
    return views.all_series([typed(r) for r in runs], names)


@pytest.fixture(scope="module")
def full() -> dict[str, Any]:
    return make_result(task="generation")


def marks(result: dict[str, Any], column: str = "served") -> dict[str, str]:
    rows = views.headline(all_series([result], ["run"]), result["metric"])
    return {row["series"].method: row[column].mark for row in rows}


def test_the_best_is_marked_and_so_is_who_cannot_be_told_from_it() -> None:
    result = small(pf2lora=[0.90, 0.92], homlora=[0.89, 0.92], hetlora=[0.70, 0.71])
    assert marks(result) == {"pf2lora": "best", "homlora": "tied", "hetlora": ""}


def test_what_is_sent_is_one_figure_in_terminal_report_and_charts() -> None:
    """The head's numbers are sent, too."""
    result = typed(make_result(clients=2, seeds=1, rounds=2, layers=2))
    series = views.all_series([result], ["run"])
    sent = [method.runs[0].bytes_per_round for method in result.methods.values()]
    assert any(part.head for part in sent)
    expected = [numbers.size(part.adapter + part.head) for part in sent]
    assert [row["bytes"] for row in views.headline(series, result.metric)] == expected
    assert list(score_table(result).columns[-2].cells)[: len(sent)] == expected
    charts = payload([result], series, result.metric)["series"]
    assert [numbers.size(one["bytes"]) for one in charts] == expected


def test_the_best_of_a_loss_is_the_lowest() -> None:
    result = small(pf2lora=[0.2, 0.21], homlora=[0.8, 0.81])
    result["metrics"] = copy.deepcopy(result["metrics"])
    result["metrics"]["accuracy"]["higher_is_better"] = False
    assert marks(result) == {"pf2lora": "best", "homlora": ""}


def test_one_seed_marks_no_spread_and_says_so() -> None:
    result = small(pf2lora=[0.90], homlora=[0.8999])
    assert marks(result) == {"pf2lora": "best", "homlora": ""}
    page = render([result])
    assert "A spread needs several seeds" in page and ">tied<" not in page
    assert "Whether that is more than chance needs several seeds" in findings(result)[0]


def test_runs_with_other_clients_are_not_ranked_against_each_other() -> None:
    first, second = small(pf2lora=[0.9, 0.9]), small(pf2lora=[0.5, 0.5], homlora=[0.4, 0.4])

    def marked() -> list[str]:
        rows = views.headline(all_series([first, second], ["a", "b"]), "accuracy")
        return [row["served"].mark for row in rows]

    assert marked() == ["best", "", ""]
    second["clients"][0]["train"] += 1
    assert marked() == ["", "best", ""]
    assert "do not have the same clients" in render([first, second])


def test_findings_say_whether_federating_beats_training_alone() -> None:
    def said(pf2lora: list[float], local: list[float]) -> str:
        return findings(small(pf2lora=pf2lora, local=local))[1]

    assert said([0.9, 0.91], [0.8, 0.81]).startswith("Federating beats training alone")
    assert "+10.00 against Local, more than chance. 2 of 2 clients gain" in said([0.9, 0.91], [0.8, 0.81])
    assert said([0.8, 0.81], [0.9, 0.91]).startswith("Federating does not beat training alone")
    assert said([0.9, 0.91], [0.89, 0.91]).startswith("Federating and training alone cannot be told apart")
    assert "in one seed" in said([0.9], [0.8])


def test_findings_name_the_worst_client_and_the_cost_of_averaging() -> None:
    result = small(pf2lora=[0.9, 0.9], homlora=[0.8, 0.8])
    for run in result["methods"]["pf2lora"]["runs"]:
        run["served"]["accuracy"] = table([0.99, 0.81])
        run["before_averaging"] = {"accuracy": table([0.99, 0.91])}
    text = " ".join(findings(result))
    assert "averaging costs PF2LoRA 5.00 and HOMLoRA 0.00" in text
    assert f"Worst off under PF2LoRA is {result['clients'][1]['name']} with 81.00" in text
    for run in result["methods"]["homlora"]["runs"]:
        run["before_averaging"] = {"accuracy": table([0.79, 0.79])}
    gained = " ".join(findings(result))
    assert "averaging costs PF2LoRA 5.00, while HOMLoRA gains 1.00 by it" in gained


def chosen(result: dict[str, Any], scores: list[float], *candidates: str) -> dict[str, Any]:
    """The same with what its first method's clients deploy: these scores, of these candidates, in every seed."""
    for method in result["methods"].values():
        for run in method["runs"]:
            run["deploy"] = copy.deepcopy(run["served"])
            run["choices"] = [choice("served", 2), choice("served", 2)]
            run["candidates"] = {"served": run["served"]}
    for run in next(iter(result["methods"].values()))["runs"]:
        run["deploy"]["accuracy"] = table(list(scores))
        run["choices"] = [choice(*c.split("@")) for c in candidates]
    return result


def choice(candidate: str, number: Any = 2) -> dict[str, Any]:
    return {
        "candidate": candidate,
        "round": int(number),
        "validation_loss": 0.5,
        "last_round": {"served": 0.6},
    }


def test_the_best_is_by_what_clients_deploy_where_all_chose() -> None:
    result = small(pf2lora=[0.90, 0.90], homlora=[0.92, 0.92])
    assert findings(result)[0].startswith("As served, HOMLoRA scores best")
    chosen(result, [0.99, 0.95], "served", "personal_steps")
    assert typed(result).point == "deploy"
    assert findings(result)[0].startswith("As deployed, PF2LoRA scores best: 97.00 ± 0.00")
    assert marks(result, "deploy") == {"pf2lora": "best", "homlora": ""}
    assert marks(result) == {"pf2lora": "", "homlora": "best"}
    text = " ".join(findings(result))
    assert "something else than what they are served: 50% (PF2LoRA). It brings PF2LoRA most: +7.00" in text
    assert "+5.00 against HOMLoRA" in text and "Worst off under PF2LoRA" in text and "with 95.00" in text
    rows = views.headline(all_series([result], ["run"]), "accuracy")
    assert [(row["worst"].value, row["spread"]) for row in rows] == [("95.00", "2.00"), ("92.00", "0.00")]
    page = render([result])
    assert "The worst client and the spread are of deploy" in page and ">Deploy</th>" in page
    for run in result["methods"]["homlora"]["runs"]:
        run |= {"deploy": None, "choices": None}
    assert typed(result).point == "served" and "are of served, as not every method has deploy" in render(
        [result]
    )
    assert ">Deploy</th>" not in render([small(pf2lora=[0.9])])


def test_what_clients_chose_in_words_and_in_a_table() -> None:
    result = chosen(small(pf2lora=[0.9, 0.9], local=[0.8, 0.8]), [0.9, 0.9], "served@1", "personal_steps@2")
    read = typed(result)
    assert choices.sentence(read, "pf2lora") == "2 × served in an earlier round, 2 × after personal steps"
    assert choices.sentence(read, "local") == "4 × served"
    found = choices.table(all_series([result], ["run"]), "accuracy")
    assert found["candidates"] == ["served"]
    assert [
        (r["deploy"].value, r["cells"][0][0].value, r["cells"][0][1], r["of"]) for r in found["rows"]
    ] == [
        ("90.00", "90.00", 2, 4),
        ("80.00", "80.00", 4, 4),
    ]
    alone = typed(chosen(small(pf2lora=[0.9]), [0.9, 0.9], "before_averaging@1", "common@2"))
    first, second = (client.name for client in alone.clients)
    assert choices.sentence(alone, "pf2lora") == (
        f"{first}: before averaging in round 1; {second}: the common adapter alone"
    )
    assert choices.sentence(typed(small(pf2lora=[0.9])), "pf2lora") == ""
    said = " ".join(findings(chosen(small(pf2lora=[0.9], local=[0.8]), [0.9, 0.9], "served", "served")))
    assert "Every client deploys what it is served after the last round" in said


def test_long_label_lists_are_summed_as_other() -> None:
    result = small(local=[0.5])
    result["clients"][0]["labels"] = {f"topic {i}": 100 - i for i in range(20)}
    result["clients"][1]["labels"] = {"topic 19": 5}
    data = views.client_data(typed(result))
    assert data["labels"] == [*(f"topic {i}" for i in range(7)), "other (13)"]
    for row, client in zip(data["rows"], result["clients"]):
        assert sum(part["rows"] for part in row["parts"]) == sum(client["labels"].values())
        assert sum(part["share"] for part in row["parts"]) == pytest.approx(1, abs=1e-3)


def test_the_embedded_data_keeps_few_rank_pictures_with_the_last() -> None:
    result = make_result(clients=2, seeds=1, rounds=200, layers=2)
    run = payload([typed(result)], all_series([result], ["run"]), "accuracy")["series"][0]["runs"][0]
    kept = [entry["round"] for entry in run["rounds"] if "ranks" in entry]
    assert len(kept) == RANK_ROUNDS and kept[0] == 2 and kept[-1] == 200
    assert len(run["rounds"]) == 200


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (numbers.size(294_912), "295 kB"),
        (numbers.size(999_900), "1 MB"),
        (numbers.count(9_999), "9,999"),
        (numbers.count(73_728), "73.7 k"),
        (numbers.flops(1.1e13), "11 TFLOP"),
        (numbers.flops(None), "not counted"),
        (numbers.duration(152.4), "2 min 32 s"),
        (numbers.duration(8000), "2 h 13 min"),
        (numbers.listed(["a", "b", "c"]), "a, b and c"),
        (numbers.score(-0.0123, Metric("a"), signed=True), "−1.23"),
    ],
)
def test_numbers_read_well(shown: str, expected: str) -> None:
    assert shown == expected


def test_texts_from_outside_stay_texts() -> None:
    page = render([hostile()])
    assert "window.hacked" in page
    assert "<script>window" not in page and "<img" not in page
    assert len(re.findall(r"<script", page)) == len(re.findall(r"</script", page)) == 3
    assert "innerHTML" not in page and "insertAdjacentHTML" not in page and "document.write" not in page


def test_nothing_is_fetched(full: dict[str, Any]) -> None:
    page = render([full])
    assert not re.search(r"""(?:src|href)\s*=\s*(?!["']#)""", page)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|<link", page)
    assert "default-src 'none'" in page


def luminance(color: str) -> float:
    """The relative luminance of `#rrggbb`, as WCAG 2 defines it."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_can_be_told_from_the_paper_in_both_themes(full: dict[str, Any]) -> None:
    found = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", render([full]))
    names = {name: themes for name, *themes in found}
    limits = dict.fromkeys([f"c{i}" for i in range(views.COLORS)], 3.0)
    limits |= dict.fromkeys(["ink", "faint", "accent", "gain", "loss"], 4.5)
    for name, limit in limits.items():
        for color, paper in zip(names[name], names["paper"]):
            low, high = sorted([luminance(color), luminance(paper)])
            assert (high + 0.05) / (low + 0.05) >= limit, f"--{name}: {color} on {paper}"


def test_without_script_the_table_and_the_text_are_there(full: dict[str, Any]) -> None:
    page = render([full])
    for method in full["methods"]:
        served = typed(full).estimate(method, "served", "accuracy")
        assert served is not None
        assert numbers.score(served.mean, typed(full).metrics["accuracy"]) in page
    assert findings(full)[0] in page


def test_build_leaves_nothing_beside_the_report(tmp_path: Path, full: dict[str, Any]) -> None:
    assert build([full], tmp_path / "new" / "report.html") == tmp_path / "new" / "report.html"
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["report.html"]


def test_the_command_rebuilds_one_and_compares_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (
        write(tmp_path / "first", small(pf2lora=[0.9])),
        write(tmp_path / "second", small(local=[0.8])),
    )
    report([first])
    assert GENERATOR in (first / "report.html").read_text()
    report([first, second])
    page = (tmp_path / "report.html").read_text()
    assert "2 runs compared" in page and ">first<" in page and ">second<" in page
    report([first, second], tmp_path / "report.html")  # its own report may be written anew
    assert capsys.readouterr().out.split() == [
        str(first / "report.html"),
        "report.html",
        str(tmp_path / "report.html"),
    ]


def test_the_command_keeps_files_that_are_not_its_own(tmp_path: Path) -> None:
    run = write(tmp_path / "run", small(local=[0.8]))
    foreign = tmp_path / "notes.html"
    foreign.write_text("mine")
    with pytest.raises(UserError, match="not a report of pf2lora"):
        report([run], foreign)
    with pytest.raises(UserError, match="a folder"):
        report([run], tmp_path)
    (run / "report.html").write_text("mine")
    with pytest.raises(UserError, match="not a report of pf2lora"):
        report([run])
    assert (run / "report.html").read_text() == "mine"
    assert foreign.read_text() == "mine"


def test_runs_of_different_tasks_are_not_compared(tmp_path: Path) -> None:
    first, second = small(local=[0.8]), small(local=[0.8])
    second["task"] = "generation"
    with pytest.raises(UserError, match="different tasks"):
        report([write(tmp_path / "a", first), write(tmp_path / "b", second)], tmp_path / "out.html")
    assert not (tmp_path / "out.html").exists()
