# ruff: noqa: RUF001 - this file maps look-alike characters
"""Unicode mathematics -> ASCII LaTeX: signs, Greek, superscripts, subscripts, vulgar fractions, look-alikes."""

from __future__ import annotations

import re
import unicodedata

_SYMBOLS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "×": r"\times ", "⋅": r"\cdot ", "·": r"\cdot ", "•": r"\cdot ",
    "∗": "*", "÷": "/", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ",
    "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ", "∓": r"\mp ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "⟨": r"\langle ", "⟩": r"\rangle ", "、": ",", "。": ".", "≈": r"\approx ",
    "º": "°", "˚": "°", "⁄": "/", "∕": "/", "∠": r"\angle ",
    "∑": r"\sum ", "∏": r"\prod ", "∫": r"\int ", "⌊": r"\lfloor ", "⌋": r"\rfloor ",
    "⌈": r"\lceil ", "⌉": r"\rceil ", "’": "'", "′": "'", "…": r"\ldots ", "∨": r"\lor ", "∖": r"\setminus ",
}  # fmt: skip
_GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "θ": "theta", "λ": "lambda", "μ": "mu",
    "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau", "φ": "phi", "ϕ": "phi", "ω": "omega", "Δ": "Delta", "Ω": "Omega",
}  # fmt: skip
_CHARACTERS = str.maketrans(_SYMBOLS | {letter: f"\\{name} " for letter, name in _GREEK.items()})
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_OVERLINED = re.compile("((?:[0-9]\u0305)+)")
_VULGAR = re.compile("[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞⅐⅑⅒]")

SPACES = re.compile(" {2,}")


def to_ascii(text: str) -> str:
    """Translate to ASCII LaTeX where possible; superscripts and subscripts first, because NFKC makes them digits."""
    if text.isascii() and text.isprintable():
        return SPACES.sub(" ", text)
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda match: f"^{{{match.group().translate(_RAISED)}}}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda match: f"_{{{match.group().translate(_LOWERED)}}}", text)
    text = _OVERLINED.sub(lambda match: f"\\overline{{{match.group().replace(chr(0x305), '')}}}", text)
    text = _VULGAR.sub(_vulgar_fraction, text)
    text = text.replace("∛", r"\sqrt[3]").replace("∜", r"\sqrt[4]")
    text = re.sub(r"√\s*([0-9]+|[A-Za-z])", r"\\sqrt{\1}", text).replace("√", r"\sqrt")
    text = unicodedata.normalize("NFKC", text.translate(_CHARACTERS)).translate(_CHARACTERS)
    kept = (c for c in text if c.isspace() or unicodedata.category(c)[0] != "C")
    text = "".join(" " if c.isspace() and c != "\n" else c for c in kept)
    return SPACES.sub(" ", text)  # later patterns then never see a long run of spaces


def _vulgar_fraction(match: re.Match[str]) -> str:
    numerator, denominator = unicodedata.normalize("NFKC", match.group()).split("⁄")
    return f" \\frac{{{numerator}}}{{{denominator}}}"
