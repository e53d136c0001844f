"""The reward "overlong": DAPO's soft overlong punishment (arXiv 2503.14476, equation 13).

With |y| the tokens of a response (its end-of-sequence token included), L = rollout.max_response_tokens and
B = reward.overlong_buffer_tokens:

    0                    |y| <= L - B
    ((L - B) - |y|) / B  L - B < |y| <= L
    -1                   L < |y|

A response truncated at the limit has |y| = L and gets -1 from the second line; so does one that ends with its L-th
token. The third line applies if an evaluation samples longer responses than training. Typical values of B are L/10 to
L/5 (the paper: B = 4096, L = 20480); B = L punishes every token.
"""

from __future__ import annotations

from oblr_megatron.errors import UserError


def punishment(length: int, max_tokens: int, buffer_tokens: int) -> float:
    """The equation above. Examples, L = 100 and B = 20: 80 tokens -> 0.0; 85 -> -0.25; 100 -> -1.0; 130 -> -1.0."""
    return min(max((max_tokens - buffer_tokens) - length, -buffer_tokens), 0) / buffer_tokens


def check_overlong(max_tokens: int, buffer_tokens: int) -> None:
    """Check reward.overlong_buffer_tokens.

    Raises:
        UserError: it is not between 1 and `max_tokens`.
    """
    if not 1 <= buffer_tokens <= max_tokens:
        raise UserError(
            f"overlong_buffer_tokens {buffer_tokens} is not between 1 and rollout.max_response_tokens {max_tokens}, "
            'as the reward "overlong" needs',
            where="config: reward.overlong_buffer_tokens",
            fix=f"set it to a fraction of rollout.max_response_tokens, e.g. {max(max_tokens // 5, 1)}",
        )
