"""What masks cost: a round's keys, shares, masks and their removal, for several numbers of sites and sizes of x.

    python benchmarks/masked_cost.py --sites 4 16 64 --numbers 198146 1000000

Everything in one process and without a network: processor time of one site, of the server, and bytes that a site sends
beside its update. `--dropped` sites send shares and then no update, whose masks the server must work out.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from pf2lora.federation.protocol import ring
from pf2lora.federation.protocol.secure_sum import SiteSum
from pf2lora.federation.protocol.server_sum import ServerSum


class Anybody:
    """Signatures are left out: a kit's key signs and checks in about a millisecond."""

    certificate = ""

    def sign(self, data: bytes) -> str:
        return ""

    def check(self, site: str, certificate: str, data: bytes, signature: str) -> None:
        pass


def measure(count: int, numbers: int, dropped: int) -> dict[str, float]:
    """One round of `count` sites, the last `dropped` of which do not answer."""
    names = [f"site-{i:03d}" for i in range(count)]
    sites = {name: SiteSum(name, b"benchmark", Anybody(), names, 2) for name in names}
    server, values = ServerSum(b"benchmark", numbers, names), torch.randn(numbers)
    spent = dict.fromkeys(("site", "server"), 0.0)
    began = time.process_time()

    def timed(who: str) -> None:
        nonlocal began
        spent[who] += time.process_time() - began
        began = time.process_time()

    for name, own in sites.items():
        server.roster[name] = own.keys()
    sealed = {name: own.shares(server.roster) for name, own in sites.items()}
    timed("site")
    for name, found in sealed.items():
        server.take_shares(name, found)
    timed("server")
    answering = names[: count - dropped]
    for name in answering:
        masked = sites[name].mask(ring.to_ring(values, count), server.shares_for(name))
        timed("site")
        server.add(name, masked)
        timed("server")
    told = {name: sites[name].unmask(answering) for name in answering}
    timed("site")
    for name, found_shares in told.items():
        server.take_unmasking(name, found_shares)
    total = server.unmask()
    timed("server")
    error = float((ring.from_ring(total) / len(answering) - values.double()).abs().max())
    beside = sum(len(data) for data in sealed[names[0]].values()) + sum(
        len(s) for _, s in told[names[0]].values()
    )
    return {
        "sites": count,
        "dropped": dropped,
        "numbers": numbers,
        "seconds of a site": round(spent["site"] / count, 4),
        "seconds of the server": round(spent["server"], 4),
        "bytes of an update": 8 * numbers,
        "bytes of shares": beside,
        "largest error": error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sites", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--numbers", type=int, nargs="+", default=[198_146])
    parser.add_argument("--dropped", type=int, nargs="+", default=[0, 1])
    given = parser.parse_args()
    for numbers in given.numbers:
        for count in given.sites:
            for dropped in given.dropped:
                print(json.dumps(measure(count, numbers, dropped)), flush=True)


if __name__ == "__main__":
    main()
