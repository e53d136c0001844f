"""Tasks of the package reasoning-gym. Nobody here wrote them: questions, gold answers and scores are the package's own.

    name                   question                                                        answer     score
    gym_basic_arithmetic   Calculate 10 + 5 - 9.                                           6          0 or 1 *
    gym_gcd                Find the Greatest Common Divisor (GCD) of ...: 36, 60. ...      12         0 or 1 *
    gym_lcm                Find the Least Common Multiple (LCM) of ...: 3, 9, 9, 4         36         0 or 1 *
    gym_spell_backward     Spell this word backward (example: sun -> nus): opsonin         ninospo    share of letters
    gym_caesar_cipher      Decrypt this Caesar cipher text: DPRQJ. ...                     AMONG      0 or 1 *
    gym_letter_counting    How many times does the letter "i" appear in ...: "one with"?   1          0 or 1 *
    gym_number_sequence    6, 15, 30, 54, 93, ?                                            156        0 or 1 *

    * a response that contains the answer has the score: length of the answer / length of the response

The package is imported when rows are drawn or a response is scored.
"""

from __future__ import annotations

import random
import string
from functools import cache
from typing import Any

from oblr_megatron.extras.gym.reward import make_task
from studies.tasks.base import Row, Skill, Task

SKILLS: dict[Skill, float] = {"low": 0.1, "middle": 0.35, "high": 0.7}
INDICES = 2**31  # an item of a task is a function of seed + index
CLASSES = (string.digits, string.ascii_lowercase, string.ascii_uppercase)


def _gym_task(
    name: str,
    characters: str,
    *,
    max_positions: int,
    max_response_tokens: int,
    skills: dict[Skill, float] = SKILLS,
    **options: Any,
) -> Task:
    """The package's task `name`.

    Args:
        name: as in the package.
        characters: of all questions and answers; repeated ones count once.
        max_positions: longest question and response together, in characters.
        max_response_tokens: including the end token.
        skills: see `Task`.
        options: of the package's config class for this task.
    """

    def draw(generator: random.Random) -> Row:
        entry = _dataset(name, **options)[generator.randrange(INDICES)]
        return Row(entry["question"], entry["answer"])

    def reward(response: str, answer: str) -> float:
        return float(_dataset(name, **options).score_answer(response, {"answer": answer}))

    def teach(row: Row, generator: random.Random, share_right: float) -> str:
        if generator.random() < share_right:
            return row.answer
        other = draw(generator).answer
        return other if other != row.answer and generator.random() < 0.5 else misspelt(row.answer, generator)

    return Task(
        name=f"gym_{name}",
        module=__name__,
        characters="".join(sorted(set(characters))),
        max_response_tokens=max_response_tokens,
        max_positions=max_positions,
        skills=skills,
        draw=draw,
        reward=reward,
        teach=teach,
    )


@cache
def _made(name: str, options: tuple[tuple[str, Any], ...]) -> Any:
    return make_task(name, dict(options), where=f"task gym_{name}")


def _dataset(name: str, **options: Any) -> Any:
    """The package's data set of a task; item i is a function of i alone."""
    return _made(name, tuple(options.items()))


def misspelt(answer: str, generator: random.Random) -> str:
    """The answer with one digit or letter replaced by another of its kind. Example: "-22" -> "-72"."""
    kinds = {place: kind for place, letter in enumerate(answer) for kind in CLASSES if letter in kind}
    place = generator.choice(list(kinds))
    return answer[:place] + generator.choice(kinds[place].replace(answer[place], "")) + answer[place + 1 :]


GYM = (
    _gym_task(
        "basic_arithmetic",
        "Calculate +-. 0123456789",
        max_positions=64,
        max_response_tokens=5,
        min_terms=3,
        max_terms=4,
        max_digits=1,
        operators=("+", "-"),
        allow_parentheses=False,
    ),
    _gym_task(
        "gcd",
        "Find the Greatest Common Divisor (GCD) of these numbers: Give only the GCD as your final answer., 0123456789",
        max_positions=128,
        max_response_tokens=4,
        max_value=100,
    ),
    _gym_task(
        "lcm",
        "Find the Least Common Multiple (LCM) of these numbers:, 0123456789",
        max_positions=96,
        max_response_tokens=6,
        min_numbers=4,
        max_numbers=4,
        max_value=9,
    ),
    _gym_task(
        "spell_backward",
        "Spell this word backward (example: sun -> nus): " + string.ascii_letters,
        max_positions=96,
        max_response_tokens=9,
        skills={"low": 0.1, "middle": 0.5, "high": 0.7},
        min_word_len=4,
        max_word_len=7,
    ),
    _gym_task(
        "caesar_cipher",
        "Decrypt this Caesar cipher text:. Provide only the decrypted text as your final answer."
        + string.ascii_uppercase
        + "Ë",
        max_positions=128,
        max_response_tokens=19,
        delimiter=" ",
        min_words=1,
        max_words=1,
        max_rotation=3,
    ),
    _gym_task(
        "letter_counting",
        'How many times does the letter "e" appear in the text: "?"' + string.ascii_letters + string.digits + "àë",
        max_positions=128,
        max_response_tokens=4,
        min_words=2,
        max_words=5,
    ),
    _gym_task(
        "number_sequence",
        ", ?- 0123456789",
        max_positions=64,
        max_response_tokens=6,
        max_terms=5,
        max_complexity=1,
    ),
)
