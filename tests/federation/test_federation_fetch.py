"""What the lead gets of a finished run: the common adapter, the scores that sites allowed, a report."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from figures import private_words
from safetensors.torch import load_file
from small_federation import SITES, Small, make_plan, make_small, write_data, write_model, write_site_file
from task_federation import make_world

from pf2lora.errors import UserError
from pf2lora.federation.flare import admin
from pf2lora.federation.protocol import fetched, submitted
from pf2lora.federation.protocol.messages import decode, encode
from pf2lora.federation.protocol.server import ServerSession
from pf2lora.run.result import load_result
from pf2lora.run.saved import load_run
from pf2lora.tasks.classification.rows import TextRow

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
    card = (out / "common" / "README.md").read_text()
    assert "4 clients with 220 training rows" in card and not any(site in card for site in SITES)


def test_a_fetched_run_is_used_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from pf2lora.cli import app

    small = make_small(tmp_path, make_plan("pf2lora"))
    small.run()
    monkeypatch.chdir(tmp_path)
    fetched.build(handed_out(tmp_path), tmp_path / "out", "model")  # a path of the lead's working folder
    monkeypatch.chdir("/")
    found = load_run(tmp_path / "out", device="cpu")
    common, none = found.common()
    rows = [json.loads(line) for line in (tmp_path / "test" / "site-1.jsonl").read_text().splitlines()]
    trial = small.setups["site-1"].trial
    asked = [TextRow(row["text"], row["label"]) for row in rows]
    encoded = trial.workload.task.encode([asked], training=False)
    expected = trial.workload.task.predict(trial.model, common, none, encoded, final=True)[0]
    assert np.array_equal(np.stack(found.answers(None, asked)), np.stack(expected))
    said = CliRunner().invoke(
        app, ["predict", str(tmp_path / "out"), "w1 w2 w30", "--device", "cpu", "--json"]
    )
    assert said.exit_code == 0 and json.loads(said.stdout)[0]["predicted"] in ("neg", "pos")
    assert CliRunner().invoke(app, ["report", str(tmp_path / "out")]).exit_code == 0
    refused = CliRunner().invoke(app, ["predict", str(tmp_path / "out"), "w1", "--client", "site-1"])
    assert "its clients: none (a fetched run has the common adapter alone)" in str(refused.exception)
    pairs = fetched.build(tmp_path / "fetched", tmp_path / "pairs", str(tmp_path / "model"), traits=["pairs"])
    assert pairs and load_run(tmp_path / "pairs", device="cpu").saved.traits == ["pairs"]


@pytest.mark.parametrize("parts", ["all", "no validation"])
def test_a_site_has_a_card_beside_what_it_deploys(tmp_path: Path, parts: str) -> None:
    small = make_small(tmp_path, make_plan("pf2lora"))
    if parts == "no validation":
        for site, setup in small.setups.items():
            setup.trial.workload.clients[0].validation.clear()
            small.sessions[site].models.validated = False
    small.run()
    for site in SITES:
        text = (tmp_path / "state" / site / "trial" / "clients" / site / "README.md").read_text()
        others = [other for other in SITES if other != site and re.search(rf"{other}\b", text)]
        assert "rows" in text and f"of {site}; with the other sites" in text and not others
        assert not private_words(text.split("## Use")[0]) and str(tmp_path) not in text
        served = json.loads((tmp_path / "server" / "final.json").read_text())[site]["served"]["accuracy"] / 20
        assert f"{100 * served:.2f} |" in text


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


def test_the_sites_precision_is_found(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    write_data(tmp_path)
    plan = make_plan("homlora")
    files = {s: write_site_file(tmp_path / "sites" / s / "site.toml", tmp_path, s) for s in plan.sites}
    for file in files.values():
        file.write_text('precision = "bfloat16"\n' + file.read_text())
    Small(plan, tmp_path, files).run()
    fetched.build(handed_out(tmp_path), tmp_path / "out", str(tmp_path / "model"))
    assert load_run(tmp_path / "out", device="cpu").config.model.precision == "bfloat16"


@pytest.mark.parametrize(("told", "shown"), [(15.0, 0.75), (500.0, None), (1.7e308, None)])
def test_a_score_that_cannot_be_is_none(tmp_path: Path, told: float, shown: float | None) -> None:
    """One site's word ends neither the run nor the lead's look at it; what cannot be added leaves that site out."""
    small = make_small(tmp_path, make_plan("homlora"))

    def tamper(site: str, data: bytes) -> bytes:
        message = decode(data)
        points = {k: v | {"accuracy": told} for k, v in message.fields.items() if k in ("served", "deploy")}
        return data if site != "site-2" else encode(message.fields | points, message.tensors)

    small.tamper = tamper
    small.run()
    fetched.build(handed_out(tmp_path), tmp_path / "out", str(tmp_path / "model"))
    (run,) = load_result(tmp_path / "out" / "result.json").methods["homlora"].runs
    assert run.served["accuracy"].per_client[1] == shown and run.served["accuracy"].mean is not None


def test_the_model_is_that_of_the_submission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit, model = tmp_path / "kit", write_model(tmp_path / "model")
    kit.mkdir()
    monkeypatch.chdir(tmp_path)
    submitted.remember(kit, "first", "model")
    submitted.remember(kit, "second", "org/on-the-hub")
    assert submitted.model_of(kit, "first") == str(model) and submitted.model_of(kit, "second")[:4] == "org/"
    with pytest.raises(UserError, match="the base model of the run 'third' is not known here: --model"):
        submitted.model_of(kit, "third")


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
