"""Scores of generated text: against the official values on a real output, and by hand on small ones."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pf2lora.cli.score import app, read_items
from pf2lora.errors import UserError
from pf2lora.tasks.generation import java
from pf2lora.tasks.generation import scores as nlg
from pf2lora.tasks.generation.nist import nist
from pf2lora.tasks.generation.scores import bleu, e2e_scores, lora_tokenize, ter, webnlg_scores

pytest.importorskip("sacrebleu")
pytest.importorskip("pycocoevalcap")
pytest.importorskip("pyter")
needs_java = pytest.mark.skipif(shutil.which("java") is None, reason="no Java on this machine")

SYSTEM = ["The cat sat on the mat.", "A dog barks."]
REFERENCES = [["The cat sat on the mat.", "A cat was on a mat."], ["A dog barks."]]


@pytest.fixture
def e2e_files(shared_data: Path) -> tuple[Path, Path]:
    return shared_data / "metrics" / "e2e_system.txt", shared_data / "metrics" / "e2e_references.txt"


def fake_java(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Puts a shell script in the place of Java."""
    (folder / "java").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "java").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@needs_java
def test_e2e_command_agrees_with_the_official_script(e2e_files: tuple[Path, Path], shared_data: Path) -> None:
    (expected,) = json.loads((shared_data / "metrics" / "expected.json").read_text()).values()
    system, references = e2e_files
    command = ["e2e", "--system", str(system), "--references", str(references), "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert list(values) == ["BLEU", "NIST", "METEOR", "ROUGE_L", "CIDEr"]
    assert {name: round(value, 4) for name, value in values.items()} == {
        name: expected[name] for name in values
    }


@needs_java
def test_webnlg_meteor_is_that_of_the_official_command(e2e_files: tuple[Path, Path], tmp_path: Path) -> None:
    """LoRA fills every item up to six references with its first and gives METEOR two files."""
    outputs, items = read_items(*e2e_files)
    outputs, items = outputs[100:120], items[100:120]
    hypotheses, references = tmp_path / "hypotheses", tmp_path / "references"
    hypotheses.write_text("\n".join(map(lora_tokenize, outputs)))
    filled = [(item + [item[0]] * 6)[:6] for item in items]
    references.write_text("\n".join(lora_tokenize(text) for item in filled for text in item))
    jar = java._package_folder() / "meteor" / "meteor-1.5.jar"
    command: list[str | Path] = [
        "java",
        "-Dfile.encoding=UTF-8",
        "-Xmx2G",
        "-jar",
        jar,
        hypotheses,
        references,
    ]
    command += ["-l", "en", "-norm", "-r", "6"]
    official = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    scores = webnlg_scores(outputs, items)
    assert scores.absent == {}
    assert list(scores.values) == ["BLEU", "METEOR", "TER", "ROUGE_L"]
    assert scores.values["METEOR"] == pytest.approx(float(official.split()[-1]), abs=1e-9)
    assert 0 < scores.values["BLEU"] < 1


@needs_java
def test_a_copy_of_a_reference_is_perfect() -> None:
    scores = webnlg_scores(SYSTEM, REFERENCES)
    assert scores.values == {"BLEU": pytest.approx(1), "METEOR": pytest.approx(1), "TER": 0, "ROUGE_L": 1}


@needs_java
def test_empty_outputs_and_line_separators_keep_their_places() -> None:
    texts = ["", "Café\u2028au lait, 漢字!", "a\x85b\rc ||| d", "", "(It's) good.", ""]
    words = java.ptb_tokenize(texts)
    # Brackets stay, as with pycocoevalcap: its list of punctuation has them in capitals only.
    assert words == ["", "café au lait 漢字", "a b c | | | d", "", "-lrb- it 's -rrb- good", ""]
    with java.one_meteor():  # which takes seconds to start
        scores = e2e_scores(["", ""], REFERENCES)
        assert scores.values == dict.fromkeys(nlg.E2E_METRICS, 0.0)  # nothing matched, nothing absent
        assert java.meteor(["", "dog"], [["a cat"], ["dog", "a ||| b"]]) > 0


@needs_java
def test_one_meteor_serves_many_calls_with_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = java.meteor(SYSTEM, REFERENCES)
    started: list[Any] = []
    popen = subprocess.Popen

    def start(*args: Any, **options: Any) -> Any:
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(java.subprocess, "Popen", start)
    with java.one_meteor():
        together = [java.meteor(SYSTEM, REFERENCES) for _ in range(2)]
    assert together == [alone] * 2 and len(started) == 1
    assert started[0].poll() is not None  # gone at the end


def test_after_a_failure_another_meteor_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = tmp_path / "tries"
    fake_java(tmp_path, monkeypatch, f"echo try >> {tries}; echo 'out of memory' >&2; exit 1")
    with java.one_meteor():
        for _ in range(2):
            with pytest.raises(java.Absent, match="out of memory"):
                java.meteor(SYSTEM, REFERENCES)
    assert len(tries.read_text().splitlines()) == 2


def test_nist_by_hand() -> None:
    # Over 4 reference words: info(a) = log2(4/2) = 1, info(b) = log2(4/1) = 2, info(a b) = log2(2/1) = 1.
    references = [[["a", "b", "a", "c"]]]
    assert nist([["a", "b", "b", "b"]], references, max_order=2) == pytest.approx((1 + 2) / 4 + 1 / 3)
    # A matched n-gram counts as often as in the reference that has it most often, not as in all together.
    twice = [[["a", "b"], ["a", "c"]]]
    assert nist([["a", "a"]], twice, max_order=1) == pytest.approx(math.log2(4 / 2) / 2)


def test_nist_brevity_is_half_at_two_thirds() -> None:
    references = [[["a", "b", "c"]], [["d", "e", "f"]]]
    assert nist([["a", "b"], ["d", "e"]], references) == pytest.approx(0.5 * math.log2(6))
    assert nist([["a", "b", "x"], ["d", "e", "y"]], references) == pytest.approx(2 / 3 * math.log2(6))
    assert nist([[], []], references) == 0


def test_reference_length_of_nist_is_the_mean_of_an_item() -> None:
    # Mean lengths 2 and 2: an output of 4 words is not short, whatever the longest reference.
    references = [[["a"], ["a", "b", "c"]], [["d", "e"]]]
    information = math.log2(6 / 2) + math.log2(6) * 3
    assert nist([["a", "b"], ["d", "e"]], references, max_order=1) == pytest.approx(information / 4)


def test_bleu_by_hand_with_different_numbers_of_references() -> None:
    # Words (13a): "a b c d e" and "x y z w" with all n-grams matched but the last word of the first.
    system = ["a b c d q", "x y z w"]
    references = [["a b c d e", "a b", "a b c d e f g h"], ["x y z w"]]
    precisions = (8 / 9) * (6 / 7) * (4 / 5) * (2 / 3)
    assert bleu(system, references) == pytest.approx(precisions**0.25)
    assert bleu(["a b c q"], [["a b c d"]]) == 0  # not smoothed
    assert bleu(["a b c d e"], [["a b c d e f"]]) == pytest.approx(math.exp(1 - 6 / 5))


def test_ter_is_the_mean_of_the_best_reference() -> None:
    # One shift; one of four words wrong; nothing at all.
    system = ["c a b", "a b c x", ""]
    references = [["a b c", "q r s"], ["k", "a b c d"], ["a b"]]
    assert ter(system, references) == pytest.approx((1 / 3 + 1 / 4 + 1) / 3)
    assert ter(["a"], [["", "b c d e"]]) == 1


def test_ter_is_the_lowest_rate_also_where_references_are_skipped(e2e_files: tuple[Path, Path]) -> None:
    import pyter

    outputs, items = read_items(*e2e_files)
    for output, item in list(zip(outputs, items))[::100]:
        rates = [pyter.ter(output.split(), reference.split()) for reference in item[:6]]
        assert ter([output], [item[:6]]) == min(rates)


def test_lora_words() -> None:
    assert lora_tokenize('Él can\'t: 3.5-km "A_b"') == 'él can \' t : 3 . 5 - km " a_b "'
    assert nlg._nltk_words('cannot " gonna cannots') == "can not `` gon na cannots"


@pytest.mark.parametrize(
    ("score", "present", "absent"),
    [
        (e2e_scores, ["BLEU", "NIST"], ["METEOR", "ROUGE_L", "CIDEr"]),
        (webnlg_scores, ["BLEU", "TER"], ["METEOR", "ROUGE_L"]),
    ],
)
def test_without_java_scores_are_absent_with_the_reason(
    score: Callable[..., nlg.Scores], present: list[str], absent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    scores = score(SYSTEM, REFERENCES)
    assert list(scores.values) == present
    assert list(scores.absent) == absent
    assert all("no 'java' on the PATH" in reason for reason in scores.absent.values())


@pytest.mark.parametrize(
    "compute", [lambda: java.ptb_tokenize(SYSTEM), lambda: java.meteor(SYSTEM, REFERENCES)]
)
def test_a_hanging_java_is_ended(
    compute: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = (
        tmp_path / "beats"
    )  # written by what the script starts, as a wrapper around the real Java would be
    fake_java(tmp_path, monkeypatch, f"(while :; do echo >> {beats}; sleep 0.05; done) & wait")
    monkeypatch.setattr(java, "START_SECONDS", 1.0)
    monkeypatch.setattr(java, "SECONDS_PER_LINE", 0.0)
    with pytest.raises(java.Absent, match="no answer within 1 s"):
        compute()
    time.sleep(0.2)
    before = beats.stat().st_size
    time.sleep(0.5)
    assert 0 < beats.stat().st_size == before


@pytest.mark.parametrize(
    "compute", [lambda: java.ptb_tokenize(SYSTEM), lambda: java.meteor(SYSTEM, REFERENCES)]
)
def test_the_reason_of_a_failing_java_is_its_own(
    compute: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_java(tmp_path, monkeypatch, "echo 'Could not reserve enough space' >&2; exit 1")
    with pytest.raises(java.Absent, match="Could not reserve enough space"):
        compute()


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyter", None)
    monkeypatch.setattr(java, "find_spec", lambda name: None)
    scores = webnlg_scores(SYSTEM, REFERENCES)
    assert list(scores.values) == ["BLEU"]
    assert all("pip install 'pf2lora[nlg]'" in reason for reason in scores.absent.values())


def test_command_without_java_shows_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system, references = tmp_path / "system", tmp_path / "references"
    system.write_text("\n".join(SYSTEM) + "\n")
    references.write_text("\n\n".join("\n".join(item) for item in REFERENCES) + "\n\n\n")
    monkeypatch.setenv("PATH", "")
    command = ["webnlg", "--system", str(system), "--references", str(references)]
    plain = CliRunner().invoke(app, [*command, "--json"])
    assert json.loads(plain.stdout) == {"BLEU": pytest.approx(1), "TER": 0}
    assert "absent: METEOR, ROUGE_L: needs Java" in plain.stderr
    table = CliRunner().invoke(app, command).stdout
    assert "METEOR" in table
    assert "absent" in table
    assert "1.0000" in table


def test_files_of_outputs_and_references(tmp_path: Path) -> None:
    system, references = tmp_path / "system", tmp_path / "references"
    system.write_text("\ufeffone\n\nthree \u2028 x\r\n\n", encoding="utf-8")
    references.write_text("a\nb\n\nc\n\nd\n\ne\n\n")
    assert read_items(system, references) == (
        ["one", "", "three \u2028 x", ""],
        [["a", "b"], ["c"], ["d"], ["e"]],
    )
    references.write_text("a\nb\nc\nd\n")  # no blank line: one reference an item
    assert read_items(system, references)[1] == [["a"], ["b"], ["c"], ["d"]]


@pytest.mark.parametrize(
    ("system", "references", "message"),
    [
        ("one\ntwo\n", "a\n\nb\n\nc\n", "has 2 outputs, but .* has references of 3 items"),
        ("one\ntwo\n", "a\n\n\nb\n", "line 3: item 2 has no reference"),
        ("one\n", "\n\n", "item 1 has no reference"),
        ("", "a\n", "system is empty"),
        ("one\n", None, "references: no such file"),
        ("one\n", "\udcff", "references, line 1: not UTF-8"),
    ],
)
def test_bad_files_are_named(system: str, references: str | None, message: str, tmp_path: Path) -> None:
    (tmp_path / "system").write_text(system)
    if references is not None:
        (tmp_path / "references").write_text(references, errors="surrogateescape")
    command = ["e2e", "--system", str(tmp_path / "system"), "--references", str(tmp_path / "references")]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, UserError)
    with pytest.raises(UserError, match=message):
        raise result.exception


def test_unequal_lists_are_refused() -> None:
    with pytest.raises(UserError, match="1 outputs but 2 items"):
        e2e_scores(["a"], REFERENCES)
    with pytest.raises(UserError, match="item 2 has no reference"):
        webnlg_scores(["a", "b"], [["a"], []])
    with pytest.raises(UserError, match="no outputs"):
        e2e_scores([], [])
