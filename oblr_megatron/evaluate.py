"""PROVISIONAL by lead, to be overwritten."""
from __future__ import annotations
def evaluate(name, engines, prompts, reward, config):
    k = config.evaluate.samples_per_prompt
    g = engines.generate(prompts, group_size=1, temperature=1.0, max_tokens=config.rollout.max_response_tokens, seed=config.seed, greedy=True)
    s = engines.generate(prompts, group_size=k, temperature=config.evaluate.temperature, max_tokens=config.rollout.max_response_tokens, seed=config.seed + 12345)
    rg, rs = reward.score(prompts, g).rewards, reward.score(prompts, s).rewards
    return {f"eval/{name}/accuracy": sum(rg) / len(rg), f"eval/{name}/mean_at_k": sum(rs) / len(rs)}
