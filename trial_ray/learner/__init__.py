"""The learner: it scores the rollouts of an update, takes its optimizer steps, and exports and saves the weights.

- ``learner``: GRPOLearner, the learner of every method.
- ``method``: base class of the training methods, with the hooks in which they differ.
- ``advantages``: advantages of the turns of an update. ``rows``: the turns as training samples, called rows.
- ``update_plan``: the rows of each optimizer step and microbatch, and the learner that computes each.
- ``scoring``: log-probabilities before the update, their comparison with the engine's, and the mask of the actions' tokens.
- ``loss``: the loss of a microbatch, and weighted means of metrics.
- ``passes``: forward and backward passes, combined and split to fit into memory.
- ``exchange``: sums of tensors over data-parallel learners, and exchange of objects between them.
- ``state``: the optimizers and their files.
- ``recording``: files that record updates. ``connectors``: the user's learner connectors.
"""
