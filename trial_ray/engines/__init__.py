"""Inference engines that sample from the policy, in two implementations (transformers and vLLM), and weight transfer to them.

In reading order:

- ``protocol``: requests and responses, their state inside an engine, and the lock between responses and weight updates.
- ``client``: routes requests to engines, and to another engine if one fails.
- ``link``: request batching, with the client's and the engine's end of the connection.
- ``actor``: base class of the engine actors.
- ``transformers``: engine actor around a transformers model, and an engine for a model of this process.
- ``decoding``: sampling, batches and key-value cache of the transformers engines.
- ``vllm``: engine actor around vLLM.
- ``vllm_worker``: the part of the vLLM engine that runs in vLLM's workers.
- ``weights``: the weights as sent to the engines, and checks that the engines have them.
- ``transfer``: the learner's side of weight transfer: object store, CUDA IPC, NCCL.
- ``pool``: starts, synchronises, monitors and replaces the engines of a run, and logs lost actors.
- ``settings``: default values and checks of an engine's arguments.
- ``requirements``: checks before any actor starts.
"""
