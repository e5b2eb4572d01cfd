"""Sums whose parts nobody sees, without a network: exact, through dropouts, and refused where something is wrong."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable

import pytest
import torch
from torch import Tensor

from pf2lora.federation.protocol import ring, shamir
from pf2lora.federation.protocol.secure_sum import Refused, SiteSum, mask_key
from pf2lora.federation.protocol.server_sum import BadDealer, ServerSum
from pf2lora.federation.protocol.shamir import majority

SITES = ["a", "b", "c", "d", "e"]
COUNT = 50


class Anybody:
    """An identity for tests of the sums themselves."""

    certificate = ""

    def sign(self, data: bytes) -> str:
        return ""

    def check(self, site: str, certificate: str, data: bytes, signature: str) -> None:
        pass


def site_sum(site: str, fewest: int = 2, among: Iterable[str] = SITES) -> SiteSum:
    return SiteSum(site, b"run 1", Anybody(), list(among), fewest)


def begin(
    sites: Iterable[str] = SITES, sharing: Collection[str] | None = None
) -> tuple[dict[str, SiteSum], ServerSum]:
    """Everybody after step 2; `sharing` are those who answered it."""
    there = {site: site_sum(site, among=sites) for site in sites}
    server = ServerSum(b"run 1", COUNT, list(sites))
    for site, own in there.items():
        server.roster[site] = own.keys()
    for site, own in there.items():
        if sharing is None or site in sharing:
            server.take_shares(site, own.shares(server.roster))
    return there, server


def answer(there: dict[str, SiteSum], server: ServerSum, who: Iterable[str]) -> dict[str, Tensor]:
    """These sites mask and send; what they had."""
    values = {site: torch.randn(COUNT) for site in who}
    for site, own in values.items():
        server.add(site, there[site].mask(ring.to_ring(own, len(there)), server.shares_for(site)))
    return values


def unmask(there: dict[str, SiteSum], server: ServerSum, who: Iterable[str] | None = None) -> Tensor:
    for site in server.answered if who is None else who:
        server.take_unmasking(site, there[site].unmask(server.answered))
    return ring.from_ring(server.unmask())


def near(found: Tensor, values: dict[str, Tensor]) -> bool:
    exact = torch.stack([v.double() for v in values.values()]).sum(0)
    return float((found - exact).abs().max()) <= len(values) * ring.STEP / 2


# --- the sum -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_the_sum_is_exact_to_the_fixed_points_step(count: int) -> None:
    there, server = begin([f"site-{i}" for i in range(count)])
    values = answer(there, server, there)
    assert near(unmask(there, server), values)


@pytest.mark.parametrize(
    ("sharing", "answering", "telling"),
    [
        *itertools.product(["abcde", "abcd"], ["abcd", "bcd", "acd"], [None]),
        ("abcde", "abcde", "ace"),
        ("abcde", "abcd", "abd"),
        ("abc", "abc", None),
    ],
)
def test_the_sum_is_of_those_who_answered_wherever_others_stopped(
    sharing: str, answering: str, telling: str | None
) -> None:
    there, server = begin(SITES, sharing)
    values = answer(there, server, answering)
    assert near(unmask(there, server, telling), values)


def test_what_one_site_sends_looks_like_noise() -> None:
    """The same numbers twice: what is sent differs in every one, and its bits are even."""
    sent = []
    for _ in range(2):
        there, server = begin()
        sent.append(there["a"].mask(torch.zeros(COUNT, dtype=torch.int64), server.shares_for("a")))
    assert not bool((sent[0] == sent[1]).any())
    bits = sum(bin(int(v) & (2**64 - 1)).count("1") for v in sent[0])
    assert abs(bits / (64 * COUNT) - 0.5) < 0.05


def test_a_late_update_stays_masked_and_both_secrets_are_never_told() -> None:
    there, server = begin()
    answer(there, server, "abcd")
    late = there["e"].mask(torch.zeros(COUNT, dtype=torch.int64), server.shares_for("e"))
    told = {site: there[site].unmask(server.answered) for site in "abcd"}
    assert all(found["e"][0] == "key" and found["a"][0] == "seed" for found in told.values())
    for site, found in told.items():
        server.take_unmasking(site, found)
    server.unmask()
    with pytest.raises(Refused, match="step 4 of a masked round was asked for after step 4"):
        there["a"].unmask(SITES)
    left = late  # all that the server can take away: it has e's mask key now
    for site in "abcd":
        key = mask_key(there["e"].masking, server.roster[site].masking, b"", there["e"].digest)
        left = left + ring.mask(key, COUNT)
    assert torch.equal(left, ring.mask(there["e"].seed, COUNT))


# --- what is refused ---------------------------------------------------------------------------------------


def test_steps_are_done_once_and_in_order() -> None:
    own = site_sum("a")
    with pytest.raises(Refused, match="step 2"):
        own.shares({})
    own.keys()
    with pytest.raises(Refused, match="step 1"):
        own.keys()
    with pytest.raises(Refused, match="step 3"):
        own.mask(torch.zeros(1, dtype=torch.int64), {})


def test_a_site_takes_no_part_in_sums_of_few() -> None:
    roster = {site: site_sum(site).keys() for site in "ab"}
    own = site_sum("c", fewest=4, among="abc")
    roster["c"] = own.keys()
    with pytest.raises(
        Refused, match="a sum of 3 sites was asked for; this site takes part in sums of 4 or more"
    ):
        own.shares(roster)
    there, server = begin()
    answer(there, server, "ab")
    with pytest.raises(Refused, match="a sum of 2 sites was asked for; this site takes part in sums of 3"):
        there["a"].unmask(["a", "b"])
    there, server = begin(SITES, "ab")
    with pytest.raises(Refused, match="a sum of 2"):
        there["a"].mask(torch.zeros(COUNT, dtype=torch.int64), server.shares_for("a"))


@pytest.mark.parametrize("answered", [["b", "c", "d"], ["a", "b", "c", "stranger"]])
def test_a_server_cannot_name_whom_it_likes(answered: list[str]) -> None:
    there, server = begin()
    answer(there, server, "abcd")
    with pytest.raises(Refused, match="who did not mask"):
        there["a"].unmask(answered)


def test_keys_that_the_server_changed_are_refused() -> None:
    there = {site: site_sum(site, among="abc") for site in "abc"}
    roster = {site: own.keys() for site, own in there.items()}
    other = roster | {"a": site_sum("a").keys()}
    with pytest.raises(Refused, match="not those that this site sent"):
        there["a"].shares(other)
    with pytest.raises(Refused, match="not those that this site sent"):
        there["c"].shares({site: keys for site, keys in roster.items() if site != "c"})


def test_sites_that_were_shown_different_keys_cannot_open_each_others_shares() -> None:
    there = {site: site_sum(site, among="abcd") for site in "abcd"}
    roster = {site: own.keys() for site, own in there.items()}
    fake = roster | {"d": site_sum("d").keys()}  # of another round, say
    server = ServerSum(b"run 1", COUNT, list("abcd"), roster)
    for site, shown in (("a", roster), ("b", fake), ("c", roster)):
        server.take_shares(site, there[site].shares(shown))
    with pytest.raises(Refused, match="too many shares are not of this round"):  # a majority are 3
        there["a"].mask(torch.zeros(COUNT, dtype=torch.int64), server.shares_for("a"))


@pytest.mark.parametrize(
    "change", [lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: b"", lambda data: data[:-1]]
)
def test_shares_that_were_changed_are_not_opened_and_cost_nobody_the_round(
    change: Callable[[bytes], bytes],
) -> None:
    there, server = begin()
    changed = server.shares_for("a") | {"c": change(server.shares_for("a")["c"])}
    values = {site: torch.randn(COUNT) for site in SITES}
    for site, own in values.items():
        sealed = changed if site == "a" else server.shares_for(site)
        server.add(site, there[site].mask(ring.to_ring(own, len(there)), sealed))
        server.unopened[site] = there[site].unopened
    assert server.unopened == {site: ["c"] if site == "a" else [] for site in SITES}
    assert "c" not in there["a"].unmask(server.answered)
    there["a"].done = 3
    assert server.at_fault() == ({}, {})
    assert near(unmask(there, server), values)


def test_shares_of_another_round_are_refused() -> None:
    there, server = begin()
    before = server.shares_for("a")
    there, server = begin()
    with pytest.raises(Refused, match="not of this round"):
        there["a"].mask(torch.zeros(COUNT, dtype=torch.int64), before)


def test_shares_from_strangers_are_refused() -> None:
    there, server = begin()
    with pytest.raises(Refused, match="who is not in the round"):
        there["a"].mask(torch.zeros(COUNT, dtype=torch.int64), server.shares_for("a") | {"x": b""})


def test_a_site_that_shares_for_some_only_is_refused_by_the_server() -> None:
    there, server = begin("abc", "")
    found = there["a"].shares(server.roster)
    with pytest.raises(Refused, match="not for all others"):
        server.take_shares("a", {"b": found["b"]})


def test_a_wrong_share_is_found_and_its_giver_is_named() -> None:
    there, server = begin()
    values = answer(there, server, SITES)
    for site in SITES:
        told = there[site].unmask(server.answered)
        if site == "b":
            kind, share = told["a"]
            wrong = told | {"a": (kind, bytes([share[0], share[1] ^ 1]) + share[2:])}
            with pytest.raises(Refused, match="its share of a's secret is wrong"):
                server.take_unmasking(site, wrong)
            continue
        server.take_unmasking(site, told)
    assert near(ring.from_ring(server.unmask()), values)


@pytest.mark.parametrize("answering", ["abcde", "acde"])
def test_who_deals_shares_of_no_secret_is_named(answering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every share has its hash and can be opened: only when they are put together does it show."""
    there, server = begin(SITES, "")
    split = shamir.split
    for site, own in there.items():
        with monkeypatch.context() as patch:
            if site == "b":
                patch.setattr(
                    shamir, "split", lambda secret, count, least: split(bytes(32), count, least - 1)
                )
            server.take_shares(site, own.shares(server.roster))
    answer(there, server, answering)
    assert not any(own.unopened for own in there.values())
    for site in answering:
        server.take_unmasking(site, there[site].unmask(server.answered))
    with pytest.raises(BadDealer, match="the shares that b dealt do not give its secret") as error:
        server.unmask()
    assert error.value.site == "b"


def told_unopened(unopened: dict[str, str], answered: str = "abcde") -> tuple[set[str], set[str]]:
    """Who is left out as a dealer, and as who says so, where these sites cannot open the shares of those."""
    server = ServerSum(b"run 1", COUNT, SITES, sealed={site: {} for site in SITES}, answered=list(answered))
    server.unopened |= unopened
    dealers, doubters = server.at_fault()
    return set(dealers), set(doubters)


def test_one_word_against_many_leaves_nobody_out() -> None:
    assert told_unopened({}) == (set(), set())
    assert told_unopened({"a": "bcde"}) == (set(), set())  # of each other, four can still give shares
    assert told_unopened({"a": "b", "c": "b"}) == (set(), set())  # b, d and e can
    assert told_unopened({"a": "b", "c": "b", "d": "b"}) == ({"b"}, set())
    assert told_unopened({"a": "b", "c": "b", "d": "b", "b": "acd"}) == ({"b"}, set())
    assert told_unopened({"a": "e", "b": "e"}, "abcd") == (set(), {"a", "b"})  # two say so and two do not
    assert told_unopened({"a": "b"}, "abc") == (set(), {"a"})  # nobody can know which of the two it is
    assert told_unopened({"a": "b"}, "ab") == (set(), set())  # too few in any case


def test_shares_of_the_other_kind_are_not_taken() -> None:
    there, server = begin()
    answer(there, server, SITES)
    told = there["a"].unmask(server.answered)
    with pytest.raises(Refused, match="did not give the shares that were asked for"):
        server.take_unmasking("a", told | {"b": ("key", told["b"][1])})
    with pytest.raises(Refused, match="did not give"):
        server.take_unmasking("a", {"b": told["b"]})


def test_too_few_shares_leave_the_masks_on() -> None:
    there, server = begin()
    answer(there, server, SITES)
    for site in "ab":
        server.take_unmasking(site, there[site].unmask(server.answered))
    with pytest.raises(Refused, match="the masks of a cannot be taken away: 2 shares, of which 3 are needed"):
        server.unmask()


def test_the_majority_lets_no_server_have_both_secrets() -> None:
    assert all(2 * majority(n) > n for n in range(1, 100))


def test_a_server_cannot_have_two_sums_of_a_round_by_showing_two_rosters() -> None:
    """It needs the shares of a majority of the round for each, and who gave them gives no others."""
    there = {site: site_sum(site) for site in SITES}
    keys = {site: own.keys() for site, own in there.items()}
    for both in ("ab", "cd"):
        for site in both:
            with pytest.raises(
                Refused, match="a sum of 2 sites was asked for; this site takes part in sums of 3"
            ):
                there[site].shares({other: keys[other] for other in both})
            there[site].done = 1
    roster = {site: keys[site] for site in "abc"}
    for site in "abc":
        there[site].shares(roster)
    found = shamir.split(bytes(32), 3, majority(len(SITES)))  # as they split theirs
    with pytest.raises(shamir.NoSecret):
        shamir.join({at: found[at] for at in (1, 2)}, majority(len(SITES)))


def test_a_server_cannot_make_up_a_round_of_itself_and_one_site() -> None:
    """With two certificates of its own beside the site's, it had the site's numbers: their masks it knows."""
    own = site_sum("a", fewest=3)
    strangers = {name: SiteSum(name, b"run 1", Anybody(), SITES, 3).keys() for name in ("server", "removed")}
    with pytest.raises(Refused, match="shows keys of removed, which is not in this round by the plan"):
        own.shares({"a": own.keys()} | strangers)


@pytest.mark.parametrize("key", ["00" * 32, "01" + "00" * 31])
def test_keys_with_which_everybody_has_the_same_secret_are_refused(key: str) -> None:
    there, server = begin(SITES, "")
    for field in ("masking", "sharing"):
        roster = server.roster | {"b": dataclasses.replace(server.roster["b"], **{field: key})}
        there["a"].done = 1
        with pytest.raises(Refused, match="the keys of b are none with which a secret could be shared"):
            there["a"].shares(roster)
