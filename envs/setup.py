"""Packaging of the environments alone: Gymnasium text environments that need neither Ray nor torch."""

from setuptools import find_packages, setup

setup(
    name="trial-envs",
    version="0.1.0",
    description="Text games for language-model agents as fast, faithful Gymnasium environments",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(),
    package_data={"trial_envs": ["py.typed"]},
    install_requires=["gymnasium>=1.2"],
    extras_require={
        "alfworld": ["alfworld==0.4.2", "textworld==1.7.0", "fast-downward-textworld==20.6.4", "TatSu==5.8.3"],
        "webshop": ["numpy>=2", "rapidfuzz>=3.14", "regex>=2025.9"],
        "textworld": ["textworld==1.7.0"],
        "verifiers": ["verifiers==0.4.0"],
        "skyrl-gym": ["skyrl-gym==0.4.0"],
        "gem": ["gem-llm==0.1.0"],
    },
    entry_points={"gymnasium.envs": ["trial = trial_envs:register_plugin"]},
)
