"""A result by a score that it has: scores of generated text may be missing, and perplexity is not."""

from __future__ import annotations

from dataclasses import replace

from pf2lora.run.result import Result

LOSS = "loss"


def by_measured_metric(result: Result) -> Result:
    """The same with the first metric as its headline that all methods have a final score of, the loss last (people
    know perplexity better); the same result where that is its headline anyway, or where there is none."""
    for metric in (result.metric, *sorted(result.metrics, key=lambda name: name == LOSS)):
        if all(
            run.served.get(metric) is not None and run.served[metric].mean is not None
            for method in result.methods.values()
            for run in method.runs
        ):
            return result if metric == result.metric else replace(without_resampled(result), metric=metric)
    return result


def without_resampled(result: Result) -> Result:
    """Resampled scores are of the headline that the run had."""
    methods = {
        name: replace(method, runs=[replace(run, resampled={}) for run in method.runs])
        for name, method in result.methods.items()
    }
    return replace(result, methods=methods)
