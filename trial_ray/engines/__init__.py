"""Engines that sample the policy: one protocol, vLLM and transformers behind it, and the weights they hold."""
