"""With real processes: only x leaves a site, and strangers get nothing. All slow."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path

import pytest
from small_federation import SITES, make_plan

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")

import psutil
from flare_federation import GUEST, LEAD, flare

from pf2lora.errors import UserError
from pf2lora.federation.flare import admin, processes
from pf2lora.federation.protocol.checkpoints import BEST, CheckpointFolder
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.server import ServerSession
from pf2lora.federation.protocol.signed_plan import SignedPlan
from pf2lora.federation.protocol.site_setup import build

# --- only x leaves ------------------------------------------------------------------------------------------

LEAKY = """
import sys
if "worker_process" in " ".join(sys.orig_argv):
    import json
    from safetensors.torch import save
    from nvflare.apis.shareable import Shareable
    from pf2lora.federation.flare import executor
    from pf2lora.federation.protocol import messages
    from pf2lora.federation.protocol import site
    answer, execute = site.SiteSession.answer, executor.SiteExecutor.execute

    def leaking(self, request):
        fields, tensors = messages.decode(reply := answer(self, request))
        state, number = self.latest and self.latest.state, fields["round"]
        if fields["kind"] != "update":
            return reply
        if number == 1:
            tensors["bert.encoder.layer.0.attention.self.query.C"] = state.y[0]
        elif number == 2:
            tensors["moments"] = state.opt.mean[0]
        elif number == 3:
            fields["text"] = "w1 w2 w3"
        elif number == 4:
            return save(tensors, metadata={messages.FIELDS: json.dumps(fields), "note": "w1 w2 w3"})
        return messages.encode(fields, tensors)

    def telling(self, task, shareable, fl_ctx, abort):
        reply = execute(self, task, shareable, fl_ctx, abort)
        number = messages.decode(shareable[executor.BODY]).fields["round"]
        if number == 5:
            reply["more"] = "w1 w2 w3"
        if number == 6:
            reply.set_header("more", "w1 w2 w3")
        return reply

    site.SiteSession.answer, executor.SiteExecutor.execute = leaking, telling
"""


@pytest.mark.slow
def test_what_is_not_declared_is_refused_at_the_site_and_the_run_says_so(tmp_path: Path) -> None:
    plan = make_plan("pf2lora", SITES[:3], config={"rounds": 8}, deadline=60)
    (tmp_path / "leaky").mkdir()
    (tmp_path / "leaky" / "sitecustomize.py").write_text(LEAKY)
    with flare(tmp_path, plan) as run:
        run.environment["site-2"] = {"PYTHONPATH": str(tmp_path / "leaky")}
        run.start("server")
        run.start(*plan.sites)
        run.submit()
        run.wait(lambda: run.state() == "finished", 180, "the end")
        for record in ServerSession(plan, run.run).records:
            leaked = record["round"] <= 6
            assert ("site-2" in record["refused"]) == leaked, record
            assert ("site-2" in record["answered"]) != leaked
        assert run.says(
            "round 1: site-2 is left out: its own allow-list refused the message: nothing was sent"
        )
        for why in (
            "'bert.encoder.layer.0.attention.self.query.C'",
            "'moments'",
            "'text'",
            "'note'",
            "'more'",
        ):
            assert any(
                "refused to send" in line and why in line for line in run.log("site-2").splitlines()
            ), why
        assert "w1 w2 w3" not in run.log("server")


class Tap(threading.Thread):
    """Stands between a site and the server and records every byte, both ways apart."""

    def __init__(self, server: int) -> None:
        super().__init__(daemon=True)
        self.server, self.up, self.down = server, bytearray(), bytearray()
        self.door = socket.create_server(("127.0.0.1", 0))
        self.port = self.door.getsockname()[1]

    def run(self) -> None:
        while True:
            near, _ = self.door.accept()
            try:
                far = socket.create_connection(("127.0.0.1", self.server))
            except OSError:  # not there yet; the site asks again
                near.close()
                continue
            for source, target, record in ((near, far, self.up), (far, near, self.down)):
                threading.Thread(target=self.carry, args=(source, target, record), daemon=True).start()

    def carry(self, source: socket.socket, target: socket.socket, record: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                record += data
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.close()


@pytest.mark.slow
def test_no_tensor_of_y_crosses_the_wire(tmp_path: Path) -> None:
    """TLS is switched off for this one run, so that there is something to read."""
    plan = make_plan("pf2lora", SITES[:2], config={"rounds": 3}, deadline=60)
    with flare(tmp_path, plan) as run:
        port = processes.open_kit(run.kits["server"]).port
        tap = Tap(port)
        tap.start()
        for name in ("server", *plan.sites, LEAD):
            (file,) = (run.kits[name] / "startup").glob("fed_*.json")
            text = file.read_text().replace('"mtls"', '"clear"')
            file.write_text(
                text.replace(f"localhost:{port}", f"localhost:{tap.port}") if name == "site-1" else text
            )
        run.start("server")
        run.start(*plan.sites)
        run.submit()
        run.wait(lambda: run.state() == "finished", 180, "the end")
        sent = bytes(tap.up)
        setup = build(plan, run.kits["site-1"] / "local" / "site.toml", "site-1")
        folder = CheckpointFolder(tmp_path / "state" / "site-1" / plan.name, plan.name)
        model = setup.trial.model
        assert folder.rounds() == [1, 2, 3]
        for number in folder.rounds():
            state = folder.load(number, setup.initial).state
            for name, tensor in model.personal_layout.unpack(state.y).items():
                assert tensor.abs().max() > 0
                assert tensor.flatten()[:4].numpy().tobytes() not in sent, name
            assert state.opt.mean[0, :4].numpy().tobytes() not in sent
            x = model.common_layout.unpack(state.x)  # what may leave is found, so the search works
            assert all(tensor.flatten()[:4].contiguous().numpy().tobytes() in sent for tensor in x.values())
        for part in ("train", "validation"):
            for row in (tmp_path / part / "site-1.jsonl").read_text().splitlines():
                assert json.loads(row)["text"].encode() not in sent
        losses = folder.read(BEST, 3)[0]["losses"][0]
        assert not any(repr(loss).encode() in sent for loss in losses.tolist())
        final = json.loads((run.run / "final.json").read_text())["site-1"]["validation"]
        assert final["rows"] == len(losses) and repr(final["loss"]).encode() in sent  # the sum may leave


# --- strangers ----------------------------------------------------------------------------------------------


def self_signed(kit: Path) -> None:
    """Replace a kit's certificate by one that no authority signed, for the same name."""
    folder = kit / "startup"
    kind = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", "/CN=site-2/O=pf2lora"]
    files = ["-keyout", str(folder / "client.key"), "-out", str(folder / "client.crt")]
    subprocess.run(["openssl", "req", *kind, *files], check=True, capture_output=True)
    (folder / "client.key").chmod(0o600)


def first_words(port: int, kit: Path, *, with_certificate: bool) -> bytes:
    """What a server says to one who knows its authority and speaks its protocol; nothing, if it hangs up."""
    context = ssl.create_default_context(cafile=str(kit / "startup" / "rootCA.pem"))
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    if with_certificate:
        context.load_cert_chain(kit / "startup" / "client.crt", kit / "startup" / "client.key")
    hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    with (
        contextlib.suppress(ssl.SSLError, ConnectionError),
        socket.create_connection(("localhost", port), timeout=10) as plain,
        context.wrap_socket(plain) as secure,
    ):
        secure.sendall(hello)
        return secure.recv(1000)
    return b""


def hangs_up(port: int, kit: Path, *, with_certificate: bool) -> bool:
    """Whether one who connects to a port, with the kit's certificate or without, is turned away."""
    context = ssl.create_default_context(cafile=str(kit / "startup" / "rootCA.pem"))
    context.check_hostname = False
    if with_certificate:
        context.load_cert_chain(kit / "startup" / "client.crt", kit / "startup" / "client.key")
    try:
        with (
            socket.create_connection(("localhost", port), timeout=5) as plain,
            context.wrap_socket(plain) as secure,
        ):
            return secure.recv(1) == b""
    except TimeoutError:  # it waits for what we have to say
        return False
    except OSError:
        return True


def loopback_ports(pid: int) -> set[int]:
    """The ports on which a process listens for others of its machine."""
    found = psutil.Process(pid).net_connections("tcp")
    return {
        c.laddr.port for c in found if c.status == psutil.CONN_LISTEN and c.laddr.ip in ("127.0.0.1", "::1")
    }


@pytest.mark.slow
def test_strangers_get_nothing(tmp_path: Path) -> None:
    plan = make_plan("pf2lora", SITES[:2], config={"rounds": 2}, deadline=60)
    with flare(tmp_path, plan) as run:
        run.start("server")
        run.start("site-1")
        port = processes.open_kit(run.kits["server"]).port
        # The server speaks to a site, and to nobody without a certificate of its authority.
        assert first_words(port, run.kits["site-1"], with_certificate=True)
        assert first_words(port, run.kits["site-1"], with_certificate=False) == b""
        # Nor does a participant to other processes of its machine.
        for name in ("server", "site-1"):
            (inside,) = loopback_ports(run.started[name].pid)
            assert hangs_up(inside, run.kits["site-1"], with_certificate=False), name
            assert not hangs_up(inside, run.kits["site-1"], with_certificate=True), name
        self_signed(run.kits["site-2"])
        assert first_words(port, run.kits["site-2"], with_certificate=True) == b""
        with (tmp_path / "stranger.log").open("wb") as log:
            run.started["site-2"] = processes.start(processes.open_kit(run.kits["site-2"]), log)
            time.sleep(20)
        assert not (run.kits["server"] / "registered" / "site-2").exists()
        # With the role of a member: it may look, and not act.
        assert admin.runs(run.kits[GUEST]) == []
        with pytest.raises(UserError, match=r"guest@pf2lora\.local may not do this"):
            admin.submit(run.kits[GUEST], plan)
        assert admin.runs(run.kits[LEAD]) == []
        # A person whose certificate is not ours.
        stranger = tmp_path / "stranger"
        shutil.copytree(run.kits[LEAD], stranger)
        self_signed(stranger)
        with pytest.raises(UserError, match="certificate is not of the authority"):
            admin.submit(stranger, plan)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["code", "class"])
def test_a_job_with_code_or_with_another_class_does_not_run(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan("pf2lora", SITES[:2], config={"rounds": 2}, deadline=60)
    write = admin.write_job

    def tampered(plan: Plan, signed: SignedPlan, folder: Path) -> Path:
        job = write(plan, signed, folder)
        proof = f"open({str(tmp_path / 'proof')!r}, 'w').close()\n"
        if kind == "code":
            (job / "app" / "custom").mkdir()
            (job / "app" / "custom" / "evil.py").write_text(proof)
        else:
            file = job / "app" / "config" / "config_fed_client.json"
            other = "nvflare.app_common.np.np_trainer.NPTrainer"
            file.write_text(file.read_text().replace("pf2lora.federation.flare.executor.SiteExecutor", other))
        return job

    monkeypatch.setattr(admin, "write_job", tampered)
    with flare(tmp_path, plan) as run:
        run.start("server")
        run.start(*plan.sites)
        run.submit()
        who, why = ("server", "BYOC not permitted") if kind == "code" else ("site-1", "is not in allow_list")
        run.wait(lambda: why in run.log(who), 60, "the refusal")
        assert run.round() == 0
        assert not (tmp_path / "proof").exists()
