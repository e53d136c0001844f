"""Predicted seconds of the training phases of a step: norms, gradient, optimizer. Imports no torch.

On a CPU, where other ranks use the cores of idle stages, a pass of m microbatches of
T_s seconds on stage s takes at least m mean_s T_s * stretch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from oblr_megatron.config import Config
from oblr_megatron.extras.planner.exchange import Links
from oblr_megatron.extras.planner.setting import Phase, Setting
from oblr_megatron.extras.planner.stage import Stage, Terms, added, device_seconds, scaled
from oblr_megatron.memory.pass_plan import Layout, Pass, folds_of_a_rank, longest_sample, passes_of, samples_of_a_rank
from oblr_megatron.memory.rank_shapes import RankSizes
from oblr_megatron.memory.select_mode import BYTES_MOVED, norm_over_product
from oblr_megatron.memory.training import offloaded_bytes

FOLD_MOVES = 5  # passes over main_grad: zeroed, its norm read, added to the sum (read, read, written)


def training_phases(setting: Setting) -> dict[str, Phase]:
    """The phases norms, gradient and optimizer."""
    return _Step.of(setting).phases()


def log_prob_phase(setting: Setting) -> Phase:
    """A forward pass over all samples; other trainers run it for log-probs, which here come from the gradient pass."""
    step = _Step.of(setting)
    return Phase(scaled(step.log_probs(), step.updates))


@dataclass(frozen=True, slots=True)
class _Step:
    """The training phases of one setting. Methods give the seconds of one update unless they say otherwise."""

    setting: Setting
    config: Config  # one update of `setting.typical`
    updates: int  # updates on a batch, U
    layout: Layout
    links: Links
    stages: list[Stage]
    stretch: float

    @classmethod
    def of(cls, setting: Setting) -> _Step:
        config, machine = setting.typical.per_update, setting.machine
        links = Links.of(machine, config.parallel, setting.world_size)
        sizes = [RankSizes.of(setting.hf_config, config, stage) for stage in range(links.pp)]
        stages = [Stage(each, config, links, machine) for each in sizes]
        layout = Layout.of(setting.hf_config, config, setting.world_size)
        return cls(
            setting, config, config.algo.updates_per_batch, layout, links, stages, machine.stretch(setting.world_size)
        )

    def phases(self) -> dict[str, Phase]:
        """The phases of the step in order."""
        hf, engine, length = self.setting.hf_config, self.setting.transformer_engine, longest_sample(self.config)
        wanted = self.config.measures_norms
        passes = passes_of(hf, self.config, self.layout, length, norms=wanted, transformer_engine=engine)
        gradient = scaled(self.through(passes[-1], self.forward_and_backward), self.config.algo.keep)
        whole = added(gradient, self.forward_only(), self.per_fold(), self.reduced(), self.fixed())
        return {
            "norms": Phase(self.norms(passes[0], gradient)),  # refused with several updates
            "gradient": Phase(scaled(whole, self.updates)),
            "optimizer": Phase(added(scaled(added(self.optimizer(), self.fixed()), self.updates), self.offloaded())),
        }

    def norms(self, first: Pass, gradient: Terms) -> Terms:
        """Seconds that norms add to the gradient pass; empty if none are measured."""
        measured = self.config.gradnorm.sample_fraction * self.config.algo.keep
        if first.kind == "gradient":
            return self.energies(measured)
        ratio = norm_over_product(self.setting.hf_config, longest_sample(self.config))
        if self.sums_samples:
            ratio = 1.0  # a sample's partial gradient is computed in full, summed over ranks, then squared
        if first.kind == "norms":
            whole = self.through(first, lambda stage, rows: self.norms_only(stage, rows, ratio))
            terms = added(scaled(whole, measured), self.fixed())
        elif first.kind == "bookkeep" or (first.kind == "inline" and self.sums_samples and first.rows > 1):
            terms = self.products_again(gradient, ratio)
        else:
            terms = self.stashed() if first.kind == "stash" else {}
        return added(terms, self.summands(measured))

    @property
    def sums_samples(self) -> bool:
        """Whether ranks sum each sample's gradient before its norm: they share its tokens, or copies of experts."""
        return self.links.cp > 1 or bool(self.stages[0].sizes.experts and self.links.expert_copies > 1)

    def energies(self, measured: float) -> Terms:
        """The forward pass for w of source "logit", where the gradient pass does not give them."""
        config = self.config
        if not config.uses_norms or config.gradnorm.source != "logit" or config.energies_in_pass:
            return {}
        return added(scaled(self.log_probs(), measured), self.fixed())

    def products_again(self, gradient: Terms, ratio: float) -> Terms:
        """What mode `bookkeep` adds: norms at `ratio` of weight gradients, or those of adapters a second time."""
        if self.config.model.lora.rank:
            return {"adapters": gradient["adapters"] / 3}
        return {"products": ratio / 3 * gradient["products"]}

    def summands(self, measured: float) -> Terms:
        """The reduce-scatter of each measured sample's gradient over the ranks that sum it, before its norm."""
        if not self.sums_samples:
            return {}
        each = max(map(self.summand, self.stages))
        return {"context": measured * samples_of_a_rank(self.config, self.layout) * each * self.stretch}

    def summand(self, stage: Stage) -> float:
        """Seconds of one sample's reduce-scatters on a stage."""
        sizes = stage.sizes
        if sizes.adapter_rank:
            dense, experts = (number * sizes.wide for number in sizes.trained)
            return self.links.context(dense) + (self.links.expert_sum(experts) if experts else 0.0)
        seconds = sum(self.links.context(p * d * sizes.wide) * count for p, d, count in sizes.matrices)
        shapes = (2 * sizes.expert_ffn, sizes.hidden), (sizes.hidden, sizes.expert_ffn)
        each = sum(self.links.expert_sum(p * d * sizes.wide) for p, d in shapes) if sizes.experts else 0.0
        return seconds + sizes.layers * sizes.local_experts * each

    def forward_only(self) -> Terms:
        """The forward passes for the reference model and for log pi_old, if the run needs them."""
        count = int(self.config.algo.kl_coefficient > 0) + 1 - 1 / self.updates  # not for the first update
        return scaled(self.log_probs(), count) if count else {}

    def log_probs(self) -> Terms:
        """A forward pass over all samples."""
        share, length = samples_of_a_rank(self.config, self.layout), longest_sample(self.config)
        rows = max(1, self.config.parallel.micro_batch_tokens // length)
        whole = Pass("gradient", share, min(rows, share))
        return self.through(whole, lambda stage, rows: stage.forward(stage.sizes.tokens(rows, length)))

    def forward_and_backward(self, stage: Stage, rows: int) -> Terms:
        """Seconds of a microbatch of `rows` samples."""
        tokens = stage.sizes.tokens(rows, longest_sample(self.config))
        return added(stage.forward(tokens), stage.backward(tokens))

    def norms_only(self, stage: Stage, rows: int, ratio: float) -> Terms:
        """Seconds of a microbatch in a norm pass: norms replace weight gradients, at `ratio` of their FLOPs."""
        tokens = stage.sizes.tokens(rows, longest_sample(self.config))
        forward, backward = stage.forward(tokens), stage.backward(tokens)
        if not stage.sizes.adapter_rank:  # adapters have the same pass twice
            backward["products"] -= (1 - ratio) * forward["products"]
        return added(forward, backward)

    def through(self, run: Pass, cost: Callable[[Stage, int], Terms]) -> Terms:
        """Seconds of all runs of a pass through the pipeline; the term "pipeline" is its bubble."""
        links, machine = self.links, self.setting.machine
        stages = [device_seconds(cost(stage, run.rows), machine) for stage in self.stages]
        mean = scaled(added(*stages), run.microbatches / links.pp)
        busy = sum(mean.values())
        slowest = max(sum(terms.values()) for terms in stages) * run.microbatches
        bubble = (links.pp - 1) / (self.config.parallel.virtual_pipeline_model_parallel_size or 1)
        alone = slowest + bubble * busy / run.microbatches
        terms = scaled(mean, self.stretch)
        tokens = self.stages[0].sizes.tokens(run.rows, longest_sample(self.config))
        sent = links.next_stage(tokens.split * self.stages[0].sizes.hidden * self.stages[0].sizes.element)
        terms["pipeline"] = max(0.0, alone - busy * self.stretch) + 2 * (run.microbatches + links.pp - 1) * sent
        terms["runs"] = machine.constants.run_s * self.stretch
        return scaled(terms, samples_of_a_rank(self.config, self.layout) / run.samples)

    def stashed(self) -> Terms:
        """Writing, squaring and reading the gradients of single samples."""
        samples = samples_of_a_rank(self.config, self.layout)
        return {"memory": self.moved(max(sum(s.sizes.trained) for s in self.stages) * BYTES_MOVED * samples)}

    def per_fold(self) -> Terms:
        """Work on the gradient of every fold."""
        folds = folds_of_a_rank(self.config, self.layout)
        dense = max(stage.sizes.trained[0] * stage.sizes.wide for stage in self.stages)
        whole = max(sum(stage.sizes.trained) * stage.sizes.wide for stage in self.stages)
        experts = max(stage.sizes.trained[1] * stage.sizes.wide for stage in self.stages)
        summed = self.links.context(dense) + (self.links.expert_sum(experts) if experts else 0.0)
        return {
            "memory": folds * self.moved(FOLD_MOVES * whole),
            "context": folds * 2 * self.stretch * summed,
        }

    def reduced(self) -> Terms:
        """The reduce over replicas, minus the part hidden behind backward."""
        parallel, constants = self.config.parallel, self.setting.machine.constants
        gathers = 1 if parallel.use_distributed_optimizer else 2
        seconds = gathers * max(
            self.links.data(stage.sizes.trained[0] * stage.sizes.wide)
            + self.links.expert_data(stage.sizes.trained[1] * stage.sizes.wide)
            for stage in self.stages
        )
        return {"data": seconds * self.stretch * (1 - constants.hidden * parallel.overlap_grad_reduce)}

    def optimizer(self) -> Terms:
        """The update, and the distributed optimizer's all-gather of the weights."""
        sharded, links = self.config.parallel.use_distributed_optimizer, self.links
        moved, gathered = 0.0, 0.0
        for stage in self.stages:
            sizes = stage.sizes
            each = 8 * sizes.wide + (2 if sizes.element < sizes.wide else 0)
            dense, experts = map(float, sizes.trained)
            if sharded:
                here = links.data(dense * sizes.element) + links.expert_data(experts * sizes.element)
                gathered = max(gathered, here)
                dense, experts = self.sharded(dense, experts)
            moved = max(moved, self.moved(each * (dense + experts)))
        return {"memory": moved, "data": gathered * self.stretch}

    def offloaded(self) -> Terms:
        """The moves of offloaded optimizer state to host memory and back, once a step."""
        most = 0.0
        for stage in self.stages:
            dense, experts = map(float, stage.sizes.trained)
            if self.config.parallel.use_distributed_optimizer:
                dense, experts = self.sharded(dense, experts)
            most = max(most, offloaded_bytes(self.config, int(dense + experts)))
        host = self.setting.machine.constants.host_gb_s * 1e9
        return {"offload": 2 * most / host * self.stretch} if most else {}

    def sharded(self, dense: float, experts: float) -> tuple[float, float]:
        """A rank's share of the weights in the distributed optimizer."""
        return dense / (self.links.dp * self.links.cp), experts / self.links.edp

    def moved(self, num_bytes: float) -> float:
        """Seconds to move bytes through a rank's memory."""
        machine = self.setting.machine
        return self.stretch * num_bytes / (machine.device.memory_gb_s * 1e9 * machine.constants.memory)

    def fixed(self) -> Terms:
        """Fixed seconds per phase."""
        return {"fixed": self.setting.machine.constants.step_s}
