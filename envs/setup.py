"""Packaging of trial_envs: Gymnasium text environments that need neither Ray nor torch."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

setup(
    name="trial-envs",
    version="0.1.0",  # the trainer's; this folder also installs without it
    description="Text games for language-model agents as fast, faithful Gymnasium environments",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["reinforcement learning", "language-model agents", "Gymnasium", "ALFWorld", "WebShop", "TextWorld"],
    python_requires=">=3.11",
    packages=find_packages(include=["trial_envs", "trial_envs.*", "trial_verifiers"]),
    package_data={"trial_envs": ["py.typed", "openenv/openenv.yaml", "openenv/Dockerfile"]},
    install_requires=["gymnasium>=1.2"],
    extras_require={
        "alfworld": ["alfworld==0.4.2", "textworld==1.7.0", "fast-downward-textworld==20.6.4", "TatSu==5.8.3"],
        "webshop": ["numpy>=2", "rapidfuzz>=3.14", "regex>=2025.9"],
        "search-qa": ["numpy>=2", "regex>=2025.9", "pyarrow>=20"],
        "textworld": ["textworld==1.7.0"],
        "openenv": ["openenv>=0.10,<0.11"],
        "textarena": ["textarena==0.7.4"],
        "reasoning-gym": ["reasoning-gym==0.1.25"],
        "scienceworld": ["scienceworld==1.2.3"],
        "verifiers": ["verifiers==0.4.0"],
        "skyrl-gym": ["skyrl-gym==0.4.0"],
        "gem": ["gem-llm==0.1.0"],
        "endpoint": ["openai>=3.52,<4", "aiohttp>=3.12,<4"],
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
