"""The server's checkpoint: one file a round with the common adapter, the method's own tensors and what is known of the
sites; beside it the common adapter of the round in which it was best. What its rounds were is in `records.py`: a
checkpoint is as large after a thousand as after one."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from pf2lora import atomic
from pf2lora.errors import UserError, one_line
from pf2lora.federation.protocol.buffers import pieces
from pf2lora.federation.protocol.checkpoints import writing
from pf2lora.parsing import BadJSON, parse_json, read_tensors
from pf2lora.run.decode import decode

KEPT = "kept."  # what the names of the method's own tensors begin with
COMMON, HELD = "common", "held"
FILES, BEST = "round-*.safetensors", "best-*.safetensors"


@dataclass(frozen=True)
class Knowledge:
    """What a checkpoint holds beside tensors. `facts` are what each site said of itself, but for the `layout` of its
    adapter: all sites have the same."""

    done: int
    ranks: dict[str, int | None]
    layout: list[Any]
    facts: dict[str, dict[str, Any]]
    time: float

    @classmethod
    def of(cls, done: int, ranks: dict[str, int | None], sites: Mapping[str, Mapping[str, Any]]) -> Knowledge:
        """Of what `sites` said, now."""
        layout: list[Any] = next((said["layout"] for said in sites.values()), [])
        facts = {site: {k: v for k, v in said.items() if k != "layout"} for site, said in sites.items()}
        return cls(done, ranks, layout, facts, time.time())

    @property
    def sites(self) -> dict[str, dict[str, Any]]:
        """All that each site said of itself."""
        return {site: said | {"layout": self.layout} for site, said in self.facts.items()}


def write(
    folder: Path, knowledge: Knowledge, common: Tensor | None, kept: list[Tensor], held: Tensor | None = None
) -> None:
    """All or nothing; the file of the round before stays until the next one is whole."""
    tensors = {f"{KEPT}{i}": tensor for i, tensor in enumerate(kept)}
    tensors |= {COMMON: common} if common is not None else {}
    tensors |= {HELD: held} if held is not None else {}
    with writing(folder):
        path = folder / f"round-{knowledge.done:06d}.safetensors"
        atomic.write_pieces(path, pieces(tensors, {"server": json.dumps(asdict(knowledge))}))
    for old in sorted(folder.glob(FILES))[:-2]:
        old.unlink(missing_ok=True)


def newest(folder: Path) -> Path | None:
    """The file of the last finished round, if there is one."""
    return max(folder.glob(FILES), default=None)


def read(path: Path) -> tuple[Knowledge, Tensor | None, list[Tensor], Tensor | None]:
    """What `write` wrote: knowledge, the common adapter, the method's own tensors, what sites hold of it."""
    tensors, header = read_tensors(path)
    common, held = tensors.pop(COMMON, None), tensors.pop(HELD, None)
    try:
        knowledge = decode(Knowledge, parse_json(header["server"]), str(path))
        kept = [tensors[f"{KEPT}{i}"] for i in range(len(tensors))]
    except (BadJSON, KeyError, UserError) as error:
        raise damaged(path, error) from None
    return knowledge, common, kept, held


class Best(NamedTuple):
    """The round in which what all sites share was best, and the middle of their validation losses with it."""

    round: int
    loss: float


def write_best(folder: Path, best: Best, common: Tensor) -> None:
    """All or nothing; two before it stay, for a server that goes back by two rounds."""
    with writing(folder):
        path = folder / f"best-{best.round:06d}.safetensors"
        atomic.write_pieces(path, pieces({COMMON: common}, {"loss": best.loss.hex()}))
    for old in best_files(folder)[:-3]:
        old.unlink(missing_ok=True)


def best_files(folder: Path) -> list[Path]:
    """Oldest first; each was better than all before."""
    return sorted((path for path in folder.glob(BEST) if round_of(path)), key=round_of)


def best_file(folder: Path, done: int) -> Path | None:
    """That of the best round by what sites told in the first `done` rounds, each of the round before."""
    return next((path for path in reversed(best_files(folder)) if round_of(path) < done), None)


def forget_later(folder: Path, done: int) -> None:
    """What sites told in rounds that the server lost is told again, and may then be something else."""
    with writing(folder):
        for path in best_files(folder):
            if round_of(path) >= done:
                path.unlink(missing_ok=True)


def read_best(path: Path) -> tuple[Best, Tensor]:
    """What `write_best` wrote."""
    tensors, header = read_tensors(path)
    try:
        return Best(round_of(path), float.fromhex(header["loss"])), tensors[COMMON]
    except (KeyError, ValueError) as error:
        raise damaged(path, error) from None


def round_of(path: Path) -> int:
    """The round that a file's name has; 0 where it has none."""
    number = re.fullmatch(r"[a-z]+-([0-9]{6,15})", path.stem)
    return int(number[1]) if number else 0


def damaged(path: Path, error: Exception) -> UserError:
    """For a checkpoint that cannot be used, whatever it was that said so."""
    return UserError(f"{path}: damaged ({one_line(error)}); remove it to go on with the round before")


def facts_of(knowledge: Knowledge, path: Path) -> Mapping[str, Any]:
    """What one of the sites said of itself: all of them have the same adapter."""
    for facts in knowledge.sites.values():
        return facts
    raise damaged(path, ValueError("it knows no site"))
