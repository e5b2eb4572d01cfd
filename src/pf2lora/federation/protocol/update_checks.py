"""Which of a round's updates are taken: each is looked at beside the others'."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def beyond_norm_limit(vectors: Mapping[str, Tensor], times: float) -> dict[str, str]:
    """Sites whose update has a norm beyond `times` the median, with the reason. It is the norm of what was sent, not of
    its change: where the others have converged, the honest change of a site that was away is many times theirs."""
    norms = {site: float(v.double().norm()) for site, v in vectors.items()}
    if len(norms) < 3:  # of two, nobody can say which is the odd one
        return {}
    limit = times * float(torch.tensor(list(norms.values())).median())
    return {
        site: f"its update's norm {norm:.3g} is beyond {limit:.3g}, {times:g} times the median"
        for site, norm in norms.items()
        if norm > limit
    }
