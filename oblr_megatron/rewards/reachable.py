r"""Gold answers that no response can equal: the reward of their prompts would be 0 for ever. Imports no torch.

    doubts([("gsm8k.jsonl", prompts)], config.reward, tokenizer, max_tokens=512)
    # gsm8k.jsonl: 7,473 of 7,473 golds that no response equals; line 1 is a whole solution: '... #### 72'. Fix: ...

A gold is tried as the answer of a response. This decides for rewards that compare with the gold; a user's function or
service may read it in its own way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Set
from typing import TYPE_CHECKING

from oblr_megatron.rewards.math import settle
from oblr_megatron.rewards.registry import one_line
from oblr_megatron.rewards.verifier.extract import EXTRACTIONS, after_hashes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oblr_megatron.config.reward import RewardConfig
    from oblr_megatron.errors import Problem
    from oblr_megatron.types import Prompt

SHOWN = 60  # characters of the example
LONG = 200  # characters; a longer text with the mark of an answer is a solution, and one without equals itself
BARE = "give the bare answer in data.answer_column"
NO_BOX = "no response can have a \\boxed{...}: the tokenizer lacks its characters"
_SOLUTION = re.compile(r"\S\s*(?:####|\\boxed(?![A-Za-z]))")  # the mark of an answer, after other text
_LIST = re.compile(r"\[\s*([\"']).*\1\s*\]", re.DOTALL)


def doubts(
    sets: Iterable[tuple[str, Iterable[Prompt]]],
    reward: RewardConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int,
) -> Iterator[str]:
    """One line for each set that has such golds: their number, the first one and its remedy.

    Args:
        sets: names and prompts.
        reward: the section `reward`; its main reward decides.
        tokenizer: of the responses.
        max_tokens: of a response.
    """
    if reward.name not in ("exact_match", *EXTRACTIONS):
        return
    if reward.name == "math" and not _writes("\\boxed{1}", tokenizer):
        yield f'{NO_BOX}. Fix: set reward.name to "exact_match"'
        return
    for name, prompts in sets:
        golds = list(prompts)
        characters = set().union(*(gold.answer for gold in golds))
        lost = {one for one in characters if not (one.isspace() or _writes(one, tokenizer))}
        problems = [(gold, _problem(gold, reward.name, tokenizer, lost, max_tokens)) for gold in golds]
        hits = [(gold, problem) for gold, problem in problems if problem is not None]
        if hits:
            first, (kind, fix) = hits[0]
            text = one_line(first.answer)
            shown = text if len(text) <= SHOWN else f"... {text[-SHOWN:]}"
            count = f"{len(hits):,} of {len(golds):,} golds that no response equals"
            yield f"{name}: {count}; line {first.row + 1} is {kind}: {shown!r}. Fix: {fix}"


def _problem(
    prompt: Prompt, reward: str, tokenizer: PreTrainedTokenizerBase, lost: Set[str], max_tokens: int
) -> Problem | None:
    """Why no response equals the gold of a prompt; None if the gold itself is a right answer.

    `lost` are characters that the tokenizer does not write alone.
    """
    gold, extract = prompt.answer, EXTRACTIONS.get(reward)
    if _SOLUTION.search(gold):
        answer = after_hashes(gold)
        if answer is not None and (extract is None or len(gold) > LONG or settle(answer, gold) is not True):
            convention = "gsm8k" if "####" in gold else "math"
            return (
                "a whole solution",
                f'set the convention of its source to "{convention}" (eval: --data {convention}=PATH)',
            )
    if extract is not None:
        if _LIST.fullmatch(gold):
            return "a list as text", BARE
        answer = extract(f"\\boxed{{{one_line(gold)}}}")
        if answer is None or (len(gold) <= LONG and settle(answer, gold, prompt.tolerance) is False):
            return "no answer to the verifier", BARE
    elif not lost.isdisjoint(gold) and not _writes(gold, tokenizer):
        return "not a text of the tokenizer", "use a tokenizer with its characters, or leave the row out"
    if len(gold.encode()) > max_tokens and len(tokenizer.encode(gold, add_special_tokens=False)) > max_tokens:
        return f"longer than {max_tokens} tokens", "raise rollout.max_response_tokens, or leave the row out"
    return None


def _writes(text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer gives a text back, apart from spaces."""
    written = str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)))
    return "".join(text.split()) in "".join(written.split())
