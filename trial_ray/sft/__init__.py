"""Supervised fine-tuning on recorded episodes and on chat messages. In reading order:

- ``messages``: episodes as chat messages, in the format of Hugging Face ``datasets`` and TRL
- ``sources``: loads episodes from recordings and files of messages, with the prompts of a run, and selects the episodes to imitate
- ``training``: fine-tunes on the learners of a run, with checks on held-out episodes
"""
