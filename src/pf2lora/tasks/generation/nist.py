"""NIST, the n-gram score that weighs rare n-grams more, from its definition (Doddington 2002; mteval-v13a).

    NIST = BF · Σ_{n=1..5}  Σ info(g) over the matched n-grams g  /  number of n-grams in the system's output

    info(g) = log2( count of g without its last word / count of g ),  counted over all references;
              for single words the numerator is the number of words in all references
    BF      = exp( −β · ln² min(1, L_sys / L_ref) ),  β such that BF = 0.5 at L_sys / L_ref = 2/3
              L_ref is the mean length of an item's references, summed over the items

A system n-gram matches at most as often as in the reference of its item that has it most often. An output with
fewer than n words has no n-grams; an empty output has no words at all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

BETA = math.log(2) / math.log(1.5) ** 2

Tokens = Sequence[str]


def nist(system: Sequence[Tokens], references: Sequence[Sequence[Tokens]], max_order: int = 5) -> float:
    """The NIST score of tokenised outputs, each against the tokenised references of its item."""
    counts = _reference_counts(references, max_order)
    total = 0.0
    for order in range(1, max_order + 1):
        information, ngrams = 0.0, 0
        for output, item in zip(system, references, strict=True):
            output_counts = Counter(_ngrams(output, order))
            ngrams += output_counts.total()
            information += sum(
                times * math.log2(counts[ngram[:-1]] / counts[ngram])
                for ngram, times in _matches(output_counts, item, order).items()
            )
        if ngrams:
            total += information / ngrams
    return total * _brevity_factor(system, references)


def _ngrams(tokens: Tokens, order: int) -> Iterator[tuple[str, ...]]:
    return zip(*(tokens[start:] for start in range(order)))


def _reference_counts(references: Sequence[Sequence[Tokens]], max_order: int) -> Counter[tuple[str, ...]]:
    """How often each n-gram occurs in all references; the empty n-gram occurs once per word."""
    counts: Counter[tuple[str, ...]] = Counter()
    for item in references:
        for reference in item:
            counts[()] += len(reference)
            for order in range(1, max_order + 1):
                counts.update(_ngrams(reference, order))
    return counts


def _matches(
    output: Counter[tuple[str, ...]], item: Sequence[Tokens], order: int
) -> Counter[tuple[str, ...]]:
    most: Counter[tuple[str, ...]] = Counter()
    for reference in item:
        most |= Counter(_ngrams(reference, order))
    return output & most


def _brevity_factor(system: Sequence[Tokens], references: Sequence[Sequence[Tokens]]) -> float:
    output_length = sum(len(output) for output in system)
    reference_length = sum(sum(map(len, item)) / len(item) for item in references)
    if output_length == 0 or reference_length == 0:
        return 0.0
    return math.exp(-BETA * math.log(min(1.0, output_length / reference_length)) ** 2)
