"""Seconds of the training phases of a step: norms, gradient, optimizer. Imports no torch.

A pass of m microbatches through pp stages, T_s the seconds of a microbatch on stage s (`planner/stage.py`):

    m max_s T_s + (pp - 1) / vp mean_s T_s          + 2 (m + pp - 1) messages of n h x to the next stage
    at least m mean_s T_s * stretch                 on a CPU, whose ranks share cores: idle stages lend theirs

    norms      two_pass: a pass of a forward and (1 + r) / 2 of a backward pass's products; bookkeep: r / 3 of the
               products of the gradient's pass more; stash: BYTES_MOVED a weight and sample at memory bandwidth.
               r is `memory/select_mode.py`'s ratio of the norm's arithmetic to a weight gradient's. Under context
               parallelism r = 1, and the gradient of every sample is summed over ranks
    gradient   a pass for each fold (window, group), and after each the sum over context-parallel ranks, the norm and
               the sum over folds: 5 * 4 bytes a weight; last a scatter-and-add over data-parallel ranks, and a gather
               unless the distributed optimizer has only a part of it to itself
               Token-wise baselines and a KL penalty take a forward pass more
    optimizer  32 bytes a weight in fp32 (gradient, two moments, weight, each read and written), 2 more for a bf16 copy,
               over the data-parallel ranks under the distributed optimizer, which then gathers the weights

Samples are taken to be all of the mean length. What waits for the longest, and for the slowest rank, is not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from oblr_megatron.config import Config
from oblr_megatron.memory.pass_plan import (
    Layout,
    Pass,
    folds_of_a_rank,
    longest_sample,
    passes_of,
    samples_of_a_rank,
)
from oblr_megatron.memory.rank_shapes import RankSizes
from oblr_megatron.memory.select_mode import BYTES_MOVED, norm_over_product
from oblr_megatron.planner.exchange import Links
from oblr_megatron.planner.setting import Phase, Setting
from oblr_megatron.planner.stage import Stage, Terms, added, device_seconds, scaled

FOLD_MOVES = 5  # of main_grad: zeroed, its norm read, added to the sum (read, read, written)


def training_phases(setting: Setting) -> dict[str, Phase]:
    """Norms, gradient and optimizer."""
    return _Step.of(setting).phases()


def log_prob_phase(setting: Setting) -> Phase:
    """A forward pass over all samples, as other trainers make for log-probs that here come from the gradient's pass."""
    return Phase(_Step.of(setting).log_probs())


@dataclass(frozen=True, slots=True)
class _Step:
    """What the phases of one setting are computed from."""

    setting: Setting
    config: Config  # the typical one
    layout: Layout
    links: Links
    stages: list[Stage]
    stretch: float

    @classmethod
    def of(cls, setting: Setting) -> _Step:
        config, machine = setting.typical, setting.machine
        links = Links.of(machine, config.parallel, setting.world_size)
        sizes = [RankSizes.of(setting.hf_config, config, stage) for stage in range(links.pp)]
        stages = [Stage(each, config, links, machine) for each in sizes]
        layout = Layout.of(setting.hf_config, config, setting.world_size)
        return cls(setting, config, layout, links, stages, machine.stretch(setting.world_size))

    def phases(self) -> dict[str, Phase]:
        """In the order in which they come."""
        hf, engine = self.setting.hf_config, self.setting.transformer_engine
        wanted = self.config.measures_norms
        passes = passes_of(hf, self.config, self.layout, norms=wanted, transformer_engine=engine)
        gradient = self.through(passes[-1], self.forward_and_backward)
        return {
            "norms": Phase(self.norms(passes[0], gradient)),
            "gradient": Phase(added(gradient, self.forward_only(), self.per_fold(), self.per_step(), self.fixed())),
            "optimizer": Phase(added(self.optimizer(), self.fixed())),
        }

    def norms(self, first: Pass, gradient: Terms) -> Terms:
        """What norms cost beside the gradient's own pass; nothing where none are measured."""
        ratio = norm_over_product(self.setting.hf_config, longest_sample(self.config))
        if self.links.cp > 1:
            ratio = 1.0  # a sample's gradient is a summand: formed, summed over ranks, squared
        if first.kind == "norms":
            found = added(self.through(first, lambda stage, rows: self.norms_only(stage, rows, ratio)), self.fixed())
        elif first.kind == "bookkeep":
            found = {"products": ratio / 3 * gradient["products"]}
        else:
            found = self.stashed() if first.kind == "stash" else {}
        return added(found, self.summands()) if found else found

    def summands(self) -> Terms:
        """The sum of each sample's gradient of each matrix over context-parallel ranks, which its norm waits for."""
        if self.links.cp == 1:
            return {}
        each = max(
            sum(2 * self.links.context(p * d * stage.sizes.wide) * count for p, d, count in stage.sizes.matrices)
            for stage in self.stages
        )
        return {"context": samples_of_a_rank(self.config, self.layout) * each * self.stretch}

    def forward_only(self) -> Terms:
        """The passes for tokens' energies and for the reference's log-probs, where the run makes them."""
        algo = self.config.algo
        count = int(algo.token_wise) + int(algo.kl_coefficient > 0)
        return scaled(self.log_probs(), count) if count else {}

    def log_probs(self) -> Terms:
        """A forward pass over all samples."""
        rows = max(1, self.config.parallel.micro_batch_tokens // longest_sample(self.config))
        share = samples_of_a_rank(self.config, self.layout)
        length = longest_sample(self.config)
        whole = Pass("gradient", share, min(rows, share))
        return self.through(whole, lambda stage, rows: stage.forward(stage.sizes.tokens(rows, length)))

    def forward_and_backward(self, stage: Stage, rows: int) -> Terms:
        """Seconds of a microbatch of so many samples."""
        tokens = stage.sizes.tokens(rows, longest_sample(self.config))
        return added(stage.forward(tokens), stage.backward(tokens))

    def norms_only(self, stage: Stage, rows: int, ratio: float) -> Terms:
        """The same of a pass that makes norms in place of weight gradients, at `ratio` of their arithmetic."""
        tokens = stage.sizes.tokens(rows, longest_sample(self.config))
        forward, backward = stage.forward(tokens), stage.backward(tokens)
        backward["products"] -= (1 - ratio) * forward["products"]
        return added(forward, backward)

    def through(self, run: Pass, cost: Callable[[Stage, int], Terms]) -> Terms:
        """Seconds of all runs of a pass through the pipeline, its bubble as the term "pipeline"."""
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
        return scaled(terms, self.runs(run))

    def runs(self, run: Pass) -> float:
        """How often a rank makes this pass in a step."""
        return samples_of_a_rank(self.config, self.layout) / run.samples

    def stashed(self) -> Terms:
        """Gradients of single samples written, squared and read again."""
        samples = samples_of_a_rank(self.config, self.layout)
        return {"memory": self.moved(max(s.sizes.parameters for s in self.stages) * BYTES_MOVED * samples)}

    def per_fold(self) -> Terms:
        """What is done with the gradient of every fold."""
        folds = folds_of_a_rank(self.config, self.layout)
        dense = max(stage.sizes.dense_parameters * stage.sizes.wide for stage in self.stages)
        whole = max(stage.sizes.parameters * stage.sizes.wide for stage in self.stages)
        return {
            "memory": folds * self.moved(FOLD_MOVES * whole),
            "context": folds * 2 * self.stretch * self.links.context(dense),
        }

    def per_step(self) -> Terms:
        """The exchange over replicas, as far as backward does not hide it."""
        parallel, constants = self.config.parallel, self.setting.machine.constants
        gathers = 1 if parallel.use_distributed_optimizer else 2
        seconds = gathers * max(
            self.links.data(stage.sizes.dense_parameters * stage.sizes.wide)
            + self.links.expert_data(stage.sizes.expert_parameters * stage.sizes.wide)
            for stage in self.stages
        )
        return {"data": seconds * self.stretch * (1 - constants.hidden * parallel.overlap_grad_reduce)}

    def optimizer(self) -> Terms:
        """The update, and the gather of weights that the distributed optimizer's ranks have updated."""
        sharded, links = self.config.parallel.use_distributed_optimizer, self.links
        moved, gathered = 0.0, 0.0
        for stage in self.stages:
            sizes = stage.sizes
            each = 8 * sizes.wide + (2 if sizes.element < sizes.wide else 0)
            dense, experts = float(sizes.dense_parameters), float(sizes.expert_parameters)
            if sharded:
                here = links.data(dense * sizes.element) + links.expert_data(experts * sizes.element)
                gathered, dense, experts = max(gathered, here), dense / (links.dp * links.cp), experts / links.edp
            moved = max(moved, self.moved(each * (dense + experts)))
        return {"memory": moved, "data": gathered * self.stretch}

    def moved(self, num_bytes: float) -> float:
        """Seconds of bytes that a rank's memory moves."""
        machine = self.setting.machine
        return self.stretch * num_bytes / (machine.device.memory_gb_s * 1e9 * machine.constants.memory)

    def fixed(self) -> Terms:
        """What a phase takes however small it is."""
        return {"fixed": self.setting.machine.constants.step_s}
