"""The E2E NLG Challenge, from the official csv files or the zip they come in.

A meaning representation becomes a prompt as in the LoRA paper's files: `name : Blue Spice | Type : coffee shop`.
The targets are the official texts as they stand; LoRA's are the same with spaces around punctuation.
"""

from __future__ import annotations

import csv
import io
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from pf2lora.data.client import Pool
from pf2lora.data.settings import DataSettings
from pf2lora.errors import UserError, check_path, listed, one_line, reading, shown
from pf2lora.parsing import read_text
from pf2lora.tasks.generation.prompts import PromptRow, grouped
from pf2lora.tasks.settings import Dataset

TRAIN, TEST = "trainset.csv", "testset_w_refs.csv"
ZIP = "e2e-dataset.zip"
LARGEST_CSV = 2**27  # bytes; the official files have 9 MB at most
_NAMES = {"eatType": "Type", "priceRange": "price", "familyFriendly": "family friendly"}
_SLOT = r"([^,\[\]]+)\[([^\]]+)\]"
_MEANING = re.compile(rf"{_SLOT}(, {_SLOT})*")


def pool(data: DataSettings, seed: int, notes: list[str]) -> Pool[PromptRow]:
    """Every reference of the training set is a row, as in LoRA's training; a test row has all its references."""
    if data.data_dir is None:
        raise UserError("--dataset e2e needs --data-dir, the folder or archive of the official files")
    return Pool(read_e2e(data.data_dir, TRAIN), grouped(read_e2e(data.data_dir, TEST)))


def read_e2e(path: str | Path, file: str) -> list[PromptRow]:
    """One of the official files: in a folder, in a zip, or in a zip in a folder. A row per reference."""
    name, text = _find(Path(path), file)
    rows = list(_rows(name, text))
    if not rows:
        raise UserError(f"{name}: no rows in this file")
    return rows


def _find(path: Path, file: str) -> tuple[str, str]:
    """The file's name for messages, and its text."""
    with reading(check_path(path), "file or folder"):
        if path.is_dir():
            for place in (path, path / "e2e-dataset"):
                if (place / file).is_file():
                    return str(place / file), read_text(place / file, LARGEST_CSV)
            path = path / ZIP
        if not path.is_file():
            raise UserError(f"{path.parent if path.name == ZIP else path}: neither {file} nor {ZIP} is there")
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.namelist():
                if Path(member).name == file:
                    with archive.open(member) as content:
                        data = content.read(
                            LARGEST_CSV + 1
                        )  # what is unpacked is bounded, whatever the zip says
                    if len(data) > LARGEST_CSV:
                        raise UserError(f"{path}/{member}: larger than {LARGEST_CSV >> 20} MiB")
                    return f"{path}/{member}", data.decode("utf-8-sig")
    except UserError:
        raise
    except Exception as error:  # the bytes are foreign: whatever unpacking raises, they are no such zip
        raise UserError(f"{path}: not a readable zip of csv files ({one_line(error)[:200]})") from None
    raise UserError(f"{path}: no {file} in this zip")


def _rows(name: str, text: str) -> Iterator[PromptRow]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        reader.fieldnames  # noqa: B018  read with the first line
    except csv.Error as error:
        raise UserError(f"{name}, line 1: broken csv ({error})") from None
    if not {"mr", "ref"} <= set(reader.fieldnames or ()):
        raise UserError(f"{name}: no columns 'mr' and 'ref' (columns: {listed(reader.fieldnames or ())})")
    line = 2  # where the row begins; a quoted field may run over several lines
    try:
        for fields in reader:
            meaning, target = fields["mr"] or "", fields["ref"] or ""
            if not target.strip():
                raise UserError(f"{name}, line {line}: empty target in column 'ref'")
            slots = parse_meaning(meaning)
            if slots is None or "name" not in slots:
                example = "name[Blue Spice], eatType[pub]"
                raise UserError(
                    f"{name}, line {line}: {shown(meaning)} is no meaning representation like {example!r}"
                )
            yield PromptRow(linearise(slots), (target,), slots["name"])
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{name}, line {line}: broken csv ({error})") from None


def parse_meaning(meaning: str) -> dict[str, str] | None:
    """{"name": "Blue Spice", "eatType": "pub"} from `name[Blue Spice], eatType[pub]`."""
    if not _MEANING.fullmatch(meaning):
        return None
    return {name.strip(): value for name, value in re.findall(_SLOT, meaning)}


def linearise(slots: dict[str, str]) -> str:
    """As in LoRA's files, which have spaces around £ and - in values."""
    spaced = {name: " ".join(re.sub(r"([£-])", r" \1 ", value).split()) for name, value in slots.items()}
    return " | ".join(f"{_NAMES.get(name, name)} : {value}" for name, value in spaced.items())


# Clients by restaurant name; the names in a client's test rows are among those of its training rows.
DATASETS = {"e2e": Dataset("E2E", pool, partition="even-groups", metric="e2e")}
