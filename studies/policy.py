"""A tiny Qwen3 in one process: sampling, log-probs, per-response score rows and gradients.

The model is transformers' Qwen3 with torch's RMSNorm, so that fp64 stays fp64. The score of every response is a row
of S [N, P]. With S in memory, norms, gradients under any baseline, fold gradients and covariances are matrix products.
This works for 10^5 parameters and a few hundred responses. For larger models see `oblr_megatron/norms`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, Qwen3ForCausalLM

PAD, END, UNKNOWN = 0, 1, 2
FIRST_CHARACTER = 3
ROWS_AT_ONCE = 128  # token score rows in memory at once: 40 MB


@dataclass(frozen=True, slots=True)
class Drawn:
    """One response. Example: Drawn(prompt=(7, 13, 8), tokens=(4, 1), logprobs=(-0.2, -0.01))."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]  # including the end token, if it was reached
    logprobs: tuple[float, ...]  # log-probs of the tokens under the sampling distribution


class ToyPolicy:
    """The model, with its parameters also as one vector [P].

    Args:
        model: changed in place: its RMSNorms become torch's.
        characters: the task's alphabet; token FIRST_CHARACTER + i stands for characters[i].
        temperature: divides the logits, in sampling and in scores.
    """

    def __init__(self, model: Qwen3ForCausalLM, characters: str, *, temperature: float = 1.0) -> None:
        self.model = use_torch_rms_norm(model).eval()
        self.characters, self.temperature = characters, temperature
        self._token_of = {character: FIRST_CHARACTER + place for place, character in enumerate(characters)}
        self.parameters = list(model.parameters())
        ends = torch.tensor([p.numel() for p in self.parameters]).cumsum(0).tolist()
        self._slices = {id(p): slice(end - p.numel(), end) for p, end in zip(self.parameters, ends, strict=True)}
        self.num_parameters = int(ends[-1])

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text, one per character."""
        return tuple(map(self._token_of.__getitem__, text))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text up to the end token. Special tokens become blanks."""
        text = tokens[: tokens.index(END)] if END in tokens else tokens
        return "".join(self.characters[t - FIRST_CHARACTER] if t >= FIRST_CHARACTER else " " for t in text)

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[tuple[int, ...]], max_tokens: int, generator: torch.Generator | None, *, copies: int = 1
    ) -> list[Drawn]:
        """Sample responses, prompt-major. The prompts are computed once, whatever `copies` is.

        Args:
            prompts: token ids, of any lengths.
            max_tokens: largest response length, including the end token.
            generator: None decodes greedily.
            copies: responses to each prompt.
        """
        width = max(map(len, prompts))
        ids = torch.tensor([[PAD] * (width - len(prompt)) + list(prompt) for prompt in prompts])  # [b, t]
        attended = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        cache, feed = DynamicCache(config=self.model.config), ids
        drawn_from = [prompt for prompt in prompts for _ in range(copies)]
        tokens: list[Tensor] = []
        logprobs, ended = [], torch.zeros(len(drawn_from), dtype=torch.bool)
        for _ in range(max_tokens):
            output = self.model(
                input_ids=feed, attention_mask=attended, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            scaled = (output.logits[:, -1] / self.temperature).log_softmax(-1)  # [b, V]
            if not tokens and copies > 1:
                cache.batch_repeat_interleave(copies)
                scaled, attended = (each.repeat_interleave(copies, 0) for each in (scaled, attended))
            feed = (
                scaled.argmax(-1, keepdim=True)
                if generator is None
                else torch.multinomial(scaled.exp(), 1, generator=generator)
            )
            tokens.append(feed)
            logprobs.append(scaled.gather(1, feed))
            ended |= feed[:, 0] == END
            if ended.all():
                break
            attended = torch.cat([attended, torch.ones_like(feed)], 1)
        return [
            Drawn(prompt, tuple(row[:length]), tuple(scores[:length]))
            for prompt, row, scores in zip(
                drawn_from, torch.cat(tokens, 1).tolist(), torch.cat(logprobs, 1).tolist(), strict=True
            )
            for length in [row.index(END) + 1 if END in row else len(row)]
        ]

    def logits(self, samples: Sequence[Drawn]) -> tuple[Tensor, Tensor, Tensor]:
        """Scaled logits [b, T, V] at the response tokens, the tokens [b, T], and the mask of real tokens [b, T].

        T is the longest response. Responses are aligned at their first token.
        """
        longest = max(len(each.tokens) for each in samples)
        width = max(len(each.prompt) for each in samples) + longest
        ids = torch.full((len(samples), width), PAD)
        at = torch.zeros(len(samples), longest, dtype=torch.long)  # position of the logits that predict each token
        tokens, mask = torch.zeros_like(at), torch.zeros_like(at, dtype=torch.bool)
        for row, each in enumerate(samples):
            start, length = len(each.prompt), len(each.tokens)
            ids[row, : start + length] = torch.tensor(each.prompt + each.tokens)
            at[row] = torch.arange(start - 1, start - 1 + longest)
            tokens[row, :length] = torch.tensor(each.tokens)
            mask[row, :length] = True
        logits = self.model(input_ids=ids).logits  # right padding: causal attention never sees it
        at = at.clamp(max=width - 1)[..., None].expand(-1, -1, logits.shape[-1])
        return logits.gather(1, at) / self.temperature, tokens, mask

    def logprobs(self, samples: Sequence[Drawn]) -> tuple[Tensor, Tensor]:
        """log pi of the response tokens [b, T] (0 past the end) and their mask [b, T]."""
        logits, tokens, mask = self.logits(samples)
        return own_logprobs(logits, tokens, mask), mask

    def scores(self, samples: Sequence[Drawn], weights: Tensor | None = None) -> Tensor:
        """S [N, P]: row n is the gradient of sum_t v_t log pi(o_t) of sample n; v is 1 or `weights` [N, T]."""
        return self.scored(samples, weights)[0]

    def scored(self, samples: Sequence[Drawn], weights: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`scores` and the three results of `logits`, detached, from one forward pass."""
        rows = torch.zeros(len(samples), self.num_parameters, dtype=self.model.dtype)
        with self._captured(rows):
            logits, tokens, mask = self.logits(samples)
            logprobs = own_logprobs(logits, tokens, mask)
            (logprobs if weights is None else logprobs * weights.to(logprobs.dtype)).sum().backward()
        for parameter in self.parameters:
            parameter.grad = None
        return rows, logits.detach(), tokens, mask

    def gradient(self, samples: Sequence[Drawn], coefficients: Tensor) -> Tensor:
        """[P]: the gradient of sum_n sum_t c_{n,t} log pi(o_{n,t}); coefficients are [N] or [N, T]."""
        logprobs, _ = self.logprobs(samples)
        weights = coefficients if coefficients.dim() == 2 else coefficients[:, None]
        total = (weights.to(logprobs.dtype) * logprobs).sum()
        return torch.cat([grad.flatten() for grad in torch.autograd.grad(total, self.parameters)])

    def vector(self) -> Tensor:
        """A copy of all parameters, [P]."""
        return torch.cat([parameter.detach().flatten() for parameter in self.parameters])

    @torch.no_grad()
    def assign(self, vector: Tensor) -> None:
        """Set all parameters from [P]."""
        for parameter in self.parameters:
            parameter.copy_(vector[self._slices[id(parameter)]].view_as(parameter))

    def set_gradient(self, vector: Tensor) -> None:
        """Set the parameters' `grad` from [P], for an optimizer."""
        for parameter in self.parameters:
            parameter.grad = vector[self._slices[id(parameter)]].view_as(parameter)

    @contextmanager
    def _captured(self, rows: Tensor) -> Iterator[None]:
        """Inside this context a backward pass adds each sample's own gradient to its row."""
        handles = [
            module.register_forward_hook(self._hook(rows))
            for module in self.model.modules()
            if isinstance(module, (nn.Linear, nn.Embedding, nn.RMSNorm))
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, rows: Tensor) -> Any:
        def forward(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            weight = cast(Tensor, module.weight)
            own, x = rows[:, self._slices[id(weight)]], inputs[0].detach()
            output.register_hook(lambda dy: _add_own_gradient(own.view(len(rows), *weight.shape), module, x, dy))

        return forward


def _add_own_gradient(own: Tensor, module: nn.Module, x: Tensor, dy: Tensor) -> None:
    """own [b, *weight] += each sample's contribution to the weight's gradient, from x and dy [b, t, ...]."""
    if isinstance(module, nn.Linear):
        own.add_(torch.bmm(dy.transpose(1, 2), x))
    elif isinstance(module, nn.Embedding):
        one_hot = functional.one_hot(x, module.num_embeddings).to(dy.dtype)  # [b, t, V]
        own.add_(torch.bmm(one_hot.transpose(1, 2), dy))
    else:
        assert isinstance(module, nn.RMSNorm)
        normed = functional.rms_norm(x, (x.shape[-1],), eps=module.eps)
        own.add_((dy * normed).flatten(1, -2).sum(1))


def token_products(policy: ToyPolicy, samples: Sequence[Drawn], longest: int) -> Tensor:
    """<s_it, s_ju>: [n, T, n, T] fp32. Equal responses are computed once."""
    distinct = list({sample.tokens: sample for sample in samples}.values())
    slots = {sample.tokens: position for position, sample in enumerate(distinct)}
    which = torch.tensor([slots[sample.tokens] for sample in samples])
    tokens = [(sample, place) for sample in distinct for place in range(len(sample.tokens))]
    scores = torch.cat(
        [_token_scores(policy, tokens[at : at + ROWS_AT_ONCE]) for at in range(0, len(tokens), ROWS_AT_ONCE)]
    )
    at = torch.tensor([slots[sample.tokens] * longest + place for sample, place in tokens])
    whole = torch.zeros(len(distinct) * longest, len(distinct) * longest)
    whole[at[:, None], at] = scores @ scores.T
    whole = whole.view(len(distinct), longest, len(distinct), longest)
    return whole[which][:, :, which]


def _token_scores(policy: ToyPolicy, tokens: Sequence[tuple[Drawn, int]]) -> Tensor:
    """Score rows [k, P], one per (sample, token position)."""
    samples = [sample for sample, _ in tokens]
    weights = torch.zeros(len(tokens), max(len(sample.tokens) for sample in samples))
    weights[range(len(tokens)), [place for _, place in tokens]] = 1.0
    return policy.scores(samples, weights)


def own_logprobs(logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """log pi of the tokens [b, T]; 0 past the end."""
    return logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1).masked_fill(~mask, 0.0)


def use_torch_rms_norm(model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """Replace transformers' RMSNorm, which always computes in fp32, by torch's."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ == "Qwen3RMSNorm":
                weight = cast(nn.Parameter, child.weight)
                norm = nn.RMSNorm(weight.shape, eps=cast(float, child.variance_epsilon))
                norm.weight = weight
                setattr(parent, name, norm)
    return model
