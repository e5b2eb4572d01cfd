"""Scores of generated text, as the evaluation scripts of E2E and of the LoRA paper give them.

Every score is a fraction (BLEU 0.39, not 39) except NIST and CIDEr, which have scales of their own; for TER less
is better. What cannot be computed on a machine (no Java, the extra not installed) is absent, with the reason, and
never zero. Nothing is downloaded. Items may have different numbers of references. An empty output counts: it has
no words, so it matches nothing (TER 1) and shortens the output for the brevity penalties of BLEU and NIST.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest

from pf2lora.errors import UserError, missing_extra
from pf2lora.tasks.generation import rouge
from pf2lora.tasks.generation.java import Absent, meteor, ptb_tokenize
from pf2lora.tasks.generation.nist import nist
from pf2lora.tasks.generation.rouge import words

E2E_METRICS = ("BLEU", "NIST", "METEOR", "ROUGE_L", "CIDEr")
ANSWER_METRICS = ("rouge_l", "rouge_1", "rouge_2", "exact_match")
WEBNLG_METRICS = ("BLEU", "METEOR", "TER", "ROUGE_L")
LORA_REFERENCES = 6  # LoRA's WebNLG evaluation reads this many references of an item (`-nr 6`)

References = Sequence[Sequence[str]]


@dataclass
class Scores:
    """Values by metric, and the reason for each metric that could not be computed."""

    values: dict[str, float] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def attempt(self, *names: str) -> Iterator[dict[str, float]]:
        """Collects the values of these metrics; those not there when one turns out impossible are absent."""
        try:
            yield self.values
        except Absent as reason:
            self.absent |= {name: str(reason) for name in names if name not in self.values}


def e2e_scores(system: Sequence[str], references: References) -> Scores:
    """BLEU, NIST, METEOR, ROUGE-L and CIDEr as `measure_scores.py -p` of the E2E challenge (e2e-metrics).

    BLEU and NIST (n = 5) on lower-cased 13a words; METEOR 1.5, ROUGE-L and CIDEr on lower-cased PTB words without
    punctuation, as pycocoevalcap.
    """
    _check(system, references)
    scores = Scores()
    with scores.attempt("BLEU", "NIST") as values:
        lower, lower_references = _map(str.lower, system, references)
        values["BLEU"] = bleu(lower, lower_references)
        values["NIST"] = nist(*_words_13a(lower, lower_references))
    with scores.attempt("METEOR", "ROUGE_L", "CIDEr") as values:
        words, reference_words = _ptb(system, references)
        values["ROUGE_L"] = rouge_l(words, reference_words)
        values["CIDEr"] = cider(words, reference_words)
        values["METEOR"] = meteor(words, reference_words)  # last: it alone may still fail
    return _ordered(scores, E2E_METRICS)


def webnlg_scores(system: Sequence[str], references: References) -> Scores:
    """BLEU, METEOR and TER as LoRA's WebNLG evaluation (`gpt2_decode.py --tokenize --lower`, then the WebNLG
    challenge's `eval.py -nr 6 -m bleu,meteor,ter`), and ROUGE-L as `e2e_scores`.

    LoRA lower-cases and splits at every character that is not a letter, digit or underscore, and reads the first
    six references of an item. BLEU is multi-bleu-detok (13a words), METEOR 1.5 with `-norm` on the text with its
    punctuation, TER the mean over the items of the best reference with pyter.
    """
    _check(system, references)
    scores = Scores()
    few = [item[:LORA_REFERENCES] for item in references]
    split, split_references = _map(lora_tokenize, system, few)
    with scores.attempt("BLEU") as values:
        values["BLEU"] = bleu(split, split_references)
    words, reference_words = _map(_nltk_words, split, split_references)
    with scores.attempt("TER") as values:
        values["TER"] = ter(words, reference_words)
    with scores.attempt("METEOR") as values:
        values["METEOR"] = meteor(words, reference_words)
    with scores.attempt("ROUGE_L") as values:
        values["ROUGE_L"] = rouge_l(*_ptb(system, few))
    return _ordered(scores, WEBNLG_METRICS)


def answer_scores(system: Sequence[str], references: References) -> Scores:
    """ROUGE-L, ROUGE-1, ROUGE-2 and exact match (`rouge.py`), which need no package and no Java."""
    _check(system, references)
    found = [(words(text), text) for text in system]
    wanted = [[(words(text), text) for text in item] for item in references]

    def mean(score: Callable[[tuple[list[str], str], tuple[list[str], str]], float]) -> float:
        best = (max(score(one, other) for other in item) for one, item in zip(found, wanted))
        return sum(best) / len(found)

    return Scores(
        {
            "rouge_l": mean(lambda one, other: rouge.rouge_l(one[0], other[0])),
            "rouge_1": mean(lambda one, other: rouge.rouge_n(one[0], other[0], 1)),
            "rouge_2": mean(lambda one, other: rouge.rouge_n(one[0], other[0], 2)),
            "exact_match": mean(lambda one, other: float(rouge.is_same(one[1], other[1]))),
        }
    )


def bleu(system: Sequence[str], references: References) -> float:
    """Corpus BLEU-4 by sacrebleu: 13a words, case as given, not smoothed (as both official scripts)."""
    try:
        from sacrebleu.metrics import BLEU
    except ImportError:
        raise Absent(str(missing_extra("sacrebleu", "nlg", "BLEU"))) from None
    # sacrebleu takes the first references of all items, then the second, …; None where an item has no more.
    streams = [list(stream) for stream in zip_longest(*references)]
    scorer = BLEU(tokenize="13a", smooth_method="none", force=True)
    return scorer.corpus_score(list(system), streams).score / 100


def rouge_l(words: Sequence[str], references: References) -> float:
    """The mean over the items of pycocoevalcap's ROUGE-L (beta 1.2; best precision and best recall)."""
    from pycocoevalcap.rouge.rouge import Rouge

    return float(Rouge().compute_score(*_coco(words, references))[0])


def cider(words: Sequence[str], references: References) -> float:
    """pycocoevalcap's CIDEr-D (n = 4, sigma 6), with document frequencies from these references."""
    from pycocoevalcap.cider.cider import Cider

    if not any(reference.split() for item in references for reference in item):
        raise Absent("no reference has a word")
    return float(Cider().compute_score(*_coco(words, references))[0])


def ter(words: Sequence[str], references: References) -> float:
    """The mean over the items of the lowest translation edit rate (pyter) to a reference."""
    try:
        from pyter import ter as edit_rate
    except ImportError:
        raise Absent(str(missing_extra("pyter3", "nlg", "TER"))) from None

    def best(output: list[str], item: list[list[str]]) -> float:
        lowest = math.inf
        for reference in sorted(item, key=lambda reference: _least_rate(output, reference)):
            if _least_rate(output, reference) >= lowest:
                break
            lowest = min(lowest, edit_rate(output, reference) if reference else 1.0)
        return lowest

    pairs = zip(words, references, strict=True)
    return sum(best(text.split(), [other.split() for other in item]) for text, item in pairs) / len(words)


def _least_rate(output: list[str], reference: list[str]) -> float:
    """A bound below the edit rate, which is slow: shifts do not change how many words the two have in common.

    A reference without words has no rate; the official script counts it as 1.
    """
    if not reference:
        return 1.0
    common = (Counter(output) & Counter(reference)).total()
    return (max(len(output), len(reference)) - common) / len(reference)


def lora_tokenize(text: str) -> str:
    """Lower case, with spaces around every character that is not a letter, digit or underscore."""
    return " ".join(re.sub(r"(\W)", r" \1 ", text.lower()).split())


def _nltk_words(text: str) -> str:
    """LoRA's words after nltk.word_tokenize, the official script's second pass: what that still changes.

    Quotation marks matter although they match as before: pyter breaks ties between shifts by the words' order.
    """
    halves = re.compile(r"\b(?:(can)(not)|(gim|lem)(me)|(gon|wan)(na)|(got)(ta))\b")
    split = halves.sub(lambda match: " ".join(half for half in match.groups() if half), text)
    return split.replace('"', "``")


def _check(system: Sequence[str], references: References) -> None:
    if len(system) != len(references):
        raise UserError(
            f"{len(system)} outputs but {len(references)} items of references: they must be as many"
        )
    if not system:
        raise UserError("there are no outputs to score")
    for number, item in enumerate(references, start=1):
        if not any(reference.strip() for reference in item):
            raise UserError(f"item {number} has no reference")


def _map(
    function: Callable[[str], str], system: Sequence[str], references: References
) -> tuple[list[str], list[list[str]]]:
    return [function(text) for text in system], [[function(text) for text in item] for item in references]


def _words_13a(
    system: Sequence[str], references: References
) -> tuple[list[list[str]], list[list[list[str]]]]:
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    tokenize = Tokenizer13a()
    outputs, items = _map(tokenize, system, references)
    return [text.split() for text in outputs], [[text.split() for text in item] for item in items]


def _ptb(system: Sequence[str], references: References) -> tuple[list[str], list[list[str]]]:
    """Outputs and references through the PTB tokenizer, in one Java process."""
    words = iter(ptb_tokenize([*system, *(reference for item in references for reference in item)]))
    return [next(words) for _ in system], [[next(words) for _ in item] for item in references]


def _coco(words: Sequence[str], references: References) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    """References and outputs in the form of pycocoevalcap's scorers."""
    return {n: list(item) for n, item in enumerate(references)}, {n: [text] for n, text in enumerate(words)}


def _ordered(scores: Scores, names: Sequence[str]) -> Scores:
    return Scores(
        {name: scores.values[name] for name in names if name in scores.values},
        {name: scores.absent[name] for name in names if name in scores.absent},
    )
