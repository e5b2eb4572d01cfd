"""The WebNLG challenge 2017, from the official XML files, also inside their tar archive.

The triples of an entry become a prompt as in the LoRA paper: `subject : property : object | …`. As there, the texts
with the comment "good" are the targets.
"""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from pf2lora.data.client import Pool
from pf2lora.data.settings import DataSettings
from pf2lora.errors import UserError, check_path, one_line, reading, shown
from pf2lora.parsing import read_bytes, xml_root
from pf2lora.tasks.generation.prompts import PromptRow
from pf2lora.tasks.settings import Dataset

PARTS = ("train", "dev", "test")
TEST_FILE = "testdata_with_lex.xml"
LARGEST_XML = 2**27  # bytes; the official files have 9 MB at most


def pool(data: DataSettings, seed: int, notes: list[str]) -> Pool[PromptRow]:
    """Every text of the training set is a row, as in LoRA's training; a test row has all its references. The test
    set's five categories that nobody trains on are left out, as in the paper; `notes` says how many rows they are."""
    if data.data_dir is None:
        raise UserError("--dataset webnlg needs --data-dir, the folder or archive of the official files")
    entries = read_webnlg(data.data_dir, "train", notes)
    train = [PromptRow(row.prompt, (target,), row.group) for row in entries for target in row.targets]
    everything = read_webnlg(data.data_dir, "test", notes)
    seen = {row.group for row in train}
    test = [row for row in everything if row.group in seen]
    if len(test) < len(everything):
        unseen = sorted({row.group for row in everything} - seen)
        notes.append(
            f"WebNLG: {len(everything) - len(test)} test entries of categories that are not in the training set "
            f"({', '.join(unseen)}) are left out"
        )
    return Pool(train, test)


def read_webnlg(path: str | Path, part: str, notes: list[str] | None = None) -> list[PromptRow]:
    """The entries of "train", "dev" or "test", each with all its good texts; `group` is the category."""
    rows: list[PromptRow] = []
    left_out = without = 0
    for name, data in _files(Path(path), part):
        for row, others in _entries(name, data):
            left_out += others
            without += not row.targets
            if row.targets:
                rows.append(row)
    if not rows:
        raise UserError(f"{path}: no entries in the {part} part")
    if left_out and notes is not None:
        entries = f", and with them {without} entries that have no other" if without else ""
        notes.append(
            f"WebNLG: {left_out} {part} texts that are not marked 'good' are left out, as LoRA does{entries}"
        )
    return rows


def _files(path: Path, part: str) -> Iterator[tuple[str, bytes]]:
    """The part's XML files, in the order of their names, from a folder or an archive (in it)."""
    with reading(check_path(path), "file or folder"):
        if not path.exists():
            raise FileNotFoundError
        is_folder = path.is_dir()
    if is_folder:
        found = sorted(p for p in path.rglob("*.xml") if _belongs(p.relative_to(path), part))
        if found:
            yield from ((str(p), read_bytes(p, LARGEST_XML)) for p in found)
            return
        archives = sorted(p for p in path.glob("*.tar*") if p.is_file())
        if not archives:
            raise UserError(f"{path}: no WebNLG {part} files (XML, or an archive of them) in this folder")
        path = archives[0]
    try:
        with tarfile.open(path) as archive:
            members = [m for m in archive.getmembers() if m.isfile() and _belongs(Path(m.name), part)]
            for member in sorted(members, key=lambda m: m.name):
                content = archive.extractfile(member)
                assert content is not None  # a regular file
                if member.size > LARGEST_XML:  # as unpacked: a small archive can hold a large file
                    raise UserError(f"{path}/{member.name}: larger than {LARGEST_XML >> 20} MiB")
                yield f"{path}/{member.name}", content.read(LARGEST_XML)
    except (
        tarfile.TarError,
        EOFError,
        OSError,
        ValueError,
        LookupError,
        zlib.error,
        lzma.LZMAError,
    ) as error:
        raise UserError(f"{path}: not a readable tar archive ({one_line(error)[:200]})") from None


def _belongs(file: Path, part: str) -> bool:
    if file.suffix != ".xml":
        return False
    return file.name == TEST_FILE if part == "test" else part in file.parts


def _entries(name: str, data: bytes) -> Iterator[tuple[PromptRow, int]]:
    """The entries of a file, each with the number of its texts that are not good."""
    for number, entry in enumerate(xml_root(data, name).iter("entry"), 1):
        where = f"{name}, entry {entry.get('eid') or number}"
        category = entry.get("category")
        triples = [
            _triple(element.text or "", where) for element in entry.iterfind("modifiedtripleset/mtriple")
        ]
        if not category or not triples:
            raise UserError(f"{where}: no {'category' if not category else 'modifiedtripleset'}")
        texts = entry.findall("lex")
        good = tuple(t.text or "" for t in texts if t.get("comment") == "good")
        if not all(map(str.strip, good)):
            raise UserError(f"{where}: an empty text")
        yield PromptRow(linearise(triples), good, category), len(texts) - len(good)


def _triple(text: str, where: str) -> tuple[str, str, str]:
    parts = [part.strip() for part in text.split(" | ")]
    if len(parts) != 3:
        raise UserError(f"{where}: {shown(text)} is not a triple like 'subject | property | object'")
    return parts[0], parts[1], parts[2]


def linearise(triples: list[tuple[str, str, str]]) -> str:
    """As LoRA's conversion of the WebNLG data does."""
    return " | ".join(" : ".join(triple) for triple in triples)


# Clients by category, the same categories in training and test.
DATASETS = {"webnlg": Dataset("WebNLG", pool, partition="even-groups", metric="webnlg")}
