"""The trained causal LM as an RLModule, its log-probabilities, and the models shipped with the package.

- ``module``: the RLModule of the policy: passes, checkpoints, weights for engines, settings of its layers.
- ``folders``: find, check and write model folders, also of models shipped in a package. ``loading``: load models and tokenizers.
- ``prefix_tree``: sequences as prefix trees. ``tree_attention``: attention over them.
- ``layout``: the layout in which a model is scored, by measurement, and packs of forward passes.
- ``logprobs``: log-probabilities, entropies and divergences without whole logits.
- ``sharding``: weights sharded over learners with FSDP. ``tensors``: a model's tensors in states. ``lora``: adapters.
- ``model_shape``: sizes without weights, stop tokens and token ids.
- ``tiny``: tiny untrained models.
"""
