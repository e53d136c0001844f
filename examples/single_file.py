"""OBLR-PO in one file: plain PyTorch, one process, nothing imported from oblr_megatron.

    python examples/single_file.py          # one to three minutes on one CPU core; accuracy 49% -> 95%

A small Qwen3 learns two-digit sums. Supervised learning on answers of mixed quality warms it up. Then each step does:

    1. sample     G responses o_i to each of Q prompts, with rewards r_i
    2. norms      w_i = ||grad log pi(o_i)||^2, exact: one backward pass for each response
    3. baseline   b_i = sum_{j != i} w_j r_j / sum_{j != i} w_j        (arXiv 2511.23310, Theorem 7, leave-one-out)
    4. gradient   g = 1/(Q G L) sum_i (r_i - b_i) grad log pi(o_i)     L = longest response; in R folds of prompts
    5. rate       eta = eta_0 (shrink / reference)^alpha, shrink = ||grad J||^2 / E||g||^2     (Theorem 4)
                  estimated from the folds of earlier steps; then one Adam step

Removed from GRPO: the division by the group's standard deviation and by response length (both bias the gradient), the
clipped surrogate (unnecessary with one update for each batch), and the KL penalty with its reference model.

Shapes: Q prompts, G responses each, N = Q * G samples (prompt-major), b rows, t tokens, V vocabulary, P parameters.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

Policy = Qwen3ForCausalLM
Sample = tuple[list[int], list[int], list[float]]  # prompt ids, response ids, log-probs at sampling


@dataclass(frozen=True)
class Settings:
    num_prompts: int = 16  # Q
    group_size: int = 8  # G
    num_steps: int = 80
    temperature: float = 1.0
    ratio_cap: float = 2.0  # importance ratios against the sampler are truncated here
    num_folds: int = 4  # R
    horizon: float = 150.0  # steps over which signal and ||g||^2 are averaged
    warmup_steps: int = 10  # at eta_0, while the averages settle
    floor: float = 0.1  # of shrink
    exponent: float = 0.5  # alpha: 1 for SGD; Adam already divides by sqrt(v)
    max_change: float = 1.1  # of the rate in one step
    lr: float = 2e-3  # eta_0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float = 1.0


# ---------------------------------------------------------------- the task: "47+85=" -> "231", lowest digit first

CHARACTERS = "0123456789+="
END = len(CHARACTERS)
MAX_RESPONSE = 4  # three digits and the end


def encode(text: str) -> list[int]:
    return [CHARACTERS.index(character) for character in text]


def answer_to(question: str) -> str:
    a, b = question.rstrip("=").split("+")
    return str(int(a) + int(b))[::-1]


def mixed_answer(question: str, rng: random.Random) -> str:
    """The warm start's teacher: the right answer, or one digit replaced at random, or all carries left out."""
    right, draw = answer_to(question), rng.random()
    if draw < 0.35:
        return right
    if draw < 0.7:
        place = rng.randrange(len(right))
        return right[:place] + str(rng.randrange(10)) + right[place + 1 :]
    a, b = question.rstrip("=").split("+")
    return "".join(str((int(x) + int(y)) % 10) for x, y in zip(reversed(a), reversed(b), strict=True))


def reward(question: str, response: list[int]) -> float:
    return float(response == [*encode(answer_to(question)), END])


# ---------------------------------------------------------------- the policy
def build_model(dtype: torch.dtype = torch.float32, seed: int = 0) -> Policy:
    torch.manual_seed(seed)
    size = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "initializer_range": 0.1}
    attention = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "attn_implementation": "sdpa"}
    config = Qwen3Config(vocab_size=END + 1, max_position_embeddings=32, tie_word_embeddings=True, **size, **attention)
    return use_torch_rms_norm(Qwen3ForCausalLM(config).to(dtype))


def use_torch_rms_norm(model: Policy) -> Policy:
    """Replace transformers' RMSNorm, which always computes in fp32, by torch's, so that fp64 stays fp64."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ == "Qwen3RMSNorm":
                norm = torch.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(parent, name, norm)
    return model


def response_logprobs(model: Policy, samples: list[Sample], temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of the response tokens, the sampler's, and the mask, all [b, t-1]; position j predicts token j + 1."""
    width = max(len(prompt) + len(response) for prompt, response, _ in samples)
    ids, old = torch.zeros(len(samples), width, dtype=torch.long), torch.zeros(len(samples), width - 1)
    mask = torch.zeros(len(samples), width - 1, dtype=torch.bool)
    for row, (prompt, response, logprobs) in enumerate(samples):
        end = len(prompt) + len(response)
        ids[row, :end] = torch.tensor([*prompt, *response])
        mask[row, len(prompt) - 1 : end - 1] = True
        old[row, len(prompt) - 1 : end - 1] = torch.tensor(logprobs)
    logits = model(input_ids=ids).logits[:, :-1] / temperature  # [b, t-1, V]; causal attention hides right padding
    new = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return new, old.to(new.dtype), mask


@torch.no_grad()
def sample(model: Policy, prompts: list[list[int]], temperature: float) -> list[Sample]:
    """One response to each prompt (repeat a prompt G times for a group); all prompts have the same length."""
    ids, steps = torch.tensor(prompts), []  # [b, t], and a list of MAX_RESPONSE log-probs [b, 1]
    for _ in range(MAX_RESPONSE):
        logprobs = (model(input_ids=ids).logits[:, -1] / temperature).log_softmax(-1)  # [b, V]
        token = torch.multinomial(logprobs.exp(), 1)  # [b, 1]
        ids, steps = torch.cat((ids, token), 1), [*steps, logprobs.gather(1, token)]
    tokens, logprobs = ids[:, len(prompts[0]) :].tolist(), torch.cat(steps, 1).tolist()
    lengths = [row.index(END) + 1 if END in row else MAX_RESPONSE for row in tokens]
    return [(p, o[:n], lp[:n]) for p, o, lp, n in zip(prompts, tokens, logprobs, lengths, strict=True)]


# ---------------------------------------------------------------- the algorithm
def weighted_score(model: Policy, samples: list[Sample], weights: Tensor, settings: Settings) -> Tensor:
    """grad_theta sum_i weight_i sum_t rho_t log pi(o_t), flat [P]; samples and weights [b]."""
    new, old, mask = response_logprobs(model, samples, settings.temperature)
    ratio = (new.detach() - old).exp().clamp(max=settings.ratio_cap)  # rho: on-policy, so 1 up to rounding
    total = (weights.to(new.dtype)[:, None] * ratio * new * mask).sum()
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(total, list(model.parameters()))])


def sq_grad_norms(model: Policy, samples: list[Sample], settings: Settings) -> Tensor:
    """w [n] fp64: the squared norm of each response's own gradient over all parameters."""
    scores = (weighted_score(model, [each], torch.ones(1), settings) for each in samples)  # one [P] at a time
    return torch.tensor([score.double().square().sum().item() for score in scores], dtype=torch.float64)


def advantages_of(rewards: Tensor, norms: Tensor) -> Tensor:
    """A_i = r_i - b_i, all [Q, G] fp64. b_i depends only on the other responses, so E[b_i grad log pi(o_i)] = 0."""
    (num_prompts, group_size), baseline = rewards.shape, torch.zeros_like(rewards)
    for q in range(num_prompts):
        for i in range(group_size):
            others = [j for j in range(group_size) if j != i]
            w, r = norms[q, others], rewards[q, others]
            if w.sum() <= 1e-6 * (norms.sum() - norms[q, i]) / (norms.numel() - 1):  # negligible weights
                w = torch.ones_like(w)
            baseline[q, i] = (w * r).sum() / w.sum()
    return rewards - baseline


def fold_gradients(model: Policy, samples: list[Sample], advantages: Tensor, settings: Settings) -> Tensor:
    """[R, P]: the gradient estimate of each fold of Q / R prompts; the batch's gradient is their mean."""
    num_parameters, advantages = sum(p.numel() for p in model.parameters()), advantages.flatten()
    folds = torch.zeros(settings.num_folds, num_parameters, dtype=model.dtype)
    for fold, indices in enumerate(torch.arange(len(samples)).chunk(settings.num_folds)):
        used, divisor = [n for n in indices.tolist() if advantages[n] != 0], len(indices) * MAX_RESPONSE
        if used:
            folds[fold] = weighted_score(model, [samples[n] for n in used], advantages[used] / divisor, settings)
    return folds


@dataclass
class LearningRate:
    """eta_t from averages over steps before t, independent of g_t: call `rate`, then `observe`."""

    settings: Settings
    signal: float = 0.0  # averages; both start at 0, which cancels in their ratio
    sq_norm: float = 0.0
    factor: float = 1.0  # (shrink / reference)^alpha
    reference: float | None = None  # shrink at the end of warm-up
    count: int = 0  # steps in the averages
    fresh: bool = False  # observed since the factor last moved

    @property
    def shrink(self) -> float:
        return min(max(self.signal / self.sq_norm, self.settings.floor), 1.0) if self.sq_norm else 1.0

    def rate(self, step: int) -> float:
        s = self.settings
        if self.count < s.warmup_steps:
            return s.lr
        if self.fresh:
            self.reference = self.reference or self.shrink
            target = (self.shrink / self.reference) ** s.exponent
            self.factor = min(max(target, self.factor / s.max_change), self.factor * s.max_change)
            self.fresh = False
        return s.lr * self.factor

    def observe(self, sq_norm: float, fold_sq_norm: float) -> None:
        """E[B] = signal + noise / Q, B = ||mean_f g_f||^2; E[M] = signal + R noise / Q, M = mean_f ||g_f||^2."""
        signal = (self.settings.num_folds * sq_norm - fold_sq_norm) / (self.settings.num_folds - 1)
        self.signal += (signal - self.signal) / self.settings.horizon
        self.sq_norm += (sq_norm - self.sq_norm) / self.settings.horizon
        self.count += 1
        self.fresh = True


@dataclass
class Step:
    norms: Tensor  # w [Q, G]; 0 where a group was skipped
    advantages: Tensor  # A [Q, G]
    gradient: Tensor  # g [P], before clipping
    sq_norm: float  # B
    fold_sq_norm: float  # M
    lr: float


def oblr_po_step(
    model: Policy,
    optimizer: torch.optim.Optimizer,
    learning_rate: LearningRate,
    step: int,
    samples: list[Sample],  # [N], prompt-major
    rewards: Tensor,  # [Q, G]
    settings: Settings,
) -> Step:
    """One update of the model. Tensors have the model's dtype; per-sample numbers are fp64."""
    rewards = rewards.double()
    active = (rewards != rewards[:, :1]).any(-1)  # [Q]: equal rewards give A = 0 for any w
    measured = [each for n, each in enumerate(samples) if active[n // rewards.shape[1]]]
    norms = torch.zeros_like(rewards)
    norms[active] = sq_grad_norms(model, measured, settings).view(-1, rewards.shape[1])
    advantages = advantages_of(rewards, norms)
    folds = fold_gradients(model, samples, advantages, settings)  # [R, P]
    gradient, lr = folds.mean(0), learning_rate.rate(step)
    sq_norm, fold_sq_norm = gradient.double().square().sum().item(), folds.double().square().sum(-1).mean().item()
    if sq_norm > 0:  # else every group had equal rewards, and there is nothing to learn
        learning_rate.observe(sq_norm, fold_sq_norm)
        ascend(model, optimizer, gradient * min(1.0, settings.clip / sq_norm**0.5), lr)
    return Step(norms, advantages, gradient, sq_norm, fold_sq_norm, lr)


def ascend(model: Policy, optimizer: torch.optim.Optimizer, gradient: Tensor, lr: float) -> None:
    """One optimizer step in the direction of the gradient [P]."""
    parameters = list(model.parameters())
    for parameter, part in zip(parameters, gradient.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = -part.view_as(parameter)  # optimizers descend
    optimizer.param_groups[0]["lr"] = lr
    optimizer.step()


# ---------------------------------------------------------------- warm start, evaluation, the loop
def warm_start(model: Policy, questions: list[str], rng: random.Random, steps: int = 800) -> None:
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.95))
    for step in range(steps):
        pairs = [(encode(q), [*encode(mixed_answer(q, rng)), END], [0.0]) for q in rng.choices(questions, k=64)]
        logprobs, _, mask = response_logprobs(model, pairs, 1.0)
        optimizer.zero_grad()
        (-(logprobs * mask).sum() / mask.sum()).backward()
        optimizer.param_groups[0]["lr"] = 8e-3 * min(1.0, (step + 1) / 30, 1.1 * (1 - step / steps))
        optimizer.step()


def accuracy(model: Policy, questions: list[str], repeats: int = 4) -> float:
    asked = questions * repeats
    drawn = sample(model, [encode(question) for question in asked], 1.0)
    return sum(reward(question, response) for question, (_, response, _) in zip(asked, drawn, strict=True)) / len(asked)


def main(settings: Settings) -> None:
    rng, begin = random.Random(0), time.perf_counter()
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    rng.shuffle(pairs)  # a + b and b + a stay on the same side of the split
    held_out, train = ([f"{x}+{y}=" for p in part for x, y in (p, p[::-1])] for part in (pairs[:128], pairs[128:]))
    model = build_model()
    warm_start(model, train, rng)
    before = accuracy(model, held_out)
    print(f"warm start: accuracy {before:.1%} after {time.perf_counter() - begin:.0f} s")
    optimizer = torch.optim.Adam(model.parameters(), betas=settings.betas, eps=settings.eps)
    learning_rate = LearningRate(settings)
    for step in range(settings.num_steps):
        asked = [question for question in rng.sample(train, settings.num_prompts) for _ in range(settings.group_size)]
        samples = sample(model, [encode(question) for question in asked], settings.temperature)
        rewards = torch.tensor([reward(q, o) for q, (_, o, _) in zip(asked, samples, strict=True)])
        rewards = rewards.view(settings.num_prompts, settings.group_size)
        result = oblr_po_step(model, optimizer, learning_rate, step, samples, rewards, settings)
        if step % 10 == 9:
            metrics = f"|g| {result.sq_norm**0.5:.2f}  shrink {learning_rate.shrink:.2f}  lr {result.lr:.1e}"
            print(f"step {step + 1}: reward {rewards.mean():.2f}  {metrics}  {time.perf_counter() - begin:.0f} s")
    print(f"accuracy {before:.1%} -> {accuracy(model, held_out):.1%} (held-out sums, sampled at temperature 1)")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Settings())
