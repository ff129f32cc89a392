"""Numbers, p-values and the names of metrics as text."""

from math import isnan

MINUS, DASH, PLUS_MINUS = "\u2212", "\u2013", "\u00b1"

_ABBREVIATIONS = {
    "assd": "ASSD", "auc": "AUC", "ece": "ECE", "hd95": "HD95", "iou": "IoU", "npv": "NPV",
    "ppv": "PPV",
}  # fmt: skip
_SECOND = {"dice": "Dice", "iou": "IoU"}
_PROPER = frozenset({"brier", "dice"})  # names of people


def title(metric: str) -> str:
    """Return a metric as a heading, without unit: "Dice" for ``dice``, "HD95" for ``hd95_px``."""
    first, *rest = metric.removesuffix("_px").replace("_", " ").split(" ")
    first = _ABBREVIATIONS.get(first, first[:1].upper() + first[1:])
    return " ".join([first, *(_SECOND.get(word, word) for word in rest)])


def name_in_sentence(metric: str) -> str:
    """Return a metric within a sentence: "Dice", "HD95", but "log loss"."""
    heading = title(metric)
    first = metric.partition("_")[0]
    proper = first in _ABBREVIATIONS or first in _PROPER
    return heading if proper else heading[:1].lower() + heading[1:]


def number(value: float | None, unit: str = "", *, signed: bool = False) -> str:
    """Return a number with sensible digits: three decimals, two if it has a unit.

    Args:
        value: The number; None and NaN become a dash.
        unit: Its unit.
        signed: Whether to write a plus sign too.

    Returns:
        The text. A signed number that rounds to zero keeps its sign.
    """
    if value is None or isnan(value):
        return DASH
    text = f"{value:{'+' if signed else ''}.{2 if unit else 3}f}"
    if not text.strip("+-0.") and not (signed and value):
        text = text.lstrip("+-")
    return text.replace("-", MINUS)


def interval_text(low: float | None, high: float | None, unit: str = "") -> str:
    """Return e.g. "[-0.012, +0.034]" with a typographic minus, or a dash without an interval.

    Args:
        low: The lower end; None or NaN if there is no interval.
        high: The upper end.
        unit: The unit of both.
    """
    if low is None or isnan(low):
        return DASH
    return f"[{number(low, unit, signed=True)}, {number(high, unit, signed=True)}]"


def p_value(p: float | None) -> str:
    """Return a p-value with three decimals or as "< 0.001"; None and NaN become a dash."""
    return "< 0.001" if p is not None and p < 0.001 else number(p)
