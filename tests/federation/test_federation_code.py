"""A server that skips its own check sends code along with a job: a site's kit refuses it by itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from small_federation import make_plan

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")

from pf2lora.federation.flare.admin import write_job
from pf2lora.federation.flare.provision import SCOPE, Project, provision
from pf2lora.federation.protocol.signed_plan import SignedPlan

SITE = "site-1"
DEPLOY = """
import json, sys
from argparse import Namespace
from pathlib import Path

from nvflare.apis.fl_constant import SiteType
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace
from nvflare.fuel.utils.zip_utils import zip_directory_to_bytes
from nvflare.private.fed.app.fl_conf import FLClientStarterConfiger, create_privacy_manager
from nvflare.private.fed.utils.app_deployer import AppDeployer
from nvflare.private.fed.utils.fed_utils import security_init
from nvflare.private.privacy_manager import PrivacyService

kit, app, meta = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
settings = ["secure_train=true", "org=pf2lora", "config_folder=config", "uid=site-1"]
args = Namespace(workspace=kit, fed_client="fed_client.json", set=settings, local_rank=0, job_id=None,
                 log_config=None, client_config="config/config_fed_client.json", env="", train_config="")
workspace = Workspace(kit, "site-1", "config")
conf = FLClientStarterConfiger(workspace=workspace, args=args, kv_list=args.set)
conf.configure()
security_init(secure_train=conf.base_deployer.secure_train, site_org=conf.site_org, workspace=workspace,
              app_validator=conf.app_validator, site_type=SiteType.CLIENT)
PrivacyService.initialize(create_privacy_manager(workspace, names_only=True))
data = zip_directory_to_bytes(app, "")
said = AppDeployer().deploy(workspace, "job-1", meta, "app", data, FLContext())
print("SAID", json.dumps([said, (Path(kit) / "job-1").exists()]))
"""
"""What FLARE's client does with a job that arrives, from its kit on (`client_train.py`, `ClientEngine.deploy_app`)."""


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kits") / "made"
    return provision(Project("trial", "localhost", (SITE,), port=18230), root)[SITE]


def deployed(kit: Path, app: Path, role: str) -> tuple[str | None, bool]:
    """What the site says to a job, submitted (says the server) by somebody of this role; and whether any of it lies in
    the kit afterwards."""
    submitter = {"submitter_name": "x@pf2lora.local", "submitter_org": "pf2lora", "submitter_role": role}
    meta = json.dumps({"name": "trial", "scope": SCOPE} | submitter)
    done = subprocess.run(
        [sys.executable, "-c", DEPLOY, kit, app, meta], capture_output=True, text=True, check=False, cwd=kit
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("SAID ")]
    assert lines, done.stdout + done.stderr
    said, left = json.loads(lines[-1].removeprefix("SAID "))
    return said, left


@pytest.mark.parametrize("role", ["lead", "project_admin", "anything"])
def test_a_site_takes_no_code_whatever_the_server_says_of_who_sent_it(
    role: str, kit: Path, tmp_path: Path
) -> None:
    plan = make_plan("homlora", (SITE,))
    app = write_job(plan, SignedPlan(plan.to_json()), tmp_path) / "app"
    (app / "custom").mkdir()
    (app / "custom" / "evil.py").write_text("")
    assert deployed(kit, app, role) == ("BYOC not permitted", False)


def test_a_job_without_code_is_taken(kit: Path, tmp_path: Path) -> None:
    plan = make_plan("homlora", (SITE,))
    app = write_job(plan, SignedPlan(plan.to_json()), tmp_path) / "app"
    assert deployed(kit, app, "lead") == (None, True)
