"""OBLR-PO in one file: plain PyTorch, one process, nothing imported from oblr_megatron.

    python examples/single_file.py          # about a minute on one CPU core

A small Qwen3 learns two-digit sums. Supervised learning on answers of mixed quality gives it a start; then, each step:

    1. sample     G responses o_i to each of Q prompts, and reward them, r_i
    2. norms      w_i = ||grad log pi(o_i)||^2, exactly: one backward pass a response
    3. baseline   b_i = sum_{j != i} w_j r_j / sum_{j != i} w_j        (arXiv 2511.23310, Theorem 7, leave-one-out)
    4. gradient   g = 1/(Q G) sum_i (r_i - b_i) grad log pi(o_i)       taken in R folds of prompts
    5. rate       eta = eta_0 (shrink / reference)^alpha, shrink = ||grad J||^2 / E||g||^2     (Theorem 4)
                  estimated from the folds of earlier steps; then one Adam step

Left out beside GRPO: the division by the group's standard deviation and by response length (both bias the gradient), the
clipped surrogate (one update a batch needs none), the KL penalty and its reference model.

Shapes: Q prompts, G responses each, N = Q * G samples in prompt-major order, b rows, t tokens, V vocabulary, P parameters.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

Sample = tuple[list[int], list[int], list[float]]  # prompt ids, response ids, log-probs when they were drawn


@dataclass(frozen=True)
class Settings:
    num_prompts: int = 16  # Q
    group_size: int = 8  # G
    num_steps: int = 80
    baseline: str = "optimal"  # or "optimal_prior"
    prior_strength: float = 1.0  # lambda: weight of the other prompts' mean reward, in units of the mean norm
    temperature: float = 1.0
    ratio_cap: float = 2.0  # importance ratios against the sampler's log-probs are cut here
    num_folds: int = 4  # R
    horizon: float = 150.0  # steps over which signal and ||g||^2 are averaged
    warmup_steps: int = 10
    floor: float = 0.1  # of shrink
    exponent: float = 0.5  # alpha: 1 for SGD; Adam divides by sqrt(v) already
    max_change: float = 1.1  # of the rate, a step
    lr: float = 1e-3  # eta_0
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
    """The warm start's teacher: right, or with one digit slipped, or with the carries forgotten."""
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


def build_model(dtype: torch.dtype = torch.float32, seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=END + 1,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    return use_torch_rms_norm(Qwen3ForCausalLM(config).to(dtype))


def use_torch_rms_norm(model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """Swap transformers' RMSNorm, which computes in fp32 whatever the dtype, for torch's: fp64 is then fp64 throughout."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ == "Qwen3RMSNorm":
                norm = torch.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(parent, name, norm)
    return model


def response_logprobs(model: Qwen3ForCausalLM, samples: list[Sample], temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """log pi of every response token [b, t], the sampler's [b, t], and the mask [b, t]; position j predicts token j + 1."""
    width = max(len(prompt) + len(response) for prompt, response, _ in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.long)
    mask, old = torch.zeros(len(samples), width, dtype=torch.bool), torch.zeros(len(samples), width)
    for row, (prompt, response, logprobs) in enumerate(samples):
        start, stop = len(prompt) - 1, len(prompt) + len(response) - 1
        ids[row, : stop + 1] = torch.tensor([*prompt, *response])
        mask[row, start:stop], old[row, start:stop] = True, torch.tensor(logprobs)
    logits = model(input_ids=ids).logits[:, :-1] / temperature  # [b, t-1, V]; padding is on the right, so nobody sees it
    new = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return new, old[:, :-1].to(new.dtype), mask[:, :-1]


@torch.no_grad()
def sample(model: Qwen3ForCausalLM, prompts: list[list[int]], temperature: float) -> list[Sample]:
    """One response to each prompt (repeat a prompt G times for a group); all prompts have the same length."""
    ids = torch.tensor(prompts)  # [b, t]
    steps = []
    for _ in range(MAX_RESPONSE):
        logprobs = (model(input_ids=ids).logits[:, -1] / temperature).log_softmax(-1)  # [b, V]
        token = torch.multinomial(logprobs.exp(), 1)  # [b, 1]
        ids = torch.cat((ids, token), 1)
        steps.append(logprobs.gather(1, token))
    tokens, logprobs = ids[:, len(prompts[0]) :].tolist(), torch.cat(steps, 1).tolist()
    lengths = [row.index(END) + 1 if END in row else MAX_RESPONSE for row in tokens]
    return [(p, o[:n], lp[:n]) for p, o, lp, n in zip(prompts, tokens, logprobs, lengths, strict=True)]


# ---------------------------------------------------------------- the algorithm


def weighted_score(model: Qwen3ForCausalLM, samples: list[Sample], weights: Tensor, settings: Settings) -> Tensor:
    """grad_theta sum_i weight_i sum_t rho_t log pi(o_t), flat [P]; samples and weights [b]."""
    new, old, mask = response_logprobs(model, samples, settings.temperature)
    ratio = (new.detach() - old).exp().clamp(max=settings.ratio_cap)  # rho: 1 up to rounding, the batch being on-policy
    total = (weights.to(new.dtype)[:, None] * ratio * new * mask).sum()
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(total, list(model.parameters()))])


def sq_grad_norms(model: Qwen3ForCausalLM, samples: list[Sample], settings: Settings) -> Tensor:
    """w [n] fp64: the squared norm of each response's own gradient over all parameters."""
    one = torch.ones(1)
    norms = [weighted_score(model, [each], one, settings).double().square().sum() for each in samples]
    return torch.stack(norms) if norms else torch.zeros(0, dtype=torch.float64)


def advantages_of(rewards: Tensor, norms: Tensor, settings: Settings) -> Tensor:
    """A_i = r_i - b_i; everything [Q, G] fp64. b_i is made of the other responses only, so E[b_i grad log pi(o_i)] = 0."""
    num_prompts, group_size = rewards.shape
    baseline = torch.zeros_like(rewards)
    for q in range(num_prompts):
        elsewhere = [p for p in range(num_prompts) if p != q]
        for i in range(group_size):
            others = [j for j in range(group_size) if j != i]
            w, r = norms[q, others], rewards[q, others]
            if w.sum() <= 1e-6 * (norms.sum() - norms[q, i]) / (norms.numel() - 1):  # nothing to weigh by
                w = torch.ones_like(w)
            if settings.baseline == "optimal_prior":  # one more response, whose reward is the other prompts' mean
                w = torch.cat((w, settings.prior_strength * w.mean()[None]))
                r = torch.cat((r, rewards[elsewhere].mean()[None]))
            baseline[q, i] = (w * r).sum() / w.sum()
    return rewards - baseline


def fold_gradients(model: Qwen3ForCausalLM, samples: list[Sample], advantages: Tensor, settings: Settings) -> Tensor:
    """[R, P]: the gradient estimate of each fold of Q / R prompts; their mean is the whole batch's."""
    folds = []
    for indices in torch.arange(advantages.numel()).chunk(settings.num_folds):
        used = [n for n in indices.tolist() if advantages.flatten()[n] != 0]
        weights = advantages.flatten()[used] / len(indices)
        nothing = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=model.dtype)
        folds.append(weighted_score(model, [samples[n] for n in used], weights, settings) if used else nothing)
    return torch.stack(folds)


@dataclass
class LearningRate:
    """eta_t from averages over the steps before t, so that it does not depend on g_t: draw `rate`, then `observe`."""

    settings: Settings
    averages: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))  # of signal and ||g||^2
    factor: float = 1.0  # (shrink / reference)^alpha
    reference: float | None = None  # shrink at the end of warm-up
    fresh: bool = False

    @property
    def shrink(self) -> float:
        """Averaged apart and divided last; both averages start at 0, which cancels."""
        signal, sq_norm = self.averages.tolist()
        return min(max(signal / sq_norm, self.settings.floor), 1.0) if sq_norm else 1.0

    def rate(self, step: int) -> float:
        s = self.settings
        if step < s.warmup_steps:
            return s.lr * (step + 1) / s.warmup_steps
        if self.fresh:
            self.reference = self.reference or self.shrink
            target = (self.shrink / self.reference) ** s.exponent
            self.factor = min(max(target, self.factor / s.max_change), self.factor * s.max_change)
            self.fresh = False
        return s.lr * self.factor

    def observe(self, sq_norm: float, fold_sq_norm: float) -> None:
        """sq_norm B = ||mean_f g_f||^2 = signal + noise / Q, fold_sq_norm M = mean_f ||g_f||^2 = signal + R noise / Q."""
        folds = self.settings.num_folds
        signal = (folds * sq_norm - fold_sq_norm) / (folds - 1)
        now = torch.tensor([signal, sq_norm], dtype=torch.float64)
        self.averages += (now - self.averages) / self.settings.horizon
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
    model: Qwen3ForCausalLM,
    optimizer: torch.optim.Optimizer,
    learning_rate: LearningRate,
    step: int,
    samples: list[Sample],  # [N], prompt-major
    rewards: Tensor,  # [Q, G]
    settings: Settings,
) -> Step:
    """One update of the model; everything is in the model's dtype, the figures of whole samples in fp64."""
    rewards = rewards.double()
    active = (rewards != rewards[:, :1]).any(-1)  # [Q]; without a prior, equal rewards mean A = 0 whatever w is
    if settings.baseline == "optimal_prior":
        active = torch.ones_like(active)
    measured = active.repeat_interleave(rewards.shape[1]).nonzero().flatten().tolist()
    norms = torch.zeros(len(samples), dtype=torch.float64)
    norms[measured] = sq_grad_norms(model, [samples[n] for n in measured], settings)
    norms = norms.view_as(rewards)
    advantages = advantages_of(rewards, norms, settings)
    folds = fold_gradients(model, samples, advantages, settings)  # [R, P]
    gradient, lr = folds.mean(0), learning_rate.rate(step)
    sq_norm, fold_sq_norm = gradient.double().square().sum().item(), folds.double().square().sum(-1).mean().item()
    if sq_norm > 0:  # else every group was of one mind: nothing to learn from, nothing to average
        learning_rate.observe(sq_norm, fold_sq_norm)
        ascend(model, optimizer, gradient * min(1.0, settings.clip / sq_norm**0.5), lr)
    return Step(norms, advantages, gradient, sq_norm, fold_sq_norm, lr)


def ascend(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, gradient: Tensor, lr: float) -> None:
    """One optimizer step up the gradient [P]."""
    parameters = list(model.parameters())
    for parameter, part in zip(parameters, gradient.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = -part.view_as(parameter)  # optimizers go down
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()


# ---------------------------------------------------------------- warm start, evaluation, the loop


def warm_start(model: Qwen3ForCausalLM, questions: list[str], rng: random.Random, steps: int = 300, lr: float = 3e-3) -> None:
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.95))
    for step in range(steps):
        asked = rng.choices(questions, k=128)
        answers = [[*encode(mixed_answer(question, rng)), END] for question in asked]
        pairs = [(encode(q), a, [0.0] * len(a)) for q, a in zip(asked, answers, strict=True)]
        logprobs, _, mask = response_logprobs(model, pairs, 1.0)
        optimizer.zero_grad()
        (-(logprobs * mask).sum() / mask.sum()).backward()
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / 30, (steps - step) / (0.9 * steps))
        optimizer.step()


def accuracy(model: Qwen3ForCausalLM, questions: list[str], repeats: int = 4) -> float:
    asked = questions * repeats
    drawn = sample(model, [encode(question) for question in asked], 1.0)
    return sum(reward(question, response) for question, (_, response, _) in zip(asked, drawn, strict=True)) / len(asked)


def main(settings: Settings) -> None:
    rng, begin = random.Random(0), time.perf_counter()
    questions = [f"{a}+{b}=" for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(questions)
    held_out, train = questions[:256], questions[256:]
    model = build_model()
    warm_start(model, train, rng)
    before = accuracy(model, held_out)
    print(f"warm start: accuracy {before:.1%} after {time.perf_counter() - begin:.0f} s")
    optimizer, rate = torch.optim.Adam(model.parameters(), betas=settings.betas, eps=settings.eps), LearningRate(settings)
    for step in range(settings.num_steps):
        asked = [question for question in rng.sample(train, settings.num_prompts) for _ in range(settings.group_size)]
        samples = sample(model, [encode(question) for question in asked], settings.temperature)
        rewards = torch.tensor([reward(q, o) for q, (_, o, _) in zip(asked, samples, strict=True)])
        result = oblr_po_step(model, optimizer, rate, step, samples, rewards.view(-1, settings.group_size), settings)
        if step % 10 == 9:
            figures = f"reward {rewards.mean():.2f}  |g| {result.sq_norm**0.5:.2f}  shrink {rate.shrink:.2f}  lr {result.lr:.1e}"
            print(f"step {step + 1}: {figures}  {time.perf_counter() - begin:.0f} s")
    print(f"accuracy {before:.1%} -> {accuracy(model, held_out):.1%} (held-out sums, sampled at temperature 1)")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Settings())
