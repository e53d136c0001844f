"""`oblr-megatron quantize`: writes an FP8 copy of a Hugging Face directory for vLLM, and measures its error.

Data flow: calibration.py (rows packed without padding) -> fp8.py (scales, weights, check of the written files)
-> fidelity.py (logits) and accuracy.py (answers) -> summary.py.

Only fp8.py imports nvidia-modelopt, which registers hooks in transformers and megatron-core. Training code must not
import this package.
"""
