"""Bytes of a pass at its peak moments, besides weights, gradients and optimizer state. Imports no torch.

Symbols: n tokens of a microbatch; n' = n / tp with sequence parallelism; V columns of the vocabulary; h hidden size;
f feed-forward width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from oblr_megatron.config import Config
from oblr_megatron.families import OF_MLP
from oblr_megatron.memory.activations import (
    glu_bytes,
    layer_bytes,
    recomputed_mlp_bytes,
)
from oblr_megatron.memory.buffer_sizes import (
    BLOCK_LOGITS,
    CPU_SQUARE_CHUNK,
    CPU_TILE_SIDE,
    GPU_SQUARE_CHUNK,
    GPU_TILE_SIDE,
    KEPT_BYTES,
    KEPT_LOGITS,
)
from oblr_megatron.memory.pass_plan import Pass
from oblr_megatron.memory.rank_shapes import RankSizes, Tokens

UPDATE = "optimizer's update"


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes at one moment of a pass, by purpose. Example: Moment("loss", activations=2**27, logits=2**24)"""

    name: str
    activations: int = 0
    logits: int = 0
    norms: int = 0
    work: int = 0
    updates: bool = False  # the optimizer's update, for which offloaded state is back on the GPU
    in_folds: bool = True  # the sum over folds is held as well; False in a norm pass, which comes before


@dataclass(frozen=True, slots=True)
class PassOnRank:
    """One pass on a rank of one pipeline stage."""

    sizes: RankSizes
    config: Config
    run: Pass
    tokens: Tokens
    stage: int
    on_gpu: bool

    def moments(self) -> Iterator[Moment]:
        """The candidates for the peak."""
        held, kept = self.stored, self.waiting(self.in_flight)
        if self.sizes.is_last:
            yield from self._head(held, kept)
        yield from self._layer_backward(held, kept)
        if self.run.kind == "bookkeep":
            yield self._first_layer_backward()
        yield self._end()

    # stored activations -----------------------------------------------------------------------------------------------

    @property
    def stored(self) -> int:
        """Activations of all microbatches in flight, and megatron-core's permanent buffers."""
        sizes, tokens = self.sizes, self.tokens
        output = 0 if sizes.only_stage else self._residual
        one = self._layers_bytes(-(-sizes.layers // self._chunks)) + output
        rotary = tokens.length * sizes.cp * sizes.head_dim * 4
        return one * self.in_flight + self.gathered + rotary + self._routes + self._recorded + self._token_tables

    @property
    def gathered(self) -> int:
        """megatron-core's buffer for the gathered inputs of sequence parallelism, which stays between steps."""
        return self.tokens.count * self.sizes.hidden * self.sizes.element if self.sizes.sequence_parallel else 0

    @property
    def _routes(self) -> int:
        """Bytes of replayed routes: on a GPU the stage's of the microbatches in flight, in host memory the pass's."""
        sizes, tokens, parallel = self.sizes, self.tokens, self.config.parallel
        if not self.config.model.moe_routing_replay:
            return 0
        of_layer = 2 * sizes.top_k  # int16, for each token
        if self.on_gpu:
            return of_layer * sizes.layers // self._chunks * tokens.split * self.in_flight
        layers = sizes.layers * parallel.pipeline_model_parallel_size
        return of_layer * layers * tokens.length * sizes.cp * self.run.samples

    @property
    def _recorded(self) -> int:
        """Bytes of recorded tokens, int32 and fp32: on a GPU one microbatch's, in host memory the pass's."""
        sizes, tokens = self.sizes, self.tokens
        recorded = min(self.config.recorded_tokens, sizes.columns * sizes.tp)
        if self.on_gpu:
            return 8 * recorded * tokens.count if sizes.is_last else 0
        return 8 * recorded * tokens.length * sizes.cp * self.run.samples

    @property
    def _token_tables(self) -> int:
        """Log-probs [N, T] fp64 on every rank: the reference model's, and the policy's before a batch's later updates.

        Of these a GPU holds one update's; the others are in host memory.
        """
        algo, update = self.config.algo, self.config.per_update
        later = algo.updates_per_batch - 1
        tables = (algo.kl_coefficient > 0 and self.run.kind == "gradient") + (min(1, later) if self.on_gpu else later)
        return tables * update.num_prompts * update.group_size * update.rollout.max_response_tokens * 8

    def _layers_bytes(self, layers: int) -> int:
        parallel, whole = self.config.parallel, layer_bytes(self.sizes, self.tokens, self.config)
        if parallel.recompute_granularity != "full":
            return layers * whole
        group = parallel.recompute_num_layers
        if parallel.recompute_method == "uniform":
            return layers // group * self._residual
        return min(group, layers) * self._residual + max(0, layers - group) * whole

    @property
    def in_flight(self) -> int:
        """Microbatches per chunk of layers that wait for their backward (megatron-core's schedules)."""
        stages, chunks = self.config.parallel.pipeline_model_parallel_size, self._chunks
        if stages == 1:
            return 1
        if chunks == 1:
            return min(self.run.microbatches, stages - self.stage)
        filled = -(-self.run.microbatches // stages) * stages  # `model.step` pads to a multiple
        return min(filled * chunks, (stages - self.stage - 1) * 2 + (chunks - 1) * stages + 1)

    @property
    def _chunks(self) -> int:
        return self.config.parallel.virtual_pipeline_model_parallel_size or 1

    @property
    def recomputed(self) -> int:
        """Recomputed activations of the layers in backward."""
        sizes, parallel = self.sizes, self.config.parallel
        if parallel.recompute_granularity != "full":
            return recomputed_mlp_bytes(sizes, self.tokens, self.config)
        group = parallel.recompute_num_layers if parallel.recompute_method == "uniform" else 1
        return group * layer_bytes(sizes, self.tokens, self.config)

    # partial norms and factors ----------------------------------------------------------------------------------------

    def waiting(self, in_flight: int = 0) -> int:
        """Bytes kept for the norms of the run while `in_flight` microbatches per chunk wait for their backward."""
        run = self.run
        aside = self._aside() if run.kind != "gradient" else 0
        if self.config.model.fp8 != "none" and run.kind in ("norms", "stash") and not self.sizes.adapter_rank:
            aside += (
                self.sizes.layer_weights * self.sizes.wide
            )  # FP8 layers have no taps (`norms.rules.untapped_aside`)
        if run.kind != "bookkeep":
            return aside
        done = max(0, run.samples * self._chunks - run.rows * in_flight) * self.tokens.count // run.rows
        return aside + done * self.factor_bytes // self._chunks

    @property
    def factor_bytes(self) -> int:
        """Bytes per token of x and dy of every linear layer, and of dy of the embedding."""
        sizes = self.sizes
        ends = sizes.hidden * (sizes.is_first + sizes.is_last)  # the output layer makes dy again
        if sizes.adapter_rank:
            ends = 0
        return (sizes.layers * self.layer_factors + ends) * sizes.element

    @property
    def layer_factors(self) -> int:
        """Elements per token of x and dy of the linear layers in one transformer layer, and of its adapters."""
        sizes = self.sizes
        h, q, f = sizes.hidden, sizes.query, sizes.ffn
        inner = 2 * sizes.adapter_rank * sizes.adapted_tokens(self.tokens) // self.tokens.count
        attention = (h + sizes.qkv_weight) + (q + h) + inner
        routed = sizes.top_k * sizes.etp // (sizes.tp if sizes.sequence_parallel else 1)
        return attention + ((h + 2 * f) + (f + h) if f else routed * (2 * h + 3 * sizes.expert_ffn))

    def _aside(self) -> int:
        """Bytes of partial gradients until ranks are summed: small parameters, rows of a tied or split embedding."""
        sizes, run = self.sizes, self.run
        one = (self._vectors() + self._rows()) * sizes.wide
        samples = run.samples
        if run.kind in ("norms", "inline") and one:
            samples = min(samples, max(1, KEPT_BYTES // (one * run.rows)) * run.rows)
        return samples * one

    def _vectors(self) -> int:
        sizes = self.sizes
        if sizes.adapter_rank:  # of each pair A, B the one that is not cut over ranks
            summed_over_ranks = sizes.cp > 1 or sizes.sequence_parallel
            dense = [target for target in sizes.adapted if not (sizes.experts and target in OF_MLP)]
            return summed_over_ranks * sizes.layers * sizes.adapter_rank * sizes.hidden * len(dense)
        head_norms = sizes.head_norms * sizes.layers
        others = (2 * sizes.hidden + sizes.experts * sizes.hidden) * sizes.layers + sizes.hidden * sizes.is_last
        summed = (head_norms if sizes.tp > 1 else 0) + (others if sizes.sequence_parallel else 0)
        return head_norms + others + sizes.qkv_bias * sizes.layers if sizes.cp > 1 else summed

    def _rows(self) -> int:
        """Elements of the embedding rows of one sample, with its tokens spread evenly over the vocabulary shards."""
        sizes = self.sizes
        if sizes.adapter_rank or (self.run.kind == "stash" and sizes.only_stage):
            return 0
        uses = (sizes.is_first + sizes.is_last) * sizes.tied or int(sizes.is_first and sizes.cp > 1)
        length = self.tokens.length * sizes.cp
        return uses * min(length // sizes.tp + 1, sizes.columns) * sizes.hidden

    # moments ----------------------------------------------------------------------------------------------------------

    def _head(self, held: int, kept: int) -> Iterator[Moment]:
        """The output layer in blocks of columns (`model.lm_head`): forward; dy of a block in backward; then its sink.

        Forward keeps the first blocks, and backward begins with them. Every token counts as a response token.
        """
        sizes, n, wide = self.sizes, self.tokens.count, self.sizes.wide
        logit, x = sizes.logit, self.tokens.count * sizes.hidden
        width = max(1, min(sizes.columns, BLOCK_LOGITS[self.on_gpu] // n))
        block, blocks = n * width, -(-sizes.columns // width)
        stored = min(blocks, KEPT_LOGITS[self.on_gpu] // block)
        all_stored = min(stored * block, n * sizes.columns) * wide
        earlier = all_stored if stored < blocks else all_stored - block * wide
        product = (logit if logit < wide else 0) + wide  # the product, and its copy in fp32
        entropy = wide if self.run.kind == "norms" else 2 * wide  # scores, and the exponentials besides
        copies = self._copies_of_factors(width)
        hidden = 2 * self._residual + x * sizes.element * (1 + sizes.sequence_parallel)
        yield Moment("loss", held + hidden, earlier + block * max(product, entropy), kept, copies)
        inputs = held + self._residual + x * (sizes.element + wide)  # of the last norm; x and dx
        work = 0 if sizes.adapter_rank else self._sink_work(width, sizes.hidden) + self._cross_work(width)
        work = max(work, x * sizes.element * (sizes.element < wide))  # a block's summand of dx
        again = block * max(wide + sizes.element, product) if stored < blocks else 0
        dy = block * sizes.element
        yield Moment("loss's backward", inputs, max(all_stored + dy, again), kept, copies)
        yield Moment("output layer's backward", inputs, max(0, all_stored - block * wide) + dy, kept, work)
        norm = self._residual * 2 + self.tokens.split * sizes.hidden * 4 * (4 + (sizes.element < wide))
        yield Moment("last norm's backward", held, 0, kept + self._head_kept, norm)

    def _copies_of_factors(self, width: int) -> int:
        """Bytes of the fp32 copies that a CPU makes of bf16 factors for fp32 logits."""
        sizes = self.sizes
        if self.on_gpu or sizes.logit == sizes.element:
            return 0
        return (self.tokens.count + width) * sizes.hidden * sizes.logit

    def _layer_backward(self, held: int, kept: int) -> Iterator[Moment]:
        """The last layer: its output projection, then its gated unit; of experts with their inputs and gradients."""
        sizes = self.sizes
        held, kept = held + self.recomputed, kept + (self._head_kept if sizes.is_last else 0)
        if sizes.ffn:
            work = max(self._linear_work(sizes.hidden, sizes.ffn), glu_bytes(sizes, self.tokens))
        else:
            work = sizes.routed(self.tokens) * (4 * sizes.expert_ffn + 2 * sizes.hidden) * sizes.element
        yield Moment("last layer's backward", held, 0, kept, self._residual + work)

    def _first_layer_backward(self) -> Moment:
        """The first layer in the last microbatch, when the factors of all other layers are kept."""
        sizes, tokens = self.sizes, self.tokens
        missing = tokens.count * (self.layer_factors + sizes.hidden * sizes.is_first) * sizes.element
        kept = self.waiting() - missing
        layer = layer_bytes(sizes, tokens, self.config)
        return Moment("first layer's backward", layer, 0, kept, self._residual + glu_bytes(sizes, tokens))

    def _end(self) -> Moment:
        """The final norms, or the norm of the gradient: squares in fp64, in chunks."""
        sizes, run = self.sizes, self.run
        chunk = GPU_SQUARE_CHUNK if self.on_gpu else CPU_SQUARE_CHUNK
        scratch = 0 if sizes.element == 8 else 8 * min(sizes.largest_parameter, chunk)
        if run.kind == "bookkeep":  # factors are copied if a microbatch holds several samples
            scratch = max(scratch, 3 * self.tokens.count * sizes.hidden * sizes.element)
        return Moment("end of a pass", 0, 0, self.waiting(), scratch)

    @property
    def _residual(self) -> int:
        return self.tokens.split * self.sizes.hidden * self.sizes.element

    @property
    def _head_kept(self) -> int:
        sizes = self.sizes
        if self.run.kind != "bookkeep" or sizes.adapter_rank:
            return 0
        return self.tokens.count * sizes.hidden * sizes.element

    def _linear_work(self, outputs: int, inputs: int) -> int:
        """Working bytes in the backward of a linear layer: input gradient, gathered input, and the norm sink's."""
        sizes, n = self.sizes, self.tokens.count
        gathered = n * inputs * sizes.element if sizes.sequence_parallel else 0
        return n * inputs * sizes.element + gathered + self._sink_work(outputs, inputs)

    def _sink_work(self, outputs: int, inputs: int) -> int:
        sizes, n, narrow = self.sizes, self.tokens.count, self.sizes.element < self.sizes.wide
        outputs = min(outputs, sizes.adapter_rank or outputs)
        weight = outputs * inputs
        if self.run.kind == "gradient":
            return weight * (sizes.wide if self.on_gpu else sizes.element) * narrow  # the product before its addition
        widened = n * (outputs + inputs) * sizes.wide if narrow and not self.on_gpu else 0
        if self.run.kind == "stash":
            return widened + (weight * sizes.wide if sizes.cp > 1 else 0)
        side = GPU_TILE_SIDE if self.on_gpu else CPU_TILE_SIDE
        tile = min(side * side, weight)
        tiles, length = tile * (sizes.wide + 8), self.tokens.length
        if self.run.kind == "inline":  # with context parallelism a tile is summed in a copy
            return max(widened + tile * sizes.wide, tiles) * (2 if sizes.cp > 1 else 1)
        if length * (outputs + inputs) < 2 * weight:  # the Gram form: products of pairs of tokens, for both factors
            tiles = 2 * min(side * side, n * min(length, 128)) * (sizes.wide + 8)
        return widened + (2 * weight * sizes.wide if sizes.cp > 1 else tiles)

    def _cross_work(self, width: int) -> int:
        """Bytes of a block's part of the cross term of a tied embedding (`segments.product_rows`)."""
        sizes, tokens = self.sizes, self.tokens
        if not sizes.tied or self.run.kind not in ("norms", "inline", "bookkeep"):
            return 0
        rows = min(tokens.length // sizes.tp + 1, width)
        return rows * (tokens.length * sizes.wide + tokens.rows * sizes.hidden * sizes.wide)


def update_moment(sizes: RankSizes, config: Config, updated: int, *, on_gpu: bool) -> Moment:
    """The optimizer's update: square roots of second moments, of one parameter; on a GPU of all `updated` elements.

    megatron-core takes Transformer Engine's FusedAdam where it is installed, which updates its fp32 state in place.
    """
    if config.optimizer.name == "sgd" or sizes.transformer_engine:
        return Moment(UPDATE, updates=True, in_folds=False)
    one_by_one = 2 * sizes.largest_parameter + sizes.hidden * (sizes.ffn or sizes.query)
    elements = updated if on_gpu else min(one_by_one, 3 * updated)
    return Moment(UPDATE, work=elements * sizes.wide, updates=True, in_folds=False)
