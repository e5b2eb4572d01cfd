"""What an engine of a federation must do for the rest of pf2lora, and the one door to the engine that there is.

The protocol's two halves (`protocol/`) know no engine: it carries their messages between machines, with certificates,
roles and a store of runs. NVIDIA FLARE is behind it, in `flare/`, whose modules nobody else imports. `flare/front.py`
has a function for each that is named here; mypy holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pf2lora.federation.kit import Kit
    from pf2lora.federation.protocol.checkup import Check
    from pf2lora.federation.protocol.plan import Plan
    from pf2lora.federation.protocol.policy import Policy
    from pf2lora.run.config import Config
    from pf2lora.run.result import Result


class Engine(Protocol):
    """A module with these functions. Errors of users, of the network and of rights are UserErrors."""

    # --- who takes part: kits and keys ----------------------------------------------------------------------

    def make_kits(self, project: Path, out: Path) -> dict[str, Path]:
        """Everybody's kits and keys at once, by name; the root key goes to `out/authority/`."""

    def make_authority(self, project: Path, out: Path, days: int) -> str:
        """A root key that signs requests; its certificate's fingerprint."""

    def make_request(self, name: str, kind: str, project: str, out: Path) -> Path:
        """A private key, which stays in `out`, and the request for its certificate, which is sent."""

    def sign(self, request: Path, authority: Path, out: Path, days: int) -> str:
        """At the authority: sign a request of somebody whom its project names; their name."""

    def make_kit(self, signed: Path, request: Path, fingerprint: str, out: Path) -> Path:
        """The kit of a signed request; one that is in `out` already is renewed."""

    def remove(self, kit: Path, name: str, *, back: bool = False) -> None:
        """Refuse a site or a person from now on, whatever their certificate says; or (`back`) no longer."""

    # --- a participant, on its own machine ------------------------------------------------------------------

    def read_kit(self, folder: Path) -> Kit:
        """A kit as it is: whose, and whether the server's."""

    def open_kit(self, folder: Path) -> Kit:
        """A kit that can be started: complete, in date, its key its owner's."""

    def certificate_ends(self, kit: Kit) -> datetime:
        """When the first of a kit's certificates ends."""

    def expiry_warning(self, kit: Kit) -> str | None:
        """A line about a certificate that ends soon."""

    def in_foreground(
        self, kit: Kit, meanwhile: Callable[[], None] = ..., log: IO[bytes] | None = None
    ) -> int:
        """Join: run a participant until it ends or Ctrl-C; its exit code. A server goes on with unfinished runs."""

    def leave(self, kit: Kit) -> None:
        """End the participant that runs from a kit, whoever started it."""

    def examined(self, folder: Path, plan: Plan | None, *, of_run: bool = False) -> Iterator[Check]:
        """What could keep a participant from taking part, check by check."""

    # --- the lead, from anywhere ----------------------------------------------------------------------------

    def submit(self, kit: Path, plan: Plan) -> str:
        """Sign a plan and hand it to the server; the job's id."""

    def runs(self, kit: Path) -> list[dict[str, Any]]:
        """Every job, newest first, with its run's status under `pf2lora`."""

    def follow(self, kit: Path, name: str) -> Iterator[dict[str, Any]]:
        """The newest job of a run, every few seconds until the run is over."""

    def stop_run(self, kit: Path, name: str) -> list[str]:
        """Stop a run; the ids of the jobs that were going on."""

    def resume_run(self, kit: Path, name: str) -> str:
        """Go on with a run, as it was submitted and signed; the job's id."""

    def fetch(self, kit: Path, name: str, into: Path) -> Path:
        """Download what the server hands out of a finished run; its folder in `into`."""

    # --- all of it on one machine ---------------------------------------------------------------------------

    def rehearse(
        self,
        config: Config,
        out: Path,
        *,
        options: dict[str, Any],
        force: bool,
        tell: Callable[[str], None],
        policy: Policy | None = None,
        per_site: int = 1,
    ) -> Result:
        """Run `config` in a federation of its clients, with kits of its own, and leave a normal run folder."""


def engine() -> Engine:
    """The engine, or one line that says how to get it; it is loaded when it is asked for."""
    from pf2lora.federation import require_nvflare

    require_nvflare()
    from pf2lora.federation.flare import front

    return front
