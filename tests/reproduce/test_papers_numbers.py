"""Every number of the paper's that the package has, against the paper's source, where that is at hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pf2lora.methods import METHODS, SETS
from pf2lora.reproduce.presets import load_preset, preset_names

Place = tuple[str, str, str]  # preset, run, quantity
GLUE = ("cola", "mnli", "sst2", "qqp", "qnli")


def on_glue(preset: str) -> list[Place]:
    return [(preset, run, "matthews" if run == "cola" else "accuracy") for run in GLUE]


def of_run(preset: str, run: str, *quantities: str) -> list[Place]:
    return [(preset, run, quantity) for quantity in quantities]


TABLES: dict[str, list[Place]] = {
    "tab:result_roberta_base": on_glue("glue-roberta-base"),
    "tab:result_roberta_large": on_glue("glue-roberta-large"),
    "tab:result_squad": [
        place for run in ("squad-v1", "squad-v2") for place in of_run("squad", run, "exact_match", "f1")
    ],
    "tab:result_webnlg": of_run("webnlg-gpt2-medium", "webnlg", "BLEU", "METEOR", "TER", "ROUGE_L"),
    "tab:result_webnlg_GPT2_XL": of_run("webnlg-gpt2-xl", "webnlg", "BLEU", "METEOR", "TER", "ROUGE_L"),
    "tab:result_e2e": of_run("e2e-gpt2-medium", "e2e", "BLEU", "NIST", "METEOR", "ROUGE_L", "CIDEr"),
    "tab:more_prams_result": [
        ("parameters", "more-parameters", "parameters"),
        *on_glue("more-parameters"),
    ],
    "tab:parameters_roberta": [("parameters", f"roberta-{size}", "parameters") for size in ("base", "large")],
    "tab:deberta_hyperparam": of_run("parameters", "deberta-v3-base", "parameters"),
    "tab:gpt2_hyperparam": of_run("parameters", "gpt2-medium", "parameters"),
    "tab:het_level": [
        ("heterogeneity", f"{of}-{h}", "accuracy") for of in ("sst2", "qnli") for h in ("0.6", "0.9", "1")
    ],
    "tab:het_level_cola": [("heterogeneity-cola", f"cola-{h}", "matthews") for h in ("0.2", "0.3", "0.4")],
    "tab:computing_cost": of_run("costs", "exact", "tflops", "sent_parameters"),
}
"""What stands in the columns of each of the paper's tables, by its label."""


@pytest.fixture(scope="module")
def paper(shared_data: Path) -> str:
    """The paper's source without its comments, in which there are tables, too."""
    source = shared_data.parent / "paper" / "pf2lora.tex"
    if not source.is_file():
        pytest.skip(f"no paper at {source}")
    return re.sub(r"(?<!\\)%.*", "", source.read_text(encoding="utf8"))


def tables(paper: str) -> dict[str, tuple[int, str]]:
    """Each table's number and text by its label: numbers count the captions."""
    found = re.findall(r"\\begin\{table\*?\}(.*?)\\end\{table\*?\}", paper, re.DOTALL)
    labels = [re.findall(r"\\label\{(tab:\w+)\}", text) for text in found]
    return {label[0]: (number, text) for number, (label, text) in enumerate(zip(labels, found), 1)}


def numbers(table: str) -> dict[str, list[float]]:
    """A table's numbers by method, in the order of its columns."""
    found = {}
    for line in table.split(r"\\"):
        name, *cells = re.sub(r"\\(textbf|small)\b", "", line).split("&")
        for method in SETS["paper"]:
            if METHODS[method].label in name and cells:
                values = re.findall(r"(\d+\.\d+)(M?)", " ".join(cells))
                found[method] = [float(value) * (1e6 if million else 1) for value, million in values]
    return found


def test_the_numbers_beside_a_run_are_the_papers(paper: str) -> None:
    in_paper: dict[Place, dict[str, float]] = {}
    for label, places in TABLES.items():
        for method, values in numbers(tables(paper)[label][1]).items():
            assert len(values) == len(places), (label, method)
            for place, value in zip(places, values):
                in_paper.setdefault(place, {})[method] = value
    tflops = in_paper["costs", "exact", "tflops"]
    in_paper["costs", "exact", "tflops_ratio"] = {m: v / tflops["homlora"] for m, v in tflops.items()}
    for with_bilevel in on_glue("glue-roberta-base"):
        _, dataset, quantity = with_bilevel
        in_paper["bilevel", dataset, quantity] = {"pf2lora": in_paper[with_bilevel]["pf2lora"]}

    stored = {}
    for name in preset_names():
        preset = load_preset(name)
        for run in preset.runs:
            for quantity, of_methods in run.paper.items():
                times = 100 if preset.percent else 1
                stored[name, run.name, quantity] = {m: v * times for m, v in of_methods.items()}
    assert sum(map(len, stored.values())) == 229
    assert stored.keys() == in_paper.keys()
    for place, of_methods in stored.items():
        rounded = 1e-4 if place[2] == "tflops_ratio" else 1e-9  # the paper has no ratios: they are ours
        assert of_methods == pytest.approx(in_paper[place], rel=rounded), place


def test_tables_are_numbered_as_in_the_paper(paper: str) -> None:
    counted = {label: number for label, (number, _) in tables(paper).items()}
    for name in preset_names():
        source = load_preset(name).source
        if named := re.match(r"Tables? ([\d, and]+)\((.*?)\)", source):
            first, *rest = re.split(r", ", named[2])
            labels = [first, *(re.sub(r"\d$", part, first) if part.isdigit() else part for part in rest)]
            assert [counted[label] for label in labels] == [int(n) for n in re.findall(r"\d+", named[1])]


def test_generated_texts_are_quoted_from_the_paper(paper: str) -> None:
    def letters(text: str) -> str:
        return re.sub(r"[\W_]", "", re.sub(r"\\(textcolor\{\w+\}|midrule)", "", text)).lower()

    everything = letters(paper)
    for name in ("examples-e2e", "examples-webnlg"):
        for example in load_preset(name).examples:
            for text in (example.prompt, *example.outputs.values()):
                assert letters(text) in everything, text


def test_the_test_sets_that_the_paper_counts_are_said(paper: str) -> None:
    number, table = tables(paper)["tab:glue_benchmark"]
    (note,) = (note for note in load_preset("glue-roberta-base").notes if f"Table {number}" in note)
    tested = {line.split("&")[0].strip(): line.split("&")[2].strip() for line in table.split(r"\\")[1:-1]}
    assert all(f"{name} {tested[name]}" in note for name in ("SST-2", "QQP"))
