"""The learner: it scores the rollouts of an update, takes its optimizer steps, and exports and saves the weights.

- ``learner``: GRPOLearner, the learner of every method.
- ``method``: the hooks in which methods differ.
- ``advantages``: advantages of the turns of an update. ``rows``: the turns as rows.
- ``update_plan``: the rows of each optimizer step and microbatch, and the learner that computes each.
- ``scoring``: log-probabilities before the update, their comparison with the engine's, and tokens of actions.
- ``loss``: the loss of a microbatch, and weighted means of its metrics.
- ``passes``: forward and backward passes, combined and split to fit into memory.
- ``exchange``: sums and exchange between data-parallel learners.
- ``state``: the optimizers and their files.
- ``recording``: records of updates. ``connectors``: the user's learner connectors.
"""
