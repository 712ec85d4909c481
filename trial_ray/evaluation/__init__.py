"""Evaluation on fixed sets of tasks, and comparisons of evaluation results. In reading order:

- ``evaluation_sets``: fixed tasks in a fixed order, chosen by number or by name
- ``named_protocols``: tasks and settings of published evaluations
- ``player``: plays an evaluation set during training, with a saved model, an expert, or the environment's own solutions
- ``local_games``: plays tasks with a model in this process
- ``endpoint``: plays an evaluation set with a model behind an OpenAI-compatible chat API, after a check of its prompts
- ``results``: episodes and success rates of an evaluation, their files, and the partial results of an unfinished evaluation
- ``statistics``: confidence intervals and tests
- ``comparison``: paired comparisons, and checks that evaluations may be compared
- ``tables``: tables by method and task family
"""
