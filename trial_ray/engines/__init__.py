"""Inference engines that sample from the policy: one protocol with vLLM and transformers implementations, and weight transfer."""
