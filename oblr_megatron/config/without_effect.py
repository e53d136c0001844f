"""Options that are set but have no effect, because another option turns off what they belong to. Imports no torch.

They are warnings, not errors: whoever compares arms changes one option of a config and leaves the rest as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING

from oblr_megatron.config.baselines import facts_of

if TYPE_CHECKING:
    from oblr_megatron.config import Config

Off = Callable[["Config"], bool]
_ENVIRONMENT = ("max_turns", "deadline_s", "in_rounds")
_SNR = ("exponent", "reference", "max_change", "warmup_steps")

# section, its keys, what is turned off, and whether it is
TURNED_OFF: tuple[tuple[str, tuple[str, ...], str, Off], ...] = (
    (
        "rollout",
        ("num_engines", "gpu_memory_utilization", "sleep_level"),
        "rollout.servers sample",
        lambda c: bool(c.rollout.servers),
    ),
    ("rollout", ("wave_tokens",), 'rollout.overlap is not "stream"', lambda c: c.rollout.overlap != "stream"),
    ("rollout", ("speculation_below",), 'rollout.speculation is "none"', lambda c: c.rollout.speculation == "none"),
    (
        "rollout",
        ("importance_cap",),
        'rollout.importance_sampling is "none"',
        lambda c: c.rollout.importance_sampling == "none",
    ),
    (
        "rollout.environment",
        _ENVIRONMENT,
        "rollout.environment has no function",
        lambda c: not c.rollout.environment.function,
    ),
    (
        "rollout.environment",
        ("tool_timeout_s", "tool_workers"),
        "rollout.environment.tools is empty",
        lambda c: not c.rollout.environment.tools,
    ),
    ("reward", ("format_pattern",), 'no reward is "format"', lambda c: "format" not in c.reward.names),
    ("reward", ("overlong_buffer_tokens",), 'no reward is "overlong"', lambda c: "overlong" not in c.reward.names),
    (
        "reward",
        ("send_rows", "api_key_env"),
        "no reward is a URL",
        lambda c: not any(name.lower().startswith(("http://", "https://")) for name in c.reward.names),
    ),
    ("data", ("exclude",), "data.overlap_threshold is 0", lambda c: c.data.overlap_threshold == 0),
    (
        "checkpoint",
        ("time_limit_s",),
        "checkpoint.exit_before_timeout_s is 0",
        lambda c: c.checkpoint.exit_before_timeout_s == 0,
    ),
    (
        "evaluate",
        ("temperature", "top_p", "top_k"),
        "evaluate.samples_per_prompt is 0",
        lambda c: c.evaluate.samples_per_prompt == 0,
    ),
    (
        "model",
        ("fp8_recipe", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
        'model.fp8 is "none"',
        lambda c: c.model.fp8 == "none",
    ),
    (
        "parallel",
        ("recompute_modules",),
        'parallel.recompute_granularity is not "selective"',
        lambda c: c.parallel.recompute_granularity != "selective",
    ),
    (
        "parallel",
        ("recompute_method", "recompute_num_layers"),
        'parallel.recompute_granularity is not "full"',
        lambda c: c.parallel.recompute_granularity != "full",
    ),
    ("algo", ("pool_decay",), "algo.baseline has no pool", lambda c: not facts_of(c.algo.baseline).pool),
    ("algo", ("token_scale",), 'algo.aggregation is not "constant"', lambda c: c.algo.aggregation != "constant"),
    ("algo", ("kl_loss",), "algo.kl_coefficient is 0", lambda c: c.algo.kl_coefficient == 0),
    ("algo", ("center_tokens",), "algo.center is false", lambda c: not c.algo.center),
    (
        "algo.snr",
        ("num_folds",),
        'algo.snr.estimator is "momentum" or "prompts"',
        lambda c: not c.algo.snr.reads_num_folds,
    ),
    (
        "algo.snr",
        ("warmup_steps",),
        "it is not below num_steps",
        lambda c: c.algo.schedule == "snr" and c.algo.snr.warmup_steps >= c.num_steps,
    ),
    ("algo.snr", _SNR, 'algo.schedule is not "snr"', lambda c: c.algo.schedule != "snr"),
    ("optimizer", ("min_lr_ratio",), 'algo.schedule is not "cosine"', lambda c: c.algo.schedule != "cosine"),
    (
        "optimizer",
        ("adam_beta1", "adam_beta2", "adam_eps"),
        "the optimizer is SGD",
        lambda c: c.optimizer.name != "adam",
    ),
    ("optimizer", ("sgd_momentum",), "the optimizer is Adam", lambda c: c.optimizer.name != "sgd"),
    ("gradnorm", ("check_every",), 'gradnorm.source is "exact"', lambda c: c.gradnorm.source == "exact"),
    (
        "gradnorm",
        ("source", "mode", "sample_fraction", "window_tokens"),
        "nothing reads norms (gradnorm.always is false)",
        lambda c: not c.uses_norms,
    ),
    (
        "log",
        ("profile_step_start", "profile_step_end"),
        'log.profile is "none"',
        lambda c: c.log.profile == "none",
    ),
    (
        "log",
        ("project", "run_name"),
        "no tracker shows it",
        lambda c: not set(c.log.trackers) - {"tensorboard"},
    ),
)


def without_effect(config: Config) -> Iterator[str]:
    """One line for each option that is set but turned off.

    Example: 'rollout.wave_tokens has no effect: rollout.overlap is not "stream"'
    """
    for name, keys, cause, off in TURNED_OFF:
        section = attrgetter(name)(config)
        fields = type(section).model_fields
        given = [key for key in keys if getattr(section, key) != fields[key].get_default(call_default_factory=True)]
        if given and off(config):
            yield f"{name}.{', '.join(given)} {'have' if given[1:] else 'has'} no effect: {cause}"
