"""WebShop's text mode, without Java, Flask or spaCy at run time.

In reading order:

- ``env``: the Gymnasium environment; ``tool_env``: a version of it with two tools.
- ``session``, ``pages``, ``actions``, ``reward``: an episode, the pages it shows, its actions and its reward.
- ``shop_set``, ``shops``, ``splits``: the shops of an environment, and the splits of their goals.
- ``catalogue``, ``product``, ``goal``: an indexed shop on disk; :mod:`trial_envs.text_index` searches it.
- ``preparation``, ``sources``, ``nouns``, ``index_writer``: the import of a shop.
- ``generator``, ``difficulty``, ``assortment``: generated shops.
- ``oracle``, ``explorer``, ``forgetful``: the best purchase, and scripted policies.
"""
