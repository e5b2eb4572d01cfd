"""A start-up kit: what makes a participant who it is, whatever engine it is started with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Kit:
    """A kit of the server, a site or a person. `host` and `port` are how sites reach the server."""

    folder: Path
    name: str
    server: bool
    host: str = ""
    port: int = 0

    @property
    def certificate(self) -> Path:
        """The file of its certificate."""
        return self.folder / "startup" / ("server.crt" if self.server else "client.crt")

    @property
    def key(self) -> Path:
        """The file of its private key."""
        return self.certificate.with_suffix(".key")

    @property
    def root(self) -> Path:
        """The file of the authority's certificate."""
        return self.folder / "startup" / "rootCA.pem"
