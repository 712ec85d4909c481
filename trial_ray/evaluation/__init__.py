"""Evaluation on fixed sets of tasks, and comparisons of evaluation results. In reading order:

- ``evaluation_sets``: fixed tasks in a fixed order, chosen by the number of tasks or by the name of the set, and the tasks and
  settings of published evaluations
- ``player``: plays an evaluation set with the policy of a training run, a saved model, an expert, or the environment's solution
- ``local_games``: plays tasks with a model in this process
- ``endpoint``: plays an evaluation set with a model behind an OpenAI-compatible chat API, and compares its prompts with training's
- ``results``: episodes and success rates of an evaluation, their files, and the partial results of an unfinished evaluation
- ``statistics``: confidence intervals and tests
- ``comparison``: paired comparisons, and checks that evaluations may be compared
- ``tables``: tables by method and task family
"""
