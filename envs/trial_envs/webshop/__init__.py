"""WebShop's text mode: catalogue, search, pages, sessions and reward, without Java, Flask or spaCy at run time."""
