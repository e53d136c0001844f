"""`oblr-megatron quantize`: an FP8 copy of a Hugging Face directory that vLLM loads, and how far it is from it.

Data flow: calibration rows -> `calibration` (rows packed without padding) -> `fp8` (scales, written weights, the proof
that they are the measured ones) -> `fidelity` (logits) and `accuracy` (answers) -> `report`.

Only `fp8` imports nvidia-modelopt, whose import registers hooks in transformers and megatron-core: nothing that trains
may import this package.
"""
