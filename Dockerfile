# The GPU stack as an image: requirements/gpu.txt, Transformer Engine built against its torch, and this package.
#     docker build --tag oblr-megatron .
# Neither this image nor what is in it has run on a GPU yet. docs/cluster.md makes a .sqsh of it for enroot and pyxis.
#
# The host brings the driver, 580 or newer. torch's CUDA libraries are wheels of the lock; the toolkit of this base is for
# kernels that vLLM (FlashInfer) compiles and links at run time. Ubuntu 24.04 has Python 3.12.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

# g++ and Python.h: Transformer Engine is built here, and torch and Triton compile kernels at run time.
# ibverbs: NCCL over InfiniBand.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends \
      ca-certificates g++ ibverbs-providers libibverbs1 librdmacm1 python3.12-dev python3.12-venv \
 && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/oblr
ENV PATH=$VIRTUAL_ENV/bin:$PATH

WORKDIR /opt/oblr-megatron
# First what changes rarely: these layers stay cached.
COPY requirements requirements
RUN python3.12 -m venv "$VIRTUAL_ENV" \
 && pip install --no-cache-dir --no-deps --requirement requirements/gpu.txt
RUN requirements/build_te.sh "$VIRTUAL_ENV/bin/python"

COPY . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation . \
 && oblr-megatron doctor --lock requirements/gpu.txt requirements/te.txt

CMD ["oblr-megatron", "doctor"]
