"""How far a score would be off on other test rows of the same kind: the bootstrap, with the same rows for every method.

Because each method is scored on the same resampled rows, the difference of two methods is resampled too, in pairs: what
both find hard does not blur it.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from pf2lora.core.streams import numpy_generator

TIMES = 200  # resamplings: a standard error that is itself known to about 5%


@lru_cache(maxsize=1024)
def resampled_rows(client: str, rows: int) -> np.ndarray:
    """`(TIMES, rows)`: which of a client's rows are in each resampling; nobody else's presence changes it."""
    return numpy_generator(0, "resampling", client, rows).integers(0, rows, (TIMES, rows), dtype=np.int32)
