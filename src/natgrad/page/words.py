"""Numbers and names as the page writes them: three significant digits, thin spaces, nothing that breaks markup."""

from __future__ import annotations

import math
import re

THIN = "\N{THIN SPACE}"
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float | None) -> str:
    """``0.0123``, ``12.3``, ``12 345``, ``1.23 × 10⁻⁷``; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    size = abs(value)
    if not 9.995e-5 <= size < 1e7:
        digits, exponent = f"{value:.2e}".split("e")
        return _minus(f"{digits}{THIN}×{THIN}") + power(int(exponent))
    if size >= 99.95:
        return _minus(grouped(round(value)))
    places = max(0, 2 - math.floor(math.log10(float(f"{size:.2e}"))))
    return _minus(f"{value:.{places}f}")


def power(exponent: int) -> str:
    """``10⁻³``."""
    return f"10{str(exponent).translate(_RAISED)}"


def setting(value: object) -> str:
    """As it was set: ``0.1``, ``3e-05``."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def grouped(value: int) -> str:
    """``12 345``."""
    return f"{value:,}".replace(",", THIN)


def percent(share: float) -> str:
    """``99.8 %``; never 100 % for what is not all."""
    text = f"{100 * share:.3g}"
    return f"{'99.9' if share < 1 and text == '100' else text}{THIN}%"


def counted(count: int, thing: str) -> str:
    """``1 run``, ``3 runs``."""
    return f"{grouped(count)} {thing}{'' if count == 1 else 's'}"


def shortened(text: str, limit: int) -> str:
    """The text, or its beginning and its end: what tells names apart tends to stand there."""
    if len(text) <= limit:
        return text
    end = (limit - 1) // 2
    return f"{text[: limit - 1 - end].rstrip()}…{text[len(text) - end :].lstrip()}"


def together(text: str) -> str:
    """Without line breaks between numbers and their units."""
    return re.sub(r"(?<=\d) (?=(?:%|ms|s|min|h|times|updates|[KMG]iB)(?:\W|$))", "\N{NO-BREAK SPACE}", text)


def in_figure(text: str) -> str:
    """For Plotly, which reads tags, entities, formulas and templates in every text."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return text.replace("$", "&#36;").replace("%{", "&#37;{")


def _minus(text: str) -> str:
    return text.replace("-", "−")
