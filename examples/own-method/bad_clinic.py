"""Mean against median where one client of four has its labels the wrong way round: `python bad_clinic.py MODEL`."""

import csv
import sys
import tempfile
from pathlib import Path

from median import MedianLoRA

import pf2lora

CLINICS = Path(__file__).resolve().parents[1] / "own-files" / "clinics"
OPPOSITE = {"praise": "complaint", "complaint": "praise"}


def write_bad_clinic(path: Path) -> None:
    """West's comments with the other label."""
    with (CLINICS / "west.csv").open(encoding="utf8") as source, path.open("w", encoding="utf8") as target:
        rows = csv.DictReader(source)
        writer = csv.DictWriter(target, ["text", "label"])
        writer.writeheader()
        writer.writerows({"text": row["text"], "label": OPPOSITE[row["label"]]} for row in rows)


def main(model: str, rounds: int = 10) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bad = Path(folder) / "mistaken.csv"
        write_bad_clinic(bad)
        result = pf2lora.federate(
            model=model,
            clients=[*sorted(CLINICS.glob("*.csv")), bad],
            method=[MedianLoRA, "homlora"],
            rounds=rounds,
            steps=5,
            batch_size=8,
            lr=5e-3,
            max_length=32,
        )
    for method in result.methods:
        per_client = result.served("accuracy", method).per_client
        print(method, {name: f"{score:.0%}" for name, score in per_client.items() if name != "mistaken"})


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
