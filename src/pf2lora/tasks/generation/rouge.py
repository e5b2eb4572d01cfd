"""ROUGE and exact match of answers, for data that has no script of its own to be scored by.

ROUGE-1, ROUGE-2 and ROUGE-L are F1 scores of one answer, and give what Google's `rouge-score` does without its stemmer.
Words are lower-cased runs of letters and digits of any script; that package drops all but a to z. Of several references
the best counts, and a client's score is the mean over its answers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

WORD = re.compile(r"[^\W_]+")


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def rouge_n(found: Sequence[str], wanted: Sequence[str], n: int) -> float:
    """The F1 of the n-grams that both have."""
    both = [Counter(zip(*(part[i:] for i in range(n)))) for part in (found, wanted)]
    return f1((both[0] & both[1]).total(), both[0].total(), both[1].total())


def rouge_l(found: Sequence[str], wanted: Sequence[str]) -> float:
    """The F1 of the longest common subsequence."""
    return f1(longest_common(found, wanted), len(found), len(wanted))


def f1(common: int, found: int, wanted: int) -> float:
    return 2 * common / (found + wanted) if common else 0.0


def longest_common(left: Sequence[str], right: Sequence[str]) -> int:
    """The length of the longest common subsequence, a bit for each word of `left` (Hyyrö 2004): a long answer costs as
    many additions as `right` has words."""
    places: dict[str, int] = {}
    for i, word in enumerate(left):
        places[word] = places.get(word, 0) | 1 << i
    every = (1 << len(left)) - 1
    row = every
    for word in right:
        matched = row & places.get(word, 0)
        row = ((row + matched) | (row - matched)) & every
    return len(left) - row.bit_count()


def is_same(found: str, wanted: str) -> bool:
    """The same text, whatever blanks there are."""
    return found.split() == wanted.split()
