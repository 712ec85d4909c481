"""Inference engines that sample from the policy, in two implementations (transformers and vLLM), and weight transfer to them.

In reading order:

- ``protocol``: requests, responses, the state of a request inside an engine, and the lock that separates weight updates from
  sampling.
- ``client``: routes requests to engines, and to another engine if one fails.
- ``link``: messages with many requests or answers, at the client's and at the engine's end of the connection.
- ``actor``: base class of the engine actors.
- ``transformers``: engine actor around a transformers model, and an engine without an actor, for a model of the same process.
- ``decoding``: sampling, batches and key-value cache of the transformers engines.
- ``vllm``: engine actor around vLLM.
- ``vllm_worker``: the part of the vLLM engine that runs in vLLM's workers.
- ``weights``: the format in which weights are sent to the engines, and checks that the engines have these weights.
- ``transfer``: the learner's side of weight transfer: object store, CUDA IPC, NCCL.
- ``pool``: starts, monitors and replaces the engines of a run, sends them weights, and logs which actors were lost.
- ``settings``: default values and checks of an engine's arguments.
- ``requirements``: checks, before any actor starts, that an engine is installed and accepts its arguments.
"""
