"""Evaluation on fixed sets of tasks, and comparisons of its results. In reading order:

- ``evaluation_sets``: fixed tasks in a fixed order, chosen by number or by name
- ``named_protocols``: tasks and settings of published evaluations
- ``player``: plays an evaluation set in training, with a saved model, or with the environment's own solutions
- ``endpoint``: plays an evaluation set with a model behind an OpenAI-compatible chat API, after a check of its prompts
- ``results``: episodes, rates and their files, and the partial results of an unfinished evaluation
- ``statistics``: confidence intervals and tests
- ``comparison``: which evaluations may be compared, and paired comparisons
- ``tables``: tables by method and task family
"""
