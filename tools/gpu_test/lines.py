"""The table: every line, what it needs, what it expects. `python -m tools.gpu_test --list` prints it."""

from __future__ import annotations

from tools.gpu_test.line import Bound, Line

GPU = ("CUDA", "compiler")
TE = (*GPU, "Transformer Engine")
FULL = "layers=28 vocabulary=151936 tied=1 tokens=2048 dtype=bfloat16"
TINY_RUN = {"tiny": True, "dtype": "float32", "tokens": 40}
TINY_REPLAY = {**TINY_RUN, "layers_of": "auto", "prompts": 4, "group": 3, "steps": 2}
TINY_CELL = {"shape": "tiny", "layers": 1, "dtype": "bfloat16", "layers_of": "auto"}
TINY_EXPERTS = {
    "hidden_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "intermediate_size": 16,
}
TINY_EXPERTS |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 1}

PROBE = Line(name="probe", title="what this machine lacks", measure="needs:probe", minutes=3)

TABLE = (
    Line(
        name="0",
        title="this machine: versions, driver, compilers",
        measure="norms:machine",
        bounds=(Bound("problems", high=0),),
        minutes=3,
    ),
    Line(
        name="1",
        title="norms on megatron-core's own layers",
        measure="norms:tests",
        needs=GPU,
        bounds=(
            Bound("tests failed", high=0),
            Bound("tests passed", low=5),
            Bound("largest relative_error_to_gradient", high=1e-3),
            Bound("largest relative_error_to_fp64", high=2e-2),
        ),
        arguments={"paths": ["tests/gpu/test_gradnorm_gpu.py"], "select": "local or fp32 or buffers"},
        rehearsal={"paths": ["tests/unit/norms/test_products.py"], "select": ""},
    ),
    Line(
        name="2",
        title="cost of norms against a plain step",
        measure="norms:ratios",
        needs=GPU,
        bounds=(
            Bound("step / plain, inline, *, 8192 tokens", high=1.1),
            Bound("step / plain, stash, *, 8192 tokens", high=1.1),
            Bound("step / plain, *", high=2.5),
        ),
        minutes=9,
        rehearsal={"shapes": ["tiny"], "tokens": [32], "layers_of": "auto", "more": ["--layers", "1", "--steps", "2"]},
    ),
    Line(
        name="2b",
        title="waits for the device in `bookkeep`",
        measure="norms:waits",
        needs=GPU,
        bounds=(Bound("waits that bookkeep adds, per layer and sample", high=1),),
        rehearsal={"shape": "tiny", "tokens": 32, "layers": 2, "dtype": "float32"},
    ),
    Line(
        name="2c",
        title="squares of gradient tiles in fp64",
        measure="kernels:squares",
        needs=("CUDA",),
        bounds=(Bound("element_flops, *", 1024, 4096), Bound("chosen / faster method, *", high=1.25)),
        rehearsal={"device": "cpu", "dtype": "float32", "shapes": [(32, 48)], "lengths": [16, 64]},
    ),
    Line(
        name="3",
        title="memory of a step of Qwen3-0.6B against the estimate",
        measure="norms:memory",
        needs=GPU,
        bounds=(Bound("estimate / measured, *", 0.9, 1.1),),
        arguments={
            "cases": [
                f"two_pass {FULL} layers_of=local",
                f"inline {FULL} layers_of=local",
                f"stash {FULL} layers_of=local",
                f"bookkeep {FULL} layers_of=local",
            ]
        },
        minutes=8,
        rehearsal={"cases": ["stash shape=tiny tokens=64 vocabulary=128"]},
    ),
    Line(
        name="3b",
        title="memory of a trainer's CUDA context",
        measure="engines:context",
        needs=("CUDA", "nvidia-smi"),
        bounds=(Bound("GiB of a rank's context", 0.1, 2),),
        minutes=3,
        rehearsal={"side": 64},
    ),
    Line(
        name="4",
        title="Transformer Engine and FP8: logits, norms",
        measure="norms:tests",
        needs=TE,
        bounds=(
            Bound("tests failed", high=0),
            Bound("tests passed", low=10),
            Bound("largest relative_error", high=3e-2),
            Bound("largest relative_error_to_gradient", high=1e-3),
            Bound("largest relative_difference_to_bf16", high=0.2, optional=True),
        ),
        arguments={"paths": ["tests/gpu"], "select": "not sleep"},
        minutes=9,
        rehearsal={"paths": ["tests/unit/norms/test_products.py"], "select": "not sleep"},
    ),
    Line(
        name="4b",
        title="cuDNN's plans for 40 lengths, without and with rows of 128",
        measure="kernels:plans",
        needs=TE,
        bounds=(Bound("ms that a new length adds", low=20), Bound("ms that a new length adds, rows of 128", high=5)),
        rehearsal={**TINY_CELL, "count": 2, "shortest": 40},
    ),
    Line(
        name="4c",
        title="gaps between kernels, one sample a microbatch",
        measure="kernels:gaps",
        needs=TE,
        bounds=(Bound("share in kernels, *, 8192 tokens", low=0.9),),
        rehearsal={**TINY_CELL, "tokens": [32], "modes": ["bookkeep"]},
    ),
    Line(
        name="4d",
        title="gradients of experts under taps",
        measure="kernels:experts",
        needs=TE,
        bounds=(Bound("share that adds and clears", high=0.15),),
        rehearsal={"sizes": TINY_EXPERTS, "tokens": 40, "dtype": "bfloat16", "layers_of": "auto"},
    ),
    Line(
        name="5",
        title="weights of Qwen3-0.6B to another process by CUDA IPC",
        measure="transfer:ipc",
        needs=("CUDA",),
        bounds=(
            Bound("tensors that differ", high=0),
            Bound("MB that do not come back", high=1),
            Bound("GB/s without checksums", low=50),
        ),
        rehearsal={"layers": 1, "vocab": 4096, "rounds": 1, "checksums": True},
    ),
    *(
        Line(
            name=name,
            title=f"whole steps by replay, {what}",
            measure="runs:replay",
            needs=needs,
            bounds=(
                Bound("MFU, plain", low=0.2, optional=True),
                Bound("step / plain, inline", high=1.15),
                Bound("step / plain, stash", high=1.15),
                Bound("measured / planner, *", 0.67, 1.5, optional=True),
            ),
            arguments={"layers_of": layers_of},
            minutes=9,
            rehearsal=TINY_REPLAY,
        )
        for name, what, layers_of, needs in (
            ("6", "megatron-core's layers", "local", GPU),
            ("6b", "Transformer Engine's layers", "transformer_engine", TE),
        )
    ),
    Line(
        name="6c",
        title="wait of the step loop for a background save",
        measure="runs:save",
        needs=GPU,
        bounds=(Bound("seconds, blocked", high=2),),
        minutes=8,
        rehearsal={"layers": 1, "vocab": 4096, "rounds": 1},
    ),
    Line(
        name="7",
        title="contexts on each GPU, two ranks",
        measure="runs:contexts",
        needs=("2 GPUs", "nvidia-smi", "compiler"),
        bounds=(
            Bound("GPUs with processes", 2, 2),
            Bound("processes on the fullest GPU", 1, 1),
        ),
        rehearsal=TINY_RUN,
    ),
    Line(
        name="7b",
        title="end of a run in which one of two ranks raises",
        measure="runs:leaving",
        needs=("2 GPUs", "compiler"),
        bounds=(Bound("seconds from the exception to the end", high=60), Bound("exit status", 1, 1)),
        rehearsal=TINY_RUN,
    ),
    Line(
        name="7c",
        title="exchange of objects by number of ranks",
        measure="runs:exchange",
        needs=("8 cores",),
        bounds=(Bound("seconds at 1,024 ranks*", high=10),),
        rehearsal={"counts": [2], "megabytes": 0.01, "rounds": 1},
    ),
    Line(
        name="8",
        title="sleep and wake of vLLM: tests",
        measure="norms:tests",
        needs=("CUDA", "vLLM", "compiler"),
        bounds=(Bound("tests failed", high=0), Bound("tests passed", low=2)),
        arguments={"paths": ["tests/gpu/test_sleep_gpu.py"]},
        minutes=8,
        rehearsal={"paths": ["tests/unit/norms/test_products.py"]},
    ),
    Line(
        name="8b",
        title="memory of a sleeping engine, seconds of sleep, wake and push",
        measure="engines:sleeping",
        needs=("CUDA", "vLLM", "nvidia-smi", "compiler"),
        bounds=(
            Bound("GiB of the engine asleep, *", high=2),
            Bound("cycles with other samples, *", high=0),
            Bound("GB/s of a push, *", low=10),
        ),
        minutes=10,
        rehearsal={"tiny": True, "dtype": "float32", "cycles": 1},
    ),
)

LINES = {line.name: line for line in TABLE}
