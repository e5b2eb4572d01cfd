"""What masked sums are made of: numbers in a ring, shares of a secret, and the certificates that sign keys."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import given, settings
from hypothesis import strategies as st
from masked_federation import write_kit

from pf2lora.errors import UserError
from pf2lora.federation.protocol import ring, shamir
from pf2lora.federation.protocol.identity import KitIdentity
from pf2lora.federation.protocol.secure_sum import Keys, Refused, SiteSum, check_keys

# --- the ring ----------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20))
@settings(max_examples=50, deadline=None)
def test_numbers_come_back_within_half_a_step(values: list[float]) -> None:
    exact = torch.tensor(values, dtype=torch.float64)
    assert float((ring.from_ring(ring.to_ring(exact, 4)) - exact).abs().max()) <= ring.STEP / 2


@pytest.mark.parametrize("value", [2.0**30, -(2.0**30), float("nan"), float("inf"), -float("inf"), 1e30])
def test_what_the_ring_has_no_room_for_is_refused(value: float) -> None:
    with pytest.raises(ring.TooLarge, match="no room"):
        ring.to_ring(torch.tensor([0.0, value]), 2)
    ring.to_ring(torch.tensor([2.0**30 - 1], dtype=torch.float64), 2)


def test_the_largest_numbers_of_all_sites_do_not_overflow() -> None:
    most = torch.full([3], 2.0**31 / 8 - 1, dtype=torch.float64)
    total = torch.stack([ring.to_ring(most, 8)] * 8).sum(0)
    assert torch.equal(ring.from_ring(total), 8 * most)


def test_masks_are_of_their_key_and_even() -> None:
    first, again, other = (ring.mask(key * 32, 4096) for key in (b"a", b"a", b"b"))
    assert torch.equal(first, again) and not bool((first == other).any())
    assert abs(float(first.double().mean())) < 5 * 2.0**63 / 3**0.5 / 64


# --- shares ------------------------------------------------------------------------------------------------


def test_any_threshold_of_shares_give_the_secret_and_fewer_do_not() -> None:
    secret = bytes(range(32))
    shares = shamir.split(secret, 6, 4)
    for chosen in itertools.combinations(shares, 4):
        assert shamir.join({at: shares[at] for at in chosen}, 4) == secret
    for few in itertools.combinations(shares, 3):
        with pytest.raises(shamir.NoSecret):  # a number above all secrets, but for chance of 2⁻²⁶⁵
            shamir.join({at: shares[at] for at in few}, 3)
        with pytest.raises(shamir.NoSecret, match="3 shares, of which 4 are needed"):
            shamir.join({at: shares[at] for at in few}, 4)


# --- certificates ------------------------------------------------------------------------------------------


def signed(site: str, who: KitIdentity, context: bytes = b"run 1") -> Keys:
    return SiteSum(site, context, who, ["a", "b", "c", "server"], 2).keys()


def test_keys_are_bound_to_certificates(tmp_path: Path) -> None:
    ours, theirs = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    a = write_kit(tmp_path / "a", "a", ours, key=rsa.generate_private_key(65537, 2048))
    b, c = (write_kit(tmp_path / name, name, ours) for name in "bc")
    stranger = write_kit(tmp_path / "stranger", "b", theirs)
    expired = write_kit(tmp_path / "old", "b", ours, days=-1)
    own = SiteSum("a", b"run 1", a, "abc", 2)
    roster = {"a": own.keys(), "b": signed("b", b), "c": signed("c", c)}
    for keys, line in (
        (signed("b", stranger), "not signed by a certificate of the federation"),
        (signed("b", c), "signed by another participant"),
        (signed("b", expired), "no longer, valid"),
        (signed("b", b, b"run 2"), "not signed"),
        (dataclasses.replace(roster["b"], masking=roster["c"].masking), "not signed"),
        (dataclasses.replace(roster["b"], certificate="w1"), "not signed"),
        (dataclasses.replace(roster["b"], signature="w1"), "not signed"),
    ):
        again = dataclasses.replace(own, done=1)
        with pytest.raises(Refused, match=line):
            again.shares(roster | {"b": keys})
    assert set(own.shares(roster)) == {"b", "c"}


@pytest.mark.parametrize(
    ("name", "role", "site"),
    [
        ("server", None, False),  # as `provision` names the server
        ("b", "server", False),  # as an authority signs a server whose host is called so
        ("b", "lead", False),
        ("b", "member", False),
        ("b", "client", True),
        ("b", None, True),
    ],
)
def test_only_a_sites_certificate_signs_keys(tmp_path: Path, name: str, role: str | None, site: bool) -> None:
    authority = ec.generate_private_key(ec.SECP256R1())
    who = write_kit(tmp_path / "who", name, authority, role=role)
    keys = signed(name, who)
    if site:
        check_keys(who, b"run 1", name, keys)
    else:
        with pytest.raises(Refused, match="signed by a participant that is no site"):
            check_keys(who, b"run 1", name, keys)


def test_a_kit_without_a_certificate_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="certificate cannot be read"):
        KitIdentity.of(tmp_path)
