"""A plan that a lead signed once is no server's to come with again: it is of its time, and over when it is over."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import pytest
from small_federation import make_plan, write_data, write_model, write_site_file

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")

from site_executor import HELLO, ask, context_of, executor_of, lead_of, signed_on

from pf2lora.federation.flare.executor import BODY, SiteExecutor
from pf2lora.federation.protocol.messages import decode, encode
from pf2lora.federation.protocol.problems import told

pytestmark = pytest.mark.usefixtures("one_thread")

SITE = "site-1"


def test_a_plan_that_was_signed_too_long_ago_is_submitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a server could come with it for as long as the lead's certificate lasts. The same plan goes on."""
    write_model(tmp_path / "model")
    write_data(tmp_path, (SITE,))
    kit, plan = tmp_path / "kit", make_plan("homlora", (SITE,))
    local = write_site_file(kit / "local" / "site.toml", tmp_path, SITE).parent
    lead, context, now = lead_of(kit), context_of(SITE, local), time.time()
    old = SiteExecutor(**asdict(signed_on(lead, plan, now - 89 * 86400)))
    assert decode(ask(old, context, HELLO)[BODY]).kind == "hello"
    train = [encode({"kind": "train", "round": number}) for number in (1, 2)]
    assert decode(ask(old, context, train[0])[BODY]).kind == "update"
    monkeypatch.setattr(time, "time", lambda: now + 2 * 86400)
    fields = decode(ask(old, context, train[1])[BODY]).fields
    assert fields["code"] == "policy"
    line = "its policy's max_plan_days is 90, and the run's plan was signed longer ago: submit it again"
    assert told(fields, plan) == line == old.status.line
    assert old.session is not None
    old.session.folder.close()
    again = executor_of(plan, kit)
    assert decode(ask(again, context, HELLO)[BODY]).kind == "hello"
    assert decode(ask(again, context, train[1])[BODY]).kind == "update"


def test_a_signed_job_that_is_sent_again_after_its_end_gets_no_update(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    write_data(tmp_path, (SITE,))
    kit, plan = tmp_path / "kit", make_plan("homlora", (SITE,), config={"rounds": 1})
    local = write_site_file(kit / "local" / "site.toml", tmp_path, SITE).parent
    context, codes = context_of(SITE, local), []
    for _ in range(2):
        executor = executor_of(plan, kit)
        assert decode(ask(executor, context, HELLO)[BODY]).kind == "hello"
        trained = decode(ask(executor, context, encode({"kind": "train", "round": 1}))[BODY])
        codes.append(trained.fields.get("code", trained.kind))
        ask(executor, context, encode({"kind": "finish", "round": 2}))
        assert executor.session is not None
        executor.session.folder.close()
    assert codes == ["update", "finished"]
