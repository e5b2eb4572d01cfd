"""The scripts of whole runs, compiling and float8, tiny: each row is of what it says."""

from __future__ import annotations

import importlib
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest
import torch
from paper_world import write_glue, write_models
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.pytorch_utils import Conv1D

from pf2lora.adapters import short_attention

pytest.importorskip("peft", reason="the plain way of the benchmark is PEFT's")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def scripts() -> dict[str, ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return {
            name: importlib.import_module(name)
            for name in ("compile_cost", "end_to_end", "float8", "step_profile", "train_step")
        }
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def sst2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sst2")
    write_glue(root / "data")
    write_models(root)
    return root


def test_a_whole_run_beside_what_a_user_would_write(
    scripts: dict[str, ModuleType], sst2: Path, tmp_path: Path
) -> None:
    """All four ways: our runs have an adapter for each client and a common one, the others' rounds are multiplied."""
    file = tmp_path / "rows.json"
    arguments = ["--model", str(sst2 / "classifier"), "--data-dir", str(sst2 / "data" / "SST-2")]
    sizes = ["--clients", "2", "--rounds", "2", "--their-rounds", "2"]
    rows = scripts["end_to_end"].main([*arguments, *sizes, "--json", str(file)])
    assert json.loads(file.read_text()) == rows
    homlora, pf2lora, peft, trainer = rows
    assert [(r["way"], r["method"]) for r in rows] == [
        *(("pf2lora", "homlora"), ("pf2lora", "pf2lora"), ("peft", "homlora"), ("trainer", "homlora")),
    ]
    for row in (homlora, pf2lora):
        assert row["adapters"] == 3 and 0 <= row["accuracy"] <= 1 <= row["evaluated"]
        assert row["evaluation_share"] == row["evaluation_seconds"] / row["seconds"] < 1
    assert homlora["resize_seconds"] == 0 < pf2lora["resize_share"] < pf2lora["evaluation_share"]
    assert peft["evaluation_seconds"] > 0 == trainer["evaluation_seconds"]
    for row in rows:
        assert 0 < row["steps_seconds"] < row["seconds"] and row["ms_a_step"] > 0


def test_steps_inside_a_run(scripts: dict[str, ModuleType], sst2: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    arguments = ["--tokenizer", str(sst2 / "classifier"), "--shape", "small-roberta", "--uncompiled"]
    sizes = ["--clients", "2", "--rounds", "3", "--device", "cpu"]
    rows = scripts["train_step"].main([*arguments, *sizes, "--json", str(file)])
    assert json.loads(file.read_text()) == rows
    assert [(row["method"], row["clients"], row["rounds"]) for row in rows] == [
        ("homlora", 2, 3),
        ("pf2lora", 2, 3),
    ]
    for row in rows:
        assert row["ms_a_step"] > 0 < row["first_round_seconds"] and not row["compiled"]
    homlora, pf2lora = rows
    assert homlora["ms_a_step"] < pf2lora["ms_a_step"]  # one gradient and three


def test_steps_of_a_language_model_inside_a_run(scripts: dict[str, ModuleType], sst2: Path) -> None:
    """Where its time is measured its base model is rounded, and the device has no more than a card's memory."""
    arguments = ["--tokenizer", str(sst2 / "writer"), "--shape", "small-llama", "--quantization", "nf4"]
    sizes = ["--clients", "2", "--rounds", "3", "--device", "cpu", "--uncompiled", "--methods", "homlora"]
    (row,) = scripts["train_step"].main([*arguments, *sizes, "--card", "24"])
    assert (row["shape"], row["quantization"], row["card_gb"]) == ("small-llama", "nf4", 24.0)
    assert row["ms_a_step"] > 0


def test_a_profile_keeps_its_rows(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine without an accelerator, whose steps are not measured: what is written down, and that a second call
    leaves the first one's rows."""
    profile, file = scripts["step_profile"], tmp_path / "rows.json"
    kernels = {"nvjet_tst": (2000.0, 4.0), "ampere_gemm": (500.0, 2.0), "triton_poi_fused": (1500.0, 3.0)}
    kernels |= {"short_attention_forward": (300.0, 2.0), "short_attention_backward": (700.0, 2.0)}
    kinds = {
        "products": {"ms": 2.5, "calls": 6.0},
        "compiled elementwise": {"ms": 1.5, "calls": 3.0},
        "attention": {"ms": 1.0, "calls": 4.0},
    }
    assert list(profile.by_kind(kernels).items()) == list(kinds.items())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(profile, "ceiling", lambda dtype, device: 8e14)
    monkeypatch.setattr(profile, "machine", lambda device: {"device": "H200"})
    monkeypatch.setattr(
        profile, "measure", lambda model, method, clients, *_: {"model": model, "of": [method, clients]}
    )
    asked = ["--methods", "homlora", "pf2lora", "--clients", "8", "32", "--json", str(file)]
    rows = profile.main(asked)
    assert [row["of"] for row in rows] == [["homlora", 8], ["pf2lora", 8], ["homlora", 32], ["pf2lora", 32]]
    assert rows[0]["machine"] == {"device": "H200"} and rows[0]["versions"] and rows[0]["day"]
    assert profile.main(["--models", "gpt2-medium", "--json", str(file)])[:4] == rows
    assert [row["model"] for row in json.loads(file.read_text())] == ["roberta-base"] * 4 + ["gpt2-medium"]


def test_a_profile_of_torchs_attention_has_none_of_our_kernels(scripts: dict[str, ModuleType]) -> None:
    profile = scripts["step_profile"]
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 3, 32, 16, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        for name, backends in profile.ATTENTION.items():
            with profile.torchs_attention(backends) if backends else nullcontext():
                assert short_attention.applies(q, k, v, None, dropout=0.0, causal=False) is (name == "auto")


def test_compiling_has_a_row_for_each_length_with_what_repays_it(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compiled is noted and not compiled: that takes a minute, and other tests do."""
    compiled: list[nn.Module] = []

    def compile(module: nn.Module, dynamic: bool) -> nn.Module:
        compiled.append(module)
        return module

    monkeypatch.setattr(torch, "compile", compile)
    file = tmp_path / "rows.json"
    rows = scripts["compile_cost"].main(["--models", "small-roberta", "--clients", "2", "--json", str(file)])
    assert json.loads(file.read_text()) == rows and [row["length"] for row in rows] == [8, 4]
    assert len(compiled) == len(rows)
    for row in rows:
        plain, fast = row["ms"]
        assert (row["repaid_operations"] is None) is (fast >= plain > 0)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_float8_layer_is_the_layer_within_its_rounding(
    scripts: dict[str, ModuleType], transposed: bool
) -> None:
    """Both ways: e4m3 has three bits behind the point, so a number is rounded by a sixteenth at most."""
    torch.manual_seed(0)
    layer = Conv1D(24, 16) if transposed else nn.Linear(16, 24)
    nn.init.normal_(layer.weight)
    small = scripts["float8"].Float8Linear(layer)
    u = torch.randn(3, 5, 16, requires_grad=True)
    way = torch.randn(3, 5, 24)
    found, expected = ((m(u), torch.autograd.grad((m(u) * way).sum(), u)[0]) for m in (small, layer))
    for ours, theirs in zip(found, expected):
        assert 0 < (ours - theirs).norm() < theirs.norm() / 16


def test_float8_is_measured_beside_bfloat16(
    scripts: dict[str, ModuleType], sst2: Path, tmp_path: Path
) -> None:
    before = tmp_path / "bf16.json"
    before.write_text(json.dumps({"paths": {"fast": [{"seed": 0, "losses": [0.0] * 10}]}}))
    arguments = ["--model", str(sst2 / "classifier"), "--data", str(sst2 / "data" / "SST-2")]
    sizes = ["--seeds", "1", "--rounds", "1", "--shapes", "small-llama", "--clients", "2", "--no-compile"]
    found = scripts["float8"].main([*arguments, *sizes, "--beside", str(before)])
    bfloat16, float8 = found["times"]
    assert (bfloat16["precision"], float8["precision"]) == ("bfloat16", "float8")
    assert 0 < abs(bfloat16["loss"] - float8["loss"]) < 0.05 * bfloat16["loss"]
    (one,) = found["losses"]["runs"]
    assert one["apart"]["fast"] == [max(one["losses"]), pytest.approx(sum(one["losses"]) / 10)]
