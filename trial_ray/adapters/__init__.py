"""Environment adapters: descriptions of environments for the trainer, and isolation of their instances.

In reading order:

- ``adapter``: the adapter of an environment, and the interface (``Protocol``) of its expert.
- ``templates``: prompt templates, which write messages and read actions.
- ``alfworld``, ``webshop``, ``search_qa``: the adapters of this package's environments.
- ``external``: the adapters of other libraries' environments, and of environments that run a user's agent program.
- ``registry``: the environments of a run: specs, adapters, keyword arguments and tasks.
- ``guarded``: an instance of an environment whose results are validated.
- ``processes``: an instance of an environment in a separate process.
"""

from trial_ray.adapters.adapter import EnvironmentAdapter, ReportLabels, WarmStartSpec
from trial_ray.adapters.external import program_adapter
from trial_ray.adapters.registry import EnvironmentEntry

__all__ = ["EnvironmentAdapter", "EnvironmentEntry", "ReportLabels", "WarmStartSpec", "program_adapter"]
