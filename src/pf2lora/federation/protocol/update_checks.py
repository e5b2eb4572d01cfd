"""Which of a round's updates are taken, and with what weight: each is looked at beside the others'.

An update is what a site sends; its change is what that differs by from what the site was served. Sites differ honestly:
what is refused must be far out, or go against others who agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pf2lora.errors import UserError
from pf2lora.federation.protocol.rows import Rows
from pf2lora.federation.protocol.wire import fitted

if TYPE_CHECKING:
    from pf2lora.federation.protocol.serving import Serving

FEWEST = 3  # updates: of two, nobody can say which is the odd one
AGREE, AGAINST = 0.5, -0.5  # cosines: from here on others agree; up to here one goes against them
HEAVIEST = 10  # medians of the sites' rows, beyond which no site weighs more


@dataclass(frozen=True)
class Figures:
    """What is known of K sites' updates: norms of what they sent and began with `(K,)`, and of their changes the norms
    `(K,)` and the cosines `(K, K)` of the angles between them."""

    sent: Tensor
    begun: Tensor
    changes: Tensor
    cosines: Tensor


def odd_updates(rows: Rows, begun: Mapping[str, Tensor], times: float) -> dict[str, str]:
    """Sites whose update is not taken, with the reason. `begun` is what each of them was served `(n,)`, nan where the
    server does not know it."""
    if len(begun) < FEWEST:
        return {}
    figures = figures_of(rows, begun)
    found = {site: odd_one(figures, k, times) for k, site in enumerate(begun)}
    return {site: why for site, why in found.items() if why}


def figures_of(sent_rows: Rows, begun: Mapping[str, Tensor]) -> Figures:
    """The figures, in float64. Where a beginning is not known, the median of what was sent stands for it."""
    count = len(begun)
    sent, start = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    products = torch.zeros(count, count, dtype=torch.float64)
    for columns, block in sent_rows.blocks(begun):
        rows = block.double()
        had = torch.stack([served[columns] for served in begun.values()]).double()
        if bool(had.isnan().any()):
            had = torch.where(had.isnan(), rows.median(0).values, had)
        sent += rows.square().sum(1)
        start += had.square().sum(1)
        rows -= had
        products += rows @ rows.T
    changes = products.diagonal().clamp_min(0).sqrt()
    cosines = products / (changes[:, None] * changes[None]).clamp_min(torch.finfo(torch.float64).tiny)
    return Figures(sent.sqrt(), start.sqrt(), changes, cosines)


def odd_one(figures: Figures, k: int, times: float) -> str:
    """What is wrong with the k-th update. A site that was away, or whose rows are unlike the others', may move many
    times as far as they do: then it must go their way, and no farther than its start is long."""
    own, limit = float(figures.sent[k]), times * float(figures.sent.median())
    if own > limit:
        return f"its update's norm {own:.3g} is beyond {limit:.3g}, {times:g} times the median"
    others = [j for j in range(len(figures.sent)) if j != k]
    # Of an even number the upper one: of three sites, one that hardly moved must not stop the two that did.
    middle = figures.changes[others].sort().values[len(others) // 2]
    own, limit = float(figures.changes[k]), times * float(middle)
    along, agreed = (
        direction(figures.cosines, k, others),
        min(direction(figures.cosines, j, [i for i in others if i != j]) for j in others),
    )
    if own > limit and (along <= 0 or own > float(figures.begun[k])):
        return f"its change {own:.3g} is beyond {limit:.3g}, {times:g} times the others' median, and not their way"
    if len(others) >= FEWEST and along < AGAINST and agreed > AGREE:
        return f"its change goes against the others', who agree (cosine {along:.2f})"
    return ""


def direction(cosines: Tensor, k: int, others: list[int]) -> float:
    """The cosine between the k-th change and the mean direction of `others`, each of whom counts alike, however far it
    went; 0 where they have none."""
    length = float(cosines[others][:, others].sum().clamp_min(0).sqrt())
    return float(cosines[k, others].sum()) / length if length else 0.0


def starts(session: Serving, sites: Iterable[str]) -> dict[str, Tensor]:
    """What each of the sites began the server's next round with, as it lays out what it sends; nan where the server
    does not know it. Sites that were served the same share it; where all that they send was served, it is x itself."""
    method, found = session.known_method, dict[str, Tensor]()
    leaves = method.leaves(session.done + 1)
    shared = session.common if leaves.entries == method.arrives(session.done).entries else None
    for site in sites:
        if shared is not None and not session.apart(site):
            found[site] = shared
            continue
        served = session.common_for(site)
        found[site] = torch.full((leaves.size,), torch.nan)
        for entry in leaves.entries:
            if entry.name in served:
                at, like = leaves.offsets[entry.name], torch.empty(entry.shape)
                found[site][at : at + entry.size] = fitted(served[entry.name], like).flatten()
        shared = shared if session.apart(site) else found[site]
    return found


# --- weights -----------------------------------------------------------------------------------------------


def bounded(rows: Mapping[str, int]) -> dict[str, int]:
    """What sites say of the number of their rows, for their weights: none is beyond `HEAVIEST` times the median."""
    said = sorted(rows.values())
    limit = HEAVIEST * said[(len(said) - 1) // 2]
    return {site: min(count, limit) for site, count in rows.items()}


def check_rows(site: str, said: Mapping[str, object], before: Mapping[str, object]) -> None:
    """A UserError where a site's number of rows changed in a run that weighs by it."""
    now, then = said.get("train_rows"), before.get("train_rows")
    if now != then:
        raise UserError(
            f"{site} has {now} training rows and had {then} when the run began, and weighs by them: start another run"
        )
