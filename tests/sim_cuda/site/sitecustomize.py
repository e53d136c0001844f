"""Python runs this first: a process with SIM_CUDA_LIBRARY gets the simulated device, and so do its children."""

import os

if os.environ.get("SIM_CUDA_LIBRARY"):
    import sim_cuda

    sim_cuda.install()
