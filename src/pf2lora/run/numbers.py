"""Numbers as people read them."""

from __future__ import annotations

from pf2lora.tasks.settings import Metric

MINUS = "−"  # a true minus, as wide as the plus it stands under


def score(value: float | None, metric: Metric, signed: bool = False, digits: int | None = None) -> str:
    """A score with two decimals in per cent, or three on its own scale, or `digits` of them."""
    if value is None:
        return "–"
    if digits is None:
        digits = 2 if metric.percent else 3
    shown = f"{value * (100 if metric.percent else 1):{'+' if signed else ''}.{digits}f}"
    return shown.replace("-", MINUS)


def scaled(value: float, units: tuple[str, ...], base: int = 1000) -> str:
    """Three figures and the largest unit that leaves at least one before the point."""
    for unit in units[:-1]:
        if abs(value) < base * 0.9995:
            return f"{value:.3g} {unit}".strip()
        value /= base
    return f"{value:,.3g} {units[-1]}" if value < base else f"{value:,.0f} {units[-1]}"


def size(value: float | None) -> str:
    return "–" if value is None else scaled(value, ("B", "kB", "MB", "GB", "TB"))


def count(value: float | None) -> str:
    """Whole below ten thousand, then in thousands and millions."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) < 10_000 else scaled(value, ("", "k", "M", "G"))


def flops(value: float | None) -> str:
    if value is None:
        return "not counted"
    return scaled(value, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def short_duration(seconds: float) -> str:
    """A duration for a narrow table: `95 s`, `12 min`, `3.1 h`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 99.5 * 60 else f"{seconds / 3600:.1f} h"


def listed(names: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]])) if names else ""
