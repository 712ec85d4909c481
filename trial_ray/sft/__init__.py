"""Supervised fine-tuning on recorded episodes and on chat messages. In reading order:

- ``messages``: episodes as chat messages, in the format of Hugging Face ``datasets`` and TRL
- ``sources``: episodes of recordings and of files of messages, with the prompts of a run
- ``selection``: which episodes are imitated, and what was left out for which reason
- ``training``: the fine-tuning on the learners of a run, with held-out episodes
"""
