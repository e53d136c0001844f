"""Experiment trackers: wandb, mlflow, trackio, tensorboard, and those of other packages. Imports no torch.

The first rank starts one process a tracker (feed.py -> process.py). So a tracker that hangs, crashes or fills its disk
cannot touch the run. A record passes through a bounded queue and a pipe, and counts as lost until the process has
acknowledged it.

registry.py (which trackers there are) <- base.py (what a tracker is) <- wandb.py, tensorboard.py, extras
"""
