"""The trained causal LM as an RLModule, its log-probabilities, and the models shipped with the package.

- ``module``: the RLModule of the policy: passes, checkpoints, weights for engines, settings of its layers.
- ``folders``: find, check and write model folders, also of models shipped in a package. ``loading``: load models and tokenizers.
- ``prefix_tree``: sequences as prefix trees. ``tree_attention``: attention over prefix trees.
- ``layout``: finds the layout (prefix tree, padded rows) in which a model can be scored, and packs rows for forward passes.
- ``logprobs``: log-probabilities, entropies and divergences without whole logits.
- ``sharding``: weights sharded over learners with FSDP. ``tensors``: a model's tensors as arrays. ``lora``: LoRA adapters.
- ``model_shape``: a model's sizes, read without its weights; stop tokens and special tokens.
- ``tiny``: tiny untrained models.
"""
