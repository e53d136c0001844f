r"""One spelling for what mathematical answers write in several ways: Unicode, spacing, fractions, text, degrees.

The result is still LaTeX. Meaning is kept: case, brackets, commas, bases and decimals stay as they are. Two marks are
introduced: `°` for every way to write a degree, and plain `%` for percent.
"""

from __future__ import annotations

import re
import unicodedata

_SYMBOLS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "×": r"\times ", "⋅": r"\cdot ", "·": r"\cdot ", "•": r"\cdot ",
    "∗": "*", "÷": "/", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ",
    "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ", "∓": r"\mp ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "⟨": r"\langle ", "⟩": r"\rangle ", "、": ",", "。": ".", "≈": r"\approx ",
    "∠": r"\angle ", "∑": r"\sum ", "∏": r"\prod ", "∫": r"\int ", "⌊": r"\lfloor ", "⌋": r"\rfloor ",
    "⌈": r"\lceil ", "⌉": r"\rceil ", "’": "'", "′": "'", "…": r"\ldots ", "∨": r"\lor ", "∖": r"\setminus ",
}  # fmt: skip
_GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "θ": "theta", "λ": "lambda", "μ": "mu",
    "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau", "φ": "phi", "ϕ": "phi", "ω": "omega", "Δ": "Delta", "Ω": "Omega",
}  # fmt: skip
_CHARACTERS = str.maketrans(_SYMBOLS | {letter: f"\\{name} " for letter, name in _GREEK.items()})
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_VULGAR = re.compile("[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞⅐⅑⅒]")

_GROUP_MARK = re.compile(r"(?<=[0-9])(?:\{,\}|,\s*\\!|\\,|\\!|\\ |~)\s*(?=[0-9]{3}(?![0-9]))")
_TEXT = re.compile(r"\\(?:text(?:rm|bf|it|normal|sf|tt)?|mbox|hbox|emph|operatorname\*?)\s*\{")
_UPRIGHT_LETTER = re.compile(r"\\mathrm\s*\{\s*([dei])\s*\}")
_UPRIGHT = re.compile(r"\\mathrm\s*\{")
_FACE = re.compile(r"\\(?:mathbf|mathit|mathsf|boldsymbol|bm|mathnormal)\s*(?=\{)")
_ROMAN_SWITCH = re.compile(r"\{?\\(?:rm|bf|it)\s+([A-Za-z ]+)\}?")
_TEXT_NUMBER = re.compile(r"\\text\{\s*([+-]?[0-9][0-9.,/]*)\s*\}")
_AND_OR_TEXT = re.compile(r"\s*\\text\{\s*,?\s*(?:and|or)\s*\}\s*")
_AND_OR = re.compile(r"(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|\\l?or(?![A-Za-z])|\\vee(?![A-Za-z])")
_DEGREE = re.compile(
    r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])|\^\s*\{?\s*°\s*\}?"
    r"|\\text\{\s*deg(?:rees?)?\.?\s*\}|(?<![A-Za-z\\])deg(?:rees?)?(?![A-Za-z])"
)
_PERCENT = re.compile(r"\\%|\\text\{\s*(?:percent|\\?%)\s*\}|(?<![A-Za-z\\])percent(?![A-Za-z])")
_DELIMITER = re.compile(r"(?<!\\)\\[()\[\]]|(?<!\\)\\\$|\$")
_DROPPED = re.compile(
    r"\\(?:left|right|middle)\s*\."
    r"|\\(?:left|right|middle|[bB]igg?[lrm]?|displaystyle|textstyle|scriptstyle|limits|nolimits|boxed|thinspace|strut"
    r"|mathstrut|hfill)(?![A-Za-z])|\\!|(?<!\\)\\[,;:>]"
)
_SPACE = re.compile(r"\\(?:quad|qquad|enspace)(?![A-Za-z])|(?<!\\)\\ |~|\s")
_SPACES = re.compile(" {2,}")
_RENAMED = {
    r"[dtc]frac": r"\\frac", r"[dt]binom": r"\\binom", "leq(?:slant)?": r"\\le", "geq(?:slant)?": r"\\ge",
    "neq": r"\\ne", "lt": "<", "gt": ">", "lbrace": r"\\{", "rbrace": r"\\}", "lbrack": "[", "rbrack": "]",
    "[lr]?vert": "|", "infin": r"\\infty", "varnothing": r"\\emptyset", "lg": r"\\log_{10}", "land": r"\\wedge",
    "(?:euro|pounds|yen)": "", "backslash": r"\\setminus", "cdotp": r"\\cdot", "i(?:math)": "i", "space": " ",
}  # fmt: skip
_RENAMES = [(re.compile(rf"\\{name}(?![A-Za-z])"), new) for name, new in _RENAMED.items()]
_CURRENCY = re.compile(r"[€£¥₹₽]")


def normalize(text: str) -> str:
    r"""The canonical spelling of an answer.

    Examples: "$\dfrac{1}{2}$." -> r"\frac{1}{2}";  r"10,\!080" -> "10080";  "x² ≤ 4" -> r"x^{2} \le 4";
    r"30^{\circ}" -> "30°";  r"\mbox{ cm}^2" -> r"\text{ cm}^2".
    """
    text = _unicode(text)
    text = _CURRENCY.sub("", _DELIMITER.sub("", text))
    text = _GROUP_MARK.sub("", text)
    text = _DROPPED.sub("", text)
    for pattern, new in _RENAMES:
        text = pattern.sub(new, text)
    text = _UPRIGHT_LETTER.sub(r"\1", text)
    text = _UPRIGHT.sub(r"\\text{", _TEXT.sub(r"\\text{", _FACE.sub("", text)))
    text = _ROMAN_SWITCH.sub(r"\\text{\1}", text)
    text = _PERCENT.sub("%", _DEGREE.sub("°", text))
    text = _AND_OR.sub(" ; ", _AND_OR_TEXT.sub(" ; ", text)) if not _is_text(text) else text
    text = _TEXT_NUMBER.sub(r"\1", _SPACES.sub(" ", _SPACE.sub(" ", text)).strip())
    return _without_trailing_marks(text)


def compact(text: str) -> str:
    """Without the spaces that separate nothing: two texts with the same compact form say the same."""
    return re.sub(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])", "", text)


def _unicode(text: str) -> str:
    """ASCII LaTeX where there is one; raised and lowered digits first, since NFKC would flatten them."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda match: f"^{{{match.group().translate(_RAISED)}}}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda match: f"_{{{match.group().translate(_LOWERED)}}}", text)
    text = _VULGAR.sub(_vulgar_fraction, text)
    text = re.sub(r"√\s*([0-9]+|[A-Za-z])", r"\\sqrt{\1}", text).replace("√", r"\sqrt")
    text = unicodedata.normalize("NFKC", text.translate(_CHARACTERS)).translate(_CHARACTERS)
    text = "".join(" " if c.isspace() else c for c in text if c.isspace() or unicodedata.category(c)[0] != "C")
    return _SPACES.sub(" ", text)  # first of all, so that no later pattern meets a long run of spaces


def _vulgar_fraction(match: re.Match[str]) -> str:
    numerator, denominator = unicodedata.normalize("NFKC", match.group()).split("⁄")
    return f" \\frac{{{numerator}}}{{{denominator}}}"


def _is_text(text: str) -> bool:
    return text.startswith("\\text{") and text.find("}") == len(text.rstrip()) - 1


def _without_trailing_marks(text: str) -> str:
    """Drop sentence marks at the end; an ellipsis stays, since what it stands for is not written."""
    if text.endswith(".."):
        return text
    while text and text[-1] in ".,;:" and not text.endswith("\\"):
        text = text[:-1].rstrip()
    return text.removesuffix("\\")
