r"""Responses in the forms of the wild, and the decision for each by docs/verifier.md.

`source` is the thread or file that shows the form. More spellings of answers: hard_cases.py.
"""

from __future__ import annotations

import pytest

from oblr_megatron.rewards.math import settle
from oblr_megatron.rewards.verifier.extract import EXTRACTIONS
from oblr_megatron.rewards.verifier.symbolic import score

MATH_VERIFY = "huggingface/Math-Verify tests/test_all.py"
VERL = "volcengine/verl verl/utils/reward_score"


@pytest.mark.parametrize(
    ("source", "reward", "response", "gold", "expected"),
    [
        (f"{VERL}/gsm8k.py", "math:gsm8k", "2+3=5\n#### 5", "5", True),
        (f"{VERL}/gsm8k.py", "math:gsm8k", "#### $1,234", "1234", True),
        (f"{VERL}/gsm8k.py", "math", "2+3=5\n#### 5", "5", False),
        (f"{VERL}/math_dapo.py", "math:last_line", "Step 1 ...\nAnswer: $\\frac{1}{2}$", "0.5", True),
        (f"{VERL}/math_dapo.py", "math", "Answer: 5", "5", False),
        (MATH_VERIFY, "math", r"Thus $x-p=\boxed{2-2p}$.", "$2-2p$", True),
        (MATH_VERIFY, "math", "\\boxed{\n\\begin{pmatrix} 0 & 3 \\\\ 0 & -1 \\end{pmatrix}\n}.\n\\end{align*}",
         r"\begin{pmatrix}0&3\\0&-1\end{pmatrix}", True),
        (MATH_VERIFY, "math", "\\boxed{\\begin{pmatrix}\n1 & 2 \\\\\n3 & 4\n\\end{pmatrix}}",
         r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", True),
        (MATH_VERIFY, "math", "\\boxed{\\left[\\begin{array}{c}\n1 \\\\\n2\n\\end{array}\\right]}",
         r"\begin{bmatrix}1\\2\end{bmatrix}", True),
        (MATH_VERIFY, "math", r"a total loss of $\boxed{28\%}$", r"28 \%", True),
        (MATH_VERIFY, "math", r"$\boxed{28}$ pct", r"$28\%$", True),
        (MATH_VERIFY, "math", r"\boxed{28 pct}", r"$28\%$", True),
        (MATH_VERIFY, "math", r"\boxed{28 percentage}", r"$28\%$", True),
        (MATH_VERIFY, "math", r"Therefore, $\boxed{14{,}916}$ is our answer.", "14916", True),
        (MATH_VERIFY, "math", r"between $\boxed{12\text{ and }13}$", "12, 13", True),
        (MATH_VERIFY, "math", r"$\boxed{\left( 3, \frac{\pi}{2} \right)}$", r"$(3, \frac{\pi}{2})$", True),
        (MATH_VERIFY, "math", r"$\boxed{\text{Evelyn}}$ is our answer", r"$\text{Evelyn}$", True),
        (MATH_VERIFY, "math", r"$\boxed{90^\circ}$", r"$90^\circ$", True),
        (MATH_VERIFY, "math", r"\boxed{[0,1)}", "$[0,9)$", False),
        (MATH_VERIFY, "math", r"\boxed{1 000}", "1000", True),
        (MATH_VERIFY, "math", r"\boxed{1000.0}", "1000", True),
        (MATH_VERIFY, "math", r"\boxed{1,000.99€}", "1000.99", True),
        (MATH_VERIFY, "math", r"\boxed{k = \frac{1}{3}}", "1/3", True),
        (MATH_VERIFY, "math", r"\boxed{\frac13 \textbf{meters}}", "$1/3$", True),
        (MATH_VERIFY, "math", r"\boxed{28/100}", "28", False),
        (MATH_VERIFY, "math", r"$\boxed{11,\! 111,\! 111,\! 100}$", "11111111100", True),
        (MATH_VERIFY, "math", r"is $\boxed{32, 349}$", "32349", False),
        (MATH_VERIFY, "math", r"$x \in \boxed{(2,12) \cup (12,102)}$", r"(2, 12) \cup (12, 102)", True),
        (MATH_VERIFY, "math", r"$\boxed{\text{(C)}}.$", r"\text{C}", True),
        (MATH_VERIFY, "math", r"\boxed{1112122_3}", "$1112112_3$", False),
        (f"{MATH_VERIFY}, the last box counts", "math", r"$\boxed{1}\boxed{2}$", "1,2", False),
        (f"{MATH_VERIFY}, a box is required", "math", "The final answer is 16386.16.", "16386.16", False),
        (f"{MATH_VERIFY}, m may be a variable", "math", r"\boxed{1,000.99m²}", "1000.99", False),
        (f"{MATH_VERIFY}, a decimal comma is a list", "math", r"\boxed{1000,99}", "1000.99", False),
    ],
)  # fmt: skip
def test_decisions(source: str, reward: str, response: str, gold: str, expected: bool) -> None:
    answer = EXTRACTIONS[reward](response)
    settled = False if answer is None else settle(answer, gold)
    decided = bool(score(answer, gold)) if settled is None and answer is not None else settled
    assert decided is expected, source
