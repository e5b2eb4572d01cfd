"""The federation with real processes: mutual TLS and faults. The short one runs always, the others are slow."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hardship import kit_on_small_disk
from small_federation import (
    SITES,
    Small,
    local_run,
    make_plan,
    settings,
    write_data,
    write_model,
    write_site_file,
)

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")

import psutil
from flare_federation import LEAD, Flare, flare
from safetensors.torch import load_file

from pf2lora.cli.federation_watch import described
from pf2lora.errors import UserError
from pf2lora.federation.flare import admin, processes
from pf2lora.federation.protocol import audit
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.server import ServerSession
from pf2lora.run.saved import load_run


def rehearse_command(root: Path, rounds: int, clients: tuple[str, ...] = SITES[:2]) -> list[str]:
    """`pf2lora federation rehearse` on small files."""
    write_model(root / "model")
    write_data(root, clients)
    values = settings(rounds=rounds)
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in values.items()]
    files = ["--clients", str(root / "train"), "--test", str(root / "test"), "--model", str(root / "model")]
    start = [sys.executable, "-c", "from pf2lora.cli.federation import app; app()", "rehearse"]
    return [*start, *files, *flags, "--out", str(root / "run"), "--deadline", "60", "--device", "cpu"]


def leftovers(root: Path) -> list[str]:
    """Processes of a federation under `root` that still run."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(root) in line and "nvflare" in line:
            found.append(line)
    return found


@pytest.mark.parametrize(
    ("processes", "apart"), [("1", 1e-5), pytest.param("2", 1e-4, marks=pytest.mark.slow)]
)
def test_a_rehearsal_leaves_a_run_folder_with_the_local_engines_numbers(
    tmp_path: Path, processes: str, apart: float
) -> None:
    """Its clients have names that no site may have. Where a site computes with several processes it sums in another
    order, and AdamW makes more of that where a gradient is nearly none."""
    names = ("Clinic A", "Klinik Süd")
    command = [*rehearse_command(tmp_path, 3, names), "--processes", processes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "client 'Clinic A' takes part as site 'clinic-a'" in done.stderr
    assert "round 3 of 3: 2 answered (clinic-a, klinik-sud)" in done.stderr
    assert "deadline 60 s, quorum 0.5" in done.stderr
    out = tmp_path / "run"
    _, common, trial = local_run(tmp_path, make_plan("pf2lora", SITES[:2]), "test")
    saved = load_file(out / "state" / "common.safetensors")
    flat = trial.model.common_layout.pack({name: t[None] for name, t in saved.items()})[0]
    assert (flat - common).abs().max() <= apart
    result = json.loads((out / "result.json").read_text())
    assert [client["name"] for client in result["clients"]] == list(names)
    (run,) = result["methods"]["pf2lora"]["runs"]
    assert run["served"]["accuracy"]["mean"] is not None and run["deploy"]["accuracy"]["mean"] is not None
    assert [client["validation"] for client in result["clients"]] == [8, 10]  # a fifth of so few rows
    assert all(choice["validation_loss"] > 0 for choice in run["choices"]) and len(run["choices"]) == 2
    assert (out / "report.html").exists()
    assert {p.name for p in (out / "clients").iterdir()} == set(names)
    assert load_run(out, device="cpu").client("Klinik Süd")[1].abs().max() > 0
    keys = list((out / "federation").rglob("*.key"))
    assert len(keys) == 4
    rows = list((out / "federation" / "sites").rglob("*.jsonl"))
    assert len(rows) == 6
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in (*keys, *rows))
    for name in ("server", "clinic-a", "klinik-sud"):
        assert audit.verify(out / "federation" / "kits" / name).lines >= 5
    said = (out / "federation" / "kits" / "clinic-a" / audit.FILE).read_text().splitlines()
    events = [json.loads(line) for line in said]
    assert [e["kind"] for e in events if e["event"] == "sent"] == ["hello", *["update"] * 3, "scores"]
    assert leftovers(tmp_path) == []


# --- faults -------------------------------------------------------------------------------------------------


def last_common(run: Flare) -> torch.Tensor:
    common = ServerSession(run.plan, run.run).common
    assert common is not None
    return common


def undisturbed(root: Path, plan: Plan) -> torch.Tensor:
    """The common x of the same plan when nothing happens to anybody."""
    files = {
        site: write_site_file(
            root / "calm" / site / "site.toml", root, site, state=root / "calm" / site / "state"
        )
        for site in plan.sites
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the sites of these tests: then the sums are the same to the last bit
    try:
        calm = Small(plan, root / "calm", files)
        calm.run()
    finally:
        torch.set_num_threads(threads)
    assert calm.coordinator.common is not None
    return calm.coordinator.common


@pytest.mark.slow
def test_a_killed_site_is_waited_for_once_and_comes_back(tmp_path: Path) -> None:
    plan = make_plan("pf2lora", SITES[:3], config={"rounds": 25, "steps": 30}, deadline=10)
    with flare(tmp_path, plan) as run:
        run.start("server")
        run.start(*plan.sites)
        run.submit()
        run.wait(lambda: run.round() >= 2, 120, "round 2")
        run.kill("site-2")
        at = run.round() + 1
        run.wait(lambda: run.says("site-2 did not answer round"), 60, "the deadline")
        run.wait(lambda: run.round() >= at + 3, 60, "three more rounds")
        records = ServerSession(plan, run.run).records
        waited = [r["round"] for r in records if r["seconds"] >= 9]
        assert len(waited) == 1  # later rounds did not wait
        state = tmp_path / "state" / "site-2" / plan.name
        had = max(int(p.stem.split("-")[1]) for p in state.glob("round-*"))
        run.start("site-2")
        run.wait(lambda: run.state() == "finished", 240, "the end")
        records = ServerSession(plan, run.run).records
        with_it = [r["round"] for r in records if "site-2" in r["answered"]]
        assert max(with_it) == 25
        steps = [
            r["scores"]["site-2"]["steps"]
            for r in records
            if "site-2" in r["scores"] and "steps" in r["scores"]["site-2"]
        ]
        from safetensors import safe_open

        with safe_open(state / "round-000025.safetensors", "pt") as file:
            done = int(file.metadata()["steps"])
        # Its own optimizer steps: those of the rounds it took part in, the one it was killed in maybe among them.
        assert sum(steps) <= done <= sum(steps) + 30
        assert had in with_it or had == max(r for r in with_it if r < at) + 1


@pytest.mark.slow
def test_a_killed_job_process_is_started_again_and_rejoins_the_same_job(tmp_path: Path) -> None:
    plan = make_plan("pf2lora", SITES[:2], config={"rounds": 30, "steps": 30}, deadline=5)
    with flare(tmp_path, plan) as run:
        run.start("server")
        run.start(*plan.sites)
        job = run.submit()
        run.wait(lambda: run.round() >= 2, 120, "round 2")
        run.kill_job("site-2")
        run.wait(lambda: run.state() == "finished", 240, "the end")
        assert "site-2" in list(ServerSession(plan, run.run).records)[-1]["answered"]
        assert json.loads((run.run / "status.json").read_text())["job"] == job


def over(jobs: list[dict[str, Any]]) -> bool:
    return all(job["status"] not in admin.ACTIVE for job in jobs)


@pytest.mark.slow
def test_a_killed_server_resumes_and_the_result_is_the_same(tmp_path: Path) -> None:
    plan = make_plan("hetlora", SITES[:3], config={"rounds": 40, "steps": 20}, deadline=60)
    with flare(tmp_path, plan) as run:
        run.start("server")
        run.start(*plan.sites)
        run.submit()
        run.wait(lambda: run.round() >= 4, 120, "round 4")
        time.sleep(0.4)  # in the middle of a round: some sites have saved it, the server has not
        run.kill("server")
        finished = ServerSession(plan, run.run).done
        assert finished >= 4
        run.start("server")  # nobody submits anything
        run.wait(lambda: run.round() > finished, 120, "the run to go on by itself")
        shown = [job["status"] for job in admin.runs(run.kits[LEAD])]
        assert sorted(shown) == ["FINISHED:ABNORMAL", "RUNNING"]  # the dead job is not shown as running
        assert (
            len(admin.stop_run(run.kits[LEAD], plan.name)) == 1
        )  # and does not keep the live one from being stopped
        run.wait(lambda: run.state() == "stopped", 60, "the stop")
        run.wait(lambda: over(admin.runs(run.kits[LEAD])), 60, "the job's end")
        with pytest.raises(UserError, match="there is no run 'other'"):
            admin.resume_run(run.kits[LEAD], "other")
        admin.resume_run(run.kits[LEAD], plan.name)
        with pytest.raises(UserError, match="is going on already"):
            admin.resume_run(run.kits[LEAD], plan.name)
        run.wait(lambda: run.state() == "finished", 240, "the end")
        assert run.says(f"rounds {finished + 1} to 40")
        records = ServerSession(plan, run.run).records
        assert [r["round"] for r in records] == list(range(1, 41))
        assert all(r["answered"] == list(plan.sites) for r in records)
        assert torch.equal(last_common(run), undisturbed(tmp_path, plan))


@pytest.mark.slow
def test_a_killed_server_job_goes_on_by_itself(tmp_path: Path) -> None:
    plan = make_plan("pf2lora", SITES[:2], config={"rounds": 15, "steps": 20}, deadline=60)
    with flare(tmp_path, plan) as run:
        run.start("server")
        run.start(*plan.sites)
        first = run.submit()
        with pytest.raises(UserError, match="site-1 is running already"):
            processes.start(processes.open_kit(run.kits["site-1"]))
        run.wait(lambda: run.round() >= 3, 120, "round 3")
        run.kill_job("server")
        run.wait(lambda: run.state() == "finished", 240, "the end")
        assert json.loads((run.run / "status.json").read_text())["job"] != first
        assert torch.equal(last_common(run), undisturbed(tmp_path, plan))


@pytest.mark.slow
def test_a_site_that_cannot_save_stops_with_one_line_and_the_others_go_on(tmp_path: Path) -> None:
    plan = make_plan("homlora", SITES[:3], config={"rounds": 12, "steps": 10}, deadline=60)
    small = tmp_path / "small-disk"
    small.mkdir()
    mounted = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=20k", "tmpfs", str(small)], check=False
        ).returncode
        == 0
    )
    if not mounted:
        pytest.skip("a small disk needs the right to mount one")
    try:
        with flare(tmp_path, plan) as run:
            write_site_file(
                run.kits["site-2"] / "local" / "site.toml", tmp_path, "site-2", state=small / "state"
            )
            run.start("server")
            run.start(*plan.sites)
            run.submit()
            run.wait(lambda: run.state() == "finished", 240, "the end")
            assert run.says("site-2 is left out: the disk of its state folder is full")
            assert "is full: free some space, then start again" in run.log("site-2")
            assert list(ServerSession(plan, run.run).records)[-1]["answered"] == ["site-1", "site-3"]
    finally:
        subprocess.run(["umount", str(small)], check=False)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["runs", "."])
def test_a_full_server_disk_stops_the_run_and_resume_goes_on(tmp_path: Path, place: str) -> None:
    """The runs' disk, and that of the whole kit with FLARE's stores, logs and workspaces."""
    plan = make_plan("homlora", SITES[:3], config={"rounds": 20, "steps": 20}, deadline=60)
    with flare(tmp_path, plan) as run, kit_on_small_disk(run.kits["server"], place) as disk:
        try:
            run.start("server")
            run.start(*plan.sites)
            run.submit()
            run.wait(lambda: run.round() >= 2, 120, "round 2")
            with (disk / "filler").open("wb", buffering=0) as filler, suppress(OSError):
                while filler.write(bytes(512)):
                    pass
            lead = run.kits[LEAD]

            def over() -> bool:
                (job, *_) = admin.runs(lead)
                return job["status"] not in admin.ACTIVE and admin.state_of(job) in ("stopped", "failed")

            run.wait(over, 180, "the run to stop")  # FLARE tries for a minute to keep the job's folder
            jobs = admin.runs(lead)
            print([(job["status"], job.get("pf2lora")) for job in jobs])
            assert len(jobs) == 1 and "is full: free some space" in jobs[0]["pf2lora"]["line"]
            assert "is full: free some space" in described(jobs[0])
            assert admin.stop_run(lead, plan.name) == []  # nothing is going on
            (disk / "filler").unlink()
            admin.resume_run(lead, plan.name)
            run.wait(lambda: run.state() == "finished", 240, "the end")
            records = list(ServerSession(plan, run.run).records)
            assert [r["round"] for r in records] == list(range(1, 21))
            assert torch.equal(last_common(run), undisturbed(tmp_path, plan))
        finally:
            processes.stop(*run.started.values())  # before the disk is taken away
            run.started.clear()


@pytest.mark.slow
def test_ctrl_c_ends_everything_and_the_same_command_resumes(tmp_path: Path) -> None:
    command = rehearse_command(tmp_path, 200)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("round 5 of"):
            break
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(timeout=60) == 130
    assert "the same command resumes after round" in rest
    assert leftovers(tmp_path) == []
    again = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert again.stderr is not None
    rounds = [line for line in again.stderr if line.startswith("round ")]
    assert again.wait(timeout=60) == 0
    assert 5 < int(rounds[0].split()[1]) < 200
    assert len(ServerSession(*unfinished(tmp_path)).records) == 200


def unfinished(root: Path) -> tuple[Plan, Path]:
    folder = root / "run" / "federation"
    plan = Plan.from_json((folder / "plan.json").read_text())
    return plan, folder / "kits" / "server" / "runs" / plan.name


@pytest.mark.slow
def test_another_base_model_stops_the_run_and_the_lead_is_told_which_site(tmp_path: Path) -> None:
    plan = make_plan("pf2lora", SITES[:2], deadline=60)
    with flare(tmp_path, plan) as run:
        other = write_model(tmp_path / "other", seed=1)
        write_site_file(run.kits["site-2"] / "local" / "site.toml", tmp_path, "site-2", model=other)
        run.start("server")
        run.start(*plan.sites)
        run.submit()
        run.wait(lambda: run.state() == "failed", 120, "the refusal")
        line = "has another base model than"
        assert run.says(line) and run.round() == 0

        def told() -> str:
            """The job's word; for a moment, as it ends, it has none."""
            return (admin.runs(run.kits[LEAD])[0].get("pf2lora") or {}).get("line", "")

        run.wait(lambda: line in told(), 60, "the lead's view")
