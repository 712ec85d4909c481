"""WebShop: catalogue, search, pages, sessions and reward, in text mode, without Java, Flask or spaCy at run time."""
