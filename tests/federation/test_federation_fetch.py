"""What the lead gets of a finished run: the common adapter, the scores that sites allowed, a report."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from small_federation import SITES, make_plan, make_small, write_model
from task_federation import make_world

from pf2lora.errors import UserError
from pf2lora.federation.flare import admin
from pf2lora.federation.protocol import fetched
from pf2lora.federation.protocol.server import ServerSession
from pf2lora.run.result import load_result

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")
pytestmark = pytest.mark.usefixtures("one_thread", "no_java")


def handed_out(root: Path) -> Path:
    """The files that leave the server, alone in a folder."""
    place = root / "fetched"
    place.mkdir()
    for file in fetched.handed_out(root / "server"):
        shutil.copy2(file, place)
    return place


@pytest.mark.parametrize("method", ["pf2lora", "hetlora", "fedsa-lora"])
def test_a_fetched_run_has_the_common_adapter_and_the_sites_scores(tmp_path: Path, method: str) -> None:
    small = make_small(tmp_path, make_plan(method))
    small.run()
    out = tmp_path / "out"
    fetched.build(handed_out(tmp_path), out, str(tmp_path / "model"))
    result = load_result(out / "result.json")
    assert [c.name for c in result.clients] == list(SITES)
    assert [c.train for c in result.clients] == [40, 50, 60, 70]
    (run,) = result.methods[method].runs
    final = json.loads((tmp_path / "server" / "final.json").read_text())
    expected = [final[site]["served"]["accuracy"] / 20 for site in SITES]
    assert run.served["accuracy"].per_client == pytest.approx(expected)
    assert run.choices is None and run.deploy is not None
    assert (out / "report.html").stat().st_size > 10_000
    saved = load_file(out / "state" / "common.safetensors")
    common, method_here = small.coordinator.common, small.coordinator.known_method
    assert common is not None
    layout = method_here.arrives(small.coordinator.done)
    for name, tensor in layout.unpack(common[None]).items():
        assert (saved[name] - tensor[0]).abs().max() <= 1e-6
    weights = load_file(out / "common" / "adapter_model.safetensors")
    assert any("lora_A" in name for name in weights)
    assert not (out / "clients").exists()


def test_generated_text_has_its_scores(tmp_path: Path) -> None:
    world = make_world(tmp_path, "generation")
    world.small.run()
    fetched.build(handed_out(tmp_path), tmp_path / "out", str(world.model))
    (run,) = load_result(tmp_path / "out" / "result.json").methods["pf2lora"].runs
    assert all(isinstance(score, float) for score in run.served["BLEU"].per_client)


def test_another_base_model_is_refused(tmp_path: Path) -> None:
    make_small(tmp_path, make_plan("homlora")).run()
    other = write_model(tmp_path / "other", seed=1)
    with pytest.raises(UserError, match="is another base model than the sites have"):
        fetched.build(handed_out(tmp_path), tmp_path / "out", str(other))


def test_a_private_run_is_fetched_without_scores(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="pip install 'pf2lora[privacy]'")
    plan = make_plan("homlora", config={"dp_noise": 1.0, "dp_clip": 1.0})
    make_small(tmp_path, plan).run()
    fetched.build(handed_out(tmp_path), tmp_path / "out", str(tmp_path / "model"))
    (run,) = load_result(tmp_path / "out" / "result.json").methods["homlora"].runs
    assert run.privacy is not None and run.served["accuracy"].per_client == [None] * 4
    assert (tmp_path / "out" / "common" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_the_lead_fetches_a_run_from_the_server(tmp_path: Path) -> None:
    from flare_federation import LEAD, flare

    plan = make_plan("pf2lora", SITES[:2], config={"rounds": 2}, deadline=60)
    with flare(tmp_path, plan) as run:
        run.start("server")
        run.start(*plan.sites)
        start = [sys.executable, "-c", "from pf2lora.cli.federation import app; app()", "fetch", plan.name]
        where = [
            "--kit",
            str(run.kits[LEAD]),
            "--model",
            str(tmp_path / "model"),
            "--out",
            str(tmp_path / "out"),
        ]
        early = subprocess.run([*start, *where], capture_output=True, text=True, check=False)
        assert early.returncode != 0 and "no run 'trial' is finished here" in early.stderr
        run.submit()
        run.wait(lambda: run.state() == "finished", 120, "the end")
        run.wait(
            lambda: (admin.runs(run.kits[LEAD])[0].get("pf2lora") or {}).get("state") == "finished", 60, "it"
        )
        done = subprocess.run([*start, *where], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        ours = load_file(tmp_path / "out" / "state" / "common.safetensors")
        common = ServerSession(plan, run.run).common
        assert common is not None and sum(t.numel() for t in ours.values()) == common.numel()
        assert (tmp_path / "out" / "report.html").is_file()
