"""Removed people can neither log in nor go on with a session. In the server's main process; loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvflare.fuel.hci.conn import Connection
from nvflare.fuel.hci.proto import InternalCommands
from nvflare.fuel.hci.server.constants import ConnProps
from nvflare.fuel.hci.server.reg import CommandFilter

from pf2lora.federation.flare.keys import REMOVED_CODE
from pf2lora.federation.protocol.removals import removed


class RemovedPeople(CommandFilter):
    """Comes after FLARE's own filters: who sends a command is known by then. At a login it is whom the certificate must
    name, or it fails."""

    def __init__(self, root: Path, say: Callable[[str], None]) -> None:
        """`root` is the server's kit; `say` gets the name of who is refused."""
        self.root, self.say = root, say

    def pre_command(self, conn: Connection, args: list[str]) -> bool:
        """Whether the command goes on to be executed."""
        login = args[0] == InternalCommands.CERT_LOGIN
        name = " ".join(args[1:]) if login else str(conn.get_prop(ConnProps.USER_NAME) or "")
        if name not in removed(self.root):
            return True
        self.say(name)
        refusal = f"{REMOVED_CODE}: {name} was removed from this federation"
        if login:
            conn.append_string(f"REJECT: {refusal}")
        else:
            conn.append_error(refusal)
        return False


def keep_out(server: Any, people: RemovedPeople) -> None:
    """Have every command of a person pass the filter. FLARE's server gets the part that reads commands only after it
    says that it has started."""
    take = server.set_admin_server

    def with_filter(commands: Any) -> None:
        commands.cmd_reg.add_filter(people)
        take(commands)

    server.set_admin_server = with_filter


def in_place(server: Any, people: RemovedPeople) -> bool:
    """Whether commands do pass the filter. Another version of FLARE may hand them over in another way, and would let
    everybody in without a word."""
    reader = getattr(getattr(server, "admin_server", None), "cmd_reg", None)
    return people in getattr(reader, "filters", ())
