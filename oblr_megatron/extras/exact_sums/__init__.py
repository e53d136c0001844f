"""`model.batch_invariant`: trainer and engine compute log-probs with the same bits (docs/zero_mismatch.md).

checks.py       what the mode refuses
operations.py   the operations on a CPU, each sum exact
trainer.py      the trainer's layers: a `model.numerics.Numerics`
engine.py       vLLM's layers
"""
