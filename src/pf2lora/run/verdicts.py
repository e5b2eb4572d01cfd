"""What a result says of its methods' headline scores: how sure each is, which differ, which are best."""

from __future__ import annotations

from pf2lora.run.differences import Uncertain, of_errors, over_seeds_and_rows
from pf2lora.run.result import Point, Result


def uncertain(result: Result, method: str, point: Point | None = None) -> Uncertain | None:
    """A method's score with its standard error, over test rows and seeds."""
    point = point or result.point
    values = means(result, method, point)
    return None if values is None else over_seeds_and_rows(values, resampled(result, method, point))


def difference(result: Result, method: str, other: str, point: Point | None = None) -> Uncertain | None:
    """How far a method's score is above another's, in pairs of seeds and of test rows."""
    point = point or result.point
    ours, theirs = means(result, method, point), means(result, other, point)
    if ours is None or theirs is None or len(ours) != len(theirs):
        return None
    first, second = resampled(result, method, point), resampled(result, other, point)
    of_rows = None
    if first and second:
        of_rows = [[a - b for a, b in zip(*seed)] for seed in zip(first, second)]
    return over_seeds_and_rows([a - b for a, b in zip(ours, theirs)], of_rows)


def client_differences(
    result: Result, method: str, other: str, point: Point | None = None
) -> list[Uncertain | None]:
    """The same, client by client."""
    point = point or result.point
    found: list[Uncertain | None] = []
    for k in range(len(result.clients)):
        first, second = (client_scores(result, name, point, k) for name in (method, other))
        if first is None or second is None or len(first[0]) != len(second[0]):
            found.append(None)
        else:
            found.append(of_errors(*first, *second))
    return found


def best(result: Result) -> list[str]:
    """The methods with the best score: the first, and those that cannot be told from it."""
    scores = {name: e for name in result.methods if (e := result.estimate(name, result.point, result.metric))}
    if not scores:
        return []
    sign = 1 if result.metrics[result.metric].higher_is_better else -1
    order = sorted(scores, key=lambda name: -sign * scores[name].mean)
    tied = [name for name in order[1:] if (d := difference(result, order[0], name)) and d.is_nought]
    return [order[0], *tied]


def means(result: Result, method: str, point: Point) -> list[float] | None:
    """The mean over clients in each seed; None where a seed has none."""
    tables = [(run.at(point) or {}).get(result.metric) for run in result.methods[method].runs]
    known = [table.mean for table in tables if table is not None and table.mean is not None]
    return known if known and len(known) == len(tables) else None


def resampled(result: Result, method: str, point: Point) -> list[list[float]] | None:
    """The same on resampled test rows, where every seed has it."""
    runs = result.methods[method].runs
    found = [run.resampled[point].means for run in runs if point in run.resampled]
    return found if found and len(found) == len(runs) else None


def client_scores(
    result: Result, method: str, point: Point, k: int
) -> tuple[list[float], list[float | None]] | None:
    """A client's scores in each seed, and their errors over test rows."""
    runs = result.methods[method].runs
    tables = [(run.at(point) or {}).get(result.metric) for run in runs]
    known = [table.per_client[k] for table in tables if table is not None]
    scores = [value for value in known if value is not None]
    if not scores or len(scores) < len(tables):
        return None
    return scores, [run.resampled[point].per_client[k] if point in run.resampled else None for run in runs]
