# ruff: noqa: RUF001 - this file maps look-alike characters
r"""Normalize mathematical answers: one spelling for equivalent Unicode, spacing, fractions, text, degrees, decoration.

The result is LaTeX with the same meaning: case, brackets, commas, bases and decimals do not change. Two marks are
introduced: `°` for every notation of a degree, and plain `%` for percent.
"""

from __future__ import annotations

import re
import unicodedata

from oblr_megatron.rewards.verifier.tex import FUNCTIONS, braced

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
_SPACES = re.compile(" {2,}")

_MARKERS = ("\\", "*", "`", "'", "nswer", "=", "案")  # `trim` does nothing to a text without these
_GONE = re.compile(
    r"\\(?:text)?color\s*\{[A-Za-z!0-9]*\}|\\[hv]?phantom\s*\{[^{}]*\}|\\(?:begin|end)\s*\{(?:aligned|gathered|split)\}"
    r"|\\(?:tiny|small|normalsize|large|Large|LARGE|huge|Huge|bfseries|mathop|underline|fbox|ensuremath)(?![A-Za-z])"
    r"|\\(?:rm|bf|it)(?=\s*[-0-9\\])|(?<!\{)\\(?:rm|bf|it)(?![A-Za-z])"
)
_BOXED_NUMBER = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_MARKDOWN = re.compile(r"\s*(\*\*|[`'])(.+)\1[.\s]*", re.DOTALL)
_WORDS = r"\s*(?:the\s+)?(?:final\s+)?answer(?:\s+is)?\s*:?\s*"
_BEFORE = re.compile(
    rf"(?:(?:\\text\w*\s*\{{{_WORDS}\}}\s*:?|{_WORDS}|答案(?:是|为)?\s*[:\uff1a]?)(?=.)"
    r"|\s*(?:=|\\(?:therefore|implies|Rightarrow|Longrightarrow)(?![A-Za-z])))+",
    re.IGNORECASE | re.DOTALL,
)
_AFTER = re.compile(r"\s*(?:\\\\|\\(?:checkmark|blacksquare|qed))$")
_GROUP_MARK = re.compile(r"(?<=[0-9])(?:\{,\}|,\s*\\!|\\,|\\!|\\ |~)\s*(?=[0-9]{3}(?![0-9]))")
_TEXT = re.compile(r"\\(?:text(?:rm|bf|it|normal|sf|tt)?|mbox|hbox|emph|operatorname\*?|mathrm)\s*\{")
_UPRIGHT_LETTER = re.compile(r"\\mathrm\s*\{\s*([dei])\s*\}")
_FACE = re.compile(r"\\(?:mathbf|mathit|mathsf|boldsymbol|bm|mathnormal)(?=\{)")
_NAMED_FUNCTION = re.compile(  # sec in \text are seconds
    rf"\\(?:operatorname\*?|(?:text\w*|mbox|mathrm)(?!\s*\{{\s*sec))\s*\{{\s*((?:arc)?c?tg|cosec|{FUNCTIONS})\s*\}}"
)
_BARE_ROOT = re.compile(r"(?<![A-Za-z\\])sqrt(?=\s*[(\[{])")
_ROMAN_SWITCH = re.compile(r"\{\s*\\(?:rm|bf|it)\s+([A-Za-z ]+)\}")
_TEXT_NUMBER = re.compile(r"\\text\{\s*([+-]?[0-9][0-9.,/]*)\s*\}")
_AND_OR_TEXT = re.compile(r"\s*\\text\{\s*,?\s*(?:and|or|或|和)\s*\}\s*")
_SEVERAL = re.compile(r"[,;(\[]|(?<![A-Za-z])(?:and|or)(?![A-Za-z])")  # in a text: a list, a point, an interval
_AND_OR = re.compile(r"(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|[或和]|\\l?or(?![A-Za-z])|\\vee(?![A-Za-z])")
_DEGREE = re.compile(
    r"\^\{\s*(?:\\circ|°)\s*\}|\\degree(?![A-Za-z])"
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
_RENAMED = {
    r"[dtc]frac": r"\\frac", r"[dt]binom": r"\\binom", "leq(?:slant)?": r"\\le", "geq(?:slant)?": r"\\ge",
    "[cd]?dots[bcimo]?": r"\\ldots",
    "neq": r"\\ne", "lt": "<", "gt": ">", "lbrace": r"\\{", "rbrace": r"\\}", "lbrack": "[", "rbrack": "]",
    "[lr]?vert": "|", "infin": r"\\infty", "varnothing": r"\\emptyset", "lg": r"\\log_{10}", "land": r"\\wedge",
    "(?:euro|pounds|yen)": "", "backslash": r"\\setminus", "cdotp": r"\\cdot", "i(?:math)": "i", "space": " ",
    "tg": r"\\tan", "ctg": r"\\cot", "arctg": r"\\arctan", "arcctg": r"\\arccot", "cosec": r"\\csc",
}  # fmt: skip
_RENAMES = [(re.compile(rf"\\{name}(?![A-Za-z])"), new) for name, new in _RENAMED.items()]
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_EXPONENT = re.compile(r"\^\s*([+-]?[0-9]{2,}|[+-][0-9])")  # 10^-19 is read as 10^{-19}, unlike in TeX
_FUNCTION_POWER = re.compile(rf"({FUNCTIONS}\s*\^)\s*([2-9])(?=[1-9])")  # \sin^22x has the power 2, as in TeX
_EMPTY_SET = re.compile(r"\\\{\s*\\\}")
_APART = re.compile(r"(?<=[0-9}])\s*(?:\\q?quad(?![A-Za-z])|\n)\s*(?=[0-9])")  # two numbers, not one
_NOT_EQUAL = re.compile(r"\\not\s*=")
_CURRENCY = re.compile(r"[€£¥₹₽]")


def normalize(text: str) -> str:
    r"""The normalized spelling of an answer.

    Examples: "$\dfrac{1}{2}$." -> r"\frac{1}{2}";  r"10,\!080" -> "10080";  "x² ≤ 4" -> r"x^{2} \le 4";
    r"30^{\circ}" -> "30°";  r"\mbox{ cm}^2" -> r"\text{ cm}^2".
    """
    text = trim(_to_ascii(text))
    if "\\begin" not in text:  # where a line ends between entries, or after the environment's name
        text = _APART.sub(" ; ", text)
    text = _NOT_EQUAL.sub(r"\\ne ", text)
    text = _CURRENCY.sub("", _DELIMITER.sub("", text))
    text = _GROUP_MARK.sub("", text)
    text = _EMPTY_SET.sub(r"\\emptyset", _DROPPED.sub("", text))
    text = _EXPONENT.sub(r"^{\1}", _FUNCTION_POWER.sub(r"\1{\2}", text.replace("**", "^")))
    text = _NAMED_FUNCTION.sub(r"\\\1 ", text)
    for pattern, new in _RENAMES:
        text = pattern.sub(new, text)
    text = _UPRIGHT_LETTER.sub(r"\1", braced(_BARE_ROOT.sub(r"\\sqrt", text)))
    text = _TEXT.sub(r"\\text{", _FACE.sub("", text))
    text = _ROMAN_SWITCH.sub(r"\\text{\1}", text)
    text = _PERCENT.sub("%", _DEGREE.sub("°", text))
    if _is_text(text) and _SEVERAL.search(text):
        text = text[len("\\text{") : text.find("}")].strip()
    text = _AND_OR.sub(" ; ", _AND_OR_TEXT.sub(" ; ", text)) if not _is_text(text) else text
    text = _TEXT_NUMBER.sub(r"\1", _SPACES.sub(" ", _SPACE.sub(" ", text)).strip())
    return _bare(text)


def _to_ascii(text: str) -> str:
    """Translate to ASCII LaTeX where possible; superscripts and subscripts first, because NFKC makes them digits."""
    if text.isascii() and text.isprintable():
        return _SPACES.sub(" ", text)
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda match: f"^{{{match.group().translate(_RAISED)}}}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda match: f"_{{{match.group().translate(_LOWERED)}}}", text)
    text = _OVERLINED.sub(lambda match: f"\\overline{{{match.group().replace(chr(0x305), '')}}}", text)
    text = _VULGAR.sub(_vulgar_fraction, text)
    text = text.replace("∛", r"\sqrt[3]").replace("∜", r"\sqrt[4]")
    text = re.sub(r"√\s*([0-9]+|[A-Za-z])", r"\\sqrt{\1}", text).replace("√", r"\sqrt")
    text = unicodedata.normalize("NFKC", text.translate(_CHARACTERS)).translate(_CHARACTERS)
    kept = (c for c in text if c.isspace() or unicodedata.category(c)[0] != "C")
    text = "".join(" " if c.isspace() and c != "\n" else c for c in kept)
    return _SPACES.sub(" ", text)  # later patterns then never see a long run of spaces


def _vulgar_fraction(match: re.Match[str]) -> str:
    numerator, denominator = unicodedata.normalize("NFKC", match.group()).split("⁄")
    return f" \\frac{{{numerator}}}{{{denominator}}}"


def trim(text: str) -> str:
    r"""Remove decoration around an answer: emphasis, color, size, an announcement, an end mark.

    Examples: "**5**" -> "5"; r"\color{red}{5}" -> "{5}"; "The answer is 5" -> "5"; "= 5" -> "5".
    """
    if not any(marker in text for marker in _MARKERS):
        return text
    if match := _MARKDOWN.fullmatch(text):
        text = match.group(2)
    if "\\" in text:
        text = _AFTER.sub("", _GONE.sub("", _BOXED_NUMBER.sub(r"\1", text)).rstrip())
    match = _BEFORE.match(text)
    return text[match.end() :] if match else text


def compact(text: str) -> str:
    """The text without redundant spaces. Texts with equal compact forms are equal."""
    return re.sub(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])", "", text)


def _is_text(text: str) -> bool:
    return text.startswith("\\text{") and text.find("}") == len(text.rstrip()) - 1


def _bare(text: str) -> str:
    """Remove braces around the whole text and punctuation at its end, but not an ellipsis: its meaning is unknown."""
    while True:
        if text.startswith("{") and _closing_brace(text) == len(text) - 1:
            text = text[1:-1].strip()
        elif text.endswith((".", ",", ";", ":")) and not text.endswith(".."):
            text = text[:-1].rstrip().removesuffix("\\")
        else:
            return text


def _closing_brace(text: str) -> int:
    """Position of the brace that closes the text's first brace; -1 if there is none."""
    depth = 0
    for match in _BRACE.finditer(text):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return match.start()
    return -1
