"""Whatever one site says, it costs the others nothing: broken messages by the hundred, in the server's session."""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from random import Random

import pytest
from fuzz_mutations import bytes_changed, tensors_changed
from small_federation import SITES, Small

from pf2lora.errors import UserError
from pf2lora.federation.protocol import messages
from pf2lora.federation.protocol.agreement import agreeing_first

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")
pytestmark = pytest.mark.usefixtures("one_thread")


def broken(data: bytes, random: Random) -> bytes:
    """A message with something wrong in it, unless chance has it that nothing is."""
    return random.choice([bytes_changed, tensors_changed, tensors_changed])(data, random)


def test_no_bytes_of_one_site_cost_the_others_a_round(small: Small) -> None:
    """Broken hellos, updates and scores by the hundred: their site is left out alone, or what it sent was harmless."""
    random, honest = Random(0), small.coordinator
    hello = small.ask({"site-2": honest.hello()})["site-2"]
    for _ in range(150):
        with suppress(messages.Malformed, UserError):  # what the controller leaves a site out for
            agreeing_first({"site-1": hello, "site-2": broken(hello, random)}, honest.allow_list(None))
            honest.register("site-2", broken(hello, random))
    honest.register("site-2", hello)
    answers = small.ask(honest.requests(list(SITES), {1}))
    refused = 0
    for _ in range(150):
        bad = answers | {"site-2": broken(answers["site-2"], random)}
        attempt = deepcopy(honest)
        attempt.save = lambda: None  # type: ignore[method-assign]
        record = attempt.finish_round(bad, 0.0, [])
        assert {"site-1", "site-3", "site-4"} <= set(record["answered"]), record["refused"]
        for why in record["refused"].values():
            assert why.isprintable() and "\n" not in why and len(why) < 500
        refused += "site-2" in record["refused"]
    assert refused > 75
