"""Supervised fine-tuning on recorded episodes and on chat messages. In reading order:

- ``messages``: episodes as chat messages, in the format of Hugging Face ``datasets`` and TRL
- ``sources``: episodes of recordings and of files of messages, with the prompts of a run, and the selection of those to imitate
- ``training``: the fine-tuning on the learners of a run, with held-out episodes
"""
