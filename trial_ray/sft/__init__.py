"""Supervised fine-tuning on recorded episodes and on chat messages. In reading order:

- ``messages``: episodes as chat messages, in the format of Hugging Face ``datasets`` and TRL
- ``sources``: loads episodes from recordings and files of messages, writes their prompts, and selects the episodes to imitate
- ``training``: fine-tunes with the learners that reinforcement learning uses, and checks on held-out episodes
"""
