"""Start-up kits: one folder per participant with its certificate and its hardened policies.

A kit's `startup/` is signed and FLARE's; its `local/` is the site's own: what classes a job may name, what may leave,
who may do what. Nothing in a job can change it.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pf2lora import atomic
from pf2lora.errors import UserError, unknown
from pf2lora.federation import require_nvflare
from pf2lora.federation.flare.kit_texts import write_texts
from pf2lora.federation.protocol.names import check_name, check_sites
from pf2lora.federation.protocol.policy import POLICY_FILE, Policy, to_toml
from pf2lora.run.config import read_toml

SCOPE = "pf2lora"
SITE_CLASSES = ["pf2lora.federation.flare.executor.SiteExecutor"]
SERVER_CLASSES = ["pf2lora.federation.flare.controller.FederationController"]
HEARTBEAT_TIMEOUT = 60  # seconds of silence after which a site counts as gone
INSIDE = "comm_config.json"  # in everybody's `local/`: how FLARE's processes talk, on a machine and across
SITE_LIST = "sites.json"  # in the server's `local/`: who was provisioned, or signed
SILENCE = (
    20  # seconds without a byte after which a site asks once more: FLARE's 300 are lost when a link is cut
)

# A connection is given up when a ping was not answered: what TCP still holds it would send again only when a time as
# long as the cut has passed. And a new one is tried every few seconds.
PINGS = {
    "grpc.keepalive_time_ms": 8000,
    "grpc.keepalive_timeout_ms": 7000,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.http2.min_recv_ping_interval_without_data_ms": 4000,
    "grpc.min_reconnect_backoff_ms": 4000,
    "grpc.max_reconnect_backoff_ms": 4000,
    "grpc.max_send_message_length": -1,  # any
    "grpc.max_receive_message_length": -1,
}


@dataclass(frozen=True)
class Project:
    """Who is in a federation. `host` is how sites reach the server: a name or an address."""

    name: str
    host: str
    sites: tuple[str, ...]
    port: int = 8002
    lead: str = "lead@pf2lora.local"
    members: tuple[str, ...] = ()  # may look, not act

    def __post_init__(self) -> None:
        check_name("project", self.name)
        check_sites(self.sites)
        if not self.sites:
            raise UserError('the project names no sites: sites = ["clinic-a", "clinic-b"]')
        if not 0 < self.port < 65536:
            raise UserError(f"port is {self.port}; it lies between 1 and 65535")
        for person in (self.lead, *self.members):
            if "@" not in person:
                raise UserError(f"{person!r} is no name of a person here: use an e-mail address")


def read_project(path: Path) -> Project:
    """A project file, checked."""
    values = read_toml(path)
    known = Project.__dataclass_fields__
    for key in values:
        if key not in known:
            raise UserError(f"{path}: {unknown('key', key, known)}")
    for key in ("name", "host", "sites"):
        if key not in values:
            raise UserError(f"{path}: {key} is missing (a project has name, host and sites)")
    for key in ("sites", "members"):
        if not isinstance(values.get(key, []), list):
            raise UserError(f"{path}: {key} must be a list of names")
    for key in ("sites", "members"):
        values[key] = tuple(values.get(key, ()))
    return Project(**values)


def make_kits(project: Path, out: Path) -> dict[str, Path]:
    """The kits of a project file."""
    return provision(read_project(project), out)


def provision(project: Project, out: Path) -> dict[str, Path]:
    """Make the kits in `out/`: server, each site, each person. The root key goes to `out/authority/` (keep it safe)."""
    require_nvflare()
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{str(out)!r} is not empty; kits go into a new folder")
    out.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        made = build(project, Path(scratch))
        kits: dict[str, Path] = {}
        for name in ("server", *project.sites, project.lead, *project.members):
            kits[name] = out / name
            shutil.move(made / name, kits[name])
        shutil.move(made.parent / "state", out / "authority")
    harden_server(kits["server"])
    atomic.write_json(kits["server"] / "local" / SITE_LIST, list(project.sites))
    for site in project.sites:
        harden_site(kits[site])
    for kit in kits.values():
        write_texts(kit)
    for path in out.rglob("*"):
        if path.is_dir():
            path.chmod(0o700)
        elif path.suffix == ".key" or path.parent.name == "authority":
            path.chmod(0o600)
    return kits


def build(project: Project, folder: Path) -> Path:
    """FLARE's own provisioning: certificates, signatures, start-up files."""
    import contextlib
    import io

    from nvflare.lighter.constants import CtxKey
    from nvflare.lighter.entity import Participant
    from nvflare.lighter.entity import Project as FlareProject
    from nvflare.lighter.impl.cert import CertBuilder
    from nvflare.lighter.impl.signature import SignatureBuilder
    from nvflare.lighter.impl.static_file import StaticFileBuilder
    from nvflare.lighter.impl.workspace import WorkspaceBuilder
    from nvflare.lighter.provisioner import Provisioner

    organisation = {"org": "pf2lora"}
    server = {"fed_learn_port": project.port, "admin_port": project.port, "default_host": project.host}
    people = [(project.lead, "lead"), *((name, "member") for name in project.members)]
    participants = [
        Participant("server", "server", props=server, **organisation),
        *(
            Participant("client", s, props={"allow_log_streaming": False}, **organisation)
            for s in project.sites
        ),
        *(Participant("admin", name, props={"role": role}, **organisation) for name, role in people),
    ]
    builders = [
        WorkspaceBuilder(["master_template.yml"]),
        StaticFileBuilder(config_folder="config", scheme="grpc"),
        CertBuilder(),
        SignatureBuilder(),
    ]
    described = FlareProject(project.name, "pf2lora", participants=participants)
    chatter = io.StringIO()
    with contextlib.redirect_stdout(chatter), contextlib.redirect_stderr(chatter):
        context = Provisioner(str(folder), builders).provision(described)
    if context.get(CtxKey.BUILD_ERROR):
        raise UserError(f"the kits could not be made: {chatter.getvalue().strip().splitlines()[-1]}")
    return Path(context[CtxKey.CURRENT_PROD_DIR])


def harden_site(kit: Path) -> None:
    """The site's policies: our executor and nothing else, no code in jobs, nothing out but what is declared."""
    atomic.write_json(
        kit / "local" / "resources.json",
        {
            "format_version": 2,
            "class_list_enforcement_mode": "enforce",
            "class_allow_list": SITE_CLASSES,
            "allow_log_streaming": False,
            "client": {"retry_timeout": 30, "compression": "None", "communication_timeout": SILENCE},
            "components": [
                component("resource_manager", f"{RESOURCES}.resource_managers.{MANAGER}"),
                component("resource_consumer", f"{RESOURCES}.resource_consumers.{CONSUMER}"),
                component("process_launcher", "pf2lora.federation.flare.launcher.RestartingLauncher"),
            ],
        },
    )
    allow_list = {"path": "pf2lora.federation.flare.executor.AllowListFilter", "args": {}}
    atomic.write_json(
        kit / "local" / "privacy.json",
        {"scopes": [{"name": SCOPE, "task_result_filters": [allow_list]}], "default_scope": SCOPE},
    )
    atomic.write_text(kit / "local" / POLICY_FILE, to_toml(Policy()))
    harden_everyone(kit, view="none")


def harden_server(kit: Path) -> None:
    """The server's policies: our controller and nothing else, its stores inside the kit."""
    store = {"path": "pf2lora.federation.flare.stores.SnapshotStore", "args": {}}
    atomic.write_json(
        kit / "local" / "resources.json",
        {
            "format_version": 2,
            "class_list_enforcement_mode": "enforce",
            "class_allow_list": SERVER_CLASSES,
            "servers": [
                {
                    "admin_storage": "transfer",
                    "max_num_clients": 1000,
                    "heart_beat_timeout": HEARTBEAT_TIMEOUT,
                    "admin_timeout": 10.0,
                }
            ],
            "snapshot_persistor": {
                "path": "nvflare.app_common.state_persistors.storage_state_persistor.StorageStatePersistor",
                "args": {"uri_root": "/", "storage": store},
            },
            "components": [
                # First: it continues a run before the scheduler hears that its job ended, and looks for another.
                component("run_resumer", "pf2lora.federation.flare.resumer.RunResumer"),
                component(
                    "job_scheduler",
                    "nvflare.app_common.job_schedulers.job_scheduler.DefaultJobScheduler",
                    {
                        "max_jobs": 1,
                        "min_schedule_interval": 1.0,
                        "max_schedule_interval": 10.0,
                        "max_schedule_count": 10000,  # never: `JobStore` counts no further than its tries matter
                    },
                ),
                component("job_manager", "pf2lora.federation.flare.stores.JobStore"),
                component("job_store", "nvflare.app_common.storages.filesystem_storage.FilesystemStorage"),
                component(
                    "process_launcher",
                    "nvflare.app_common.job_launcher.server_process_launcher.ServerProcessJobLauncher",
                ),
            ],
        },
    )
    harden_everyone(kit, view="any")


def harden_everyone(kit: Path, view: str) -> None:
    """Who may do what: a lead runs jobs without code; a member looks; nobody gets a shell on anybody's machine.

    `view` is what people may see of this machine: the server's state, and of a site nothing, errors included. Between
    a participant's own processes, too, both ends show the kit's certificate: FLARE's default is open to all users of
    the machine.
    """
    inside = {"host": "localhost", "connection_security": "mtls"}
    atomic.write_json(
        kit / "local" / INSIDE,
        {
            "allow_adhoc_conns": False,
            "internal": {"scheme": "tcp", "resources": inside},
            "grpc": {"options": list(PINGS.items())},
        },
    )
    nothing = dict.fromkeys(("submit_job", "clone_job", "manage_job", "download_job", "operate"), "none")
    never = dict.fromkeys(("shell_commands", "byoc", "server-predeployed-flwr"), "none")
    lead = {
        "submit_job": "any",
        "clone_job": "n:submitter",
        "manage_job": "n:submitter",
        "download_job": "n:submitter",
    }
    atomic.write_json(
        kit / "local" / "authorization.json",
        {
            "format_version": "1.0",
            "permissions": {
                "project_admin": nothing | never | {"view": view},
                "org_admin": nothing | never | {"view": view},
                "lead": lead | never | {"view": view, "operate": "none"},
                "member": nothing | never | {"view": view},
            },
        },
    )


RESOURCES = "nvflare.app_common"
MANAGER = "passthrough_resource_manager.PassthroughResourceManager"
CONSUMER = "passthrough_resource_consumer.PassthroughResourceConsumer"


def component(name: str, path: str, args: dict[str, Any] | None = None) -> dict[str, Any]:
    """A component as FLARE's resource files name it: its id, its class and the class's arguments."""
    return {"id": name, "path": path, "args": args or {}}
