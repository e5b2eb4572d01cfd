"""Messages without copies: the bytes are those of safetensors, and a server holds x about three times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")

from pf2lora.federation.flare.processes import ENGINE
from pf2lora.federation.protocol.buffers import pieces
from pf2lora.federation.protocol.messages import FIELDS, Malformed, decode, encode

TENSORS = {
    "b.ä": torch.randn(3, 5),
    "a": torch.arange(7, dtype=torch.int8),
    "scale": torch.randn(()),
    "half": torch.randn(2, 2, 3).bfloat16(),
}
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "server_memory.py"


def test_the_bytes_are_those_of_safetensors() -> None:
    data = b"".join(pieces(TENSORS, {FIELDS: '{"kind":"ä"}'}))
    assert data == save(TENSORS, metadata={FIELDS: '{"kind":"ä"}'})
    for name, tensor in load(data).items():
        assert torch.equal(tensor, TENSORS[name]) and torch.equal(decode(data).tensors[name], tensor)


def with_offsets(*offsets: list[int]) -> bytes:
    """A message of two float32 each, which lie where `offsets` say."""
    about = {f"t{i}": {"dtype": "F32", "shape": [2], "data_offsets": at} for i, at in enumerate(offsets)}
    header = json.dumps({"__metadata__": {FIELDS: "{}"}} | about).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + bytes(8 * len(offsets))


def test_tensors_lie_side_by_side() -> None:
    whole = with_offsets([0, 8], [8, 16])
    assert len(decode(whole).tensors) == 2
    gaps = [with_offsets([0, 8], at) for at in ([0, 8], [16, 24], [4, 12], [8, 12], [8, 2**70], [True, 8])]
    for data in (*gaps, whole + b"more", whole[:-1], encode({}, {"t": torch.ones(2)})[:-4]):
        with pytest.raises(Malformed, match="no message"):
            decode(data)


def peak(sites: int, numbers: int) -> float:
    """Megabytes that a server's session takes at most, in a process of its own."""
    asked = ["--sites", str(sites), "--numbers", str(numbers), "--rounds", "2"]
    command = [sys.executable, str(SCRIPT), *asked]
    told = subprocess.run(command, env=os.environ | ENGINE, check=True, capture_output=True, text=True)
    return float(json.loads(told.stdout)["peak MB"])


@pytest.mark.parametrize("sites", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_a_server_holds_x_about_three_times(sites: int) -> None:
    """x, the request that all share and the one update that is read; or the old x, the mean and the new one. By what a
    larger x takes more: the first round loads some thirty megabytes beside any."""
    more = (12_000_000 - 4_000_000) * 4 / 1e6
    assert (peak(sites, 12_000_000) - peak(sites, 4_000_000)) / more < 4.0
