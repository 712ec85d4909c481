"""WebShop's text mode: catalogue, search, pages, sessions and reward, without Java, Flask or spaCy at run time."""

from importlib.util import find_spec

from trial_envs.core.extras import install_command
from trial_envs.errors import MissingPackageError

_missing = [name for name in ("numpy", "rapidfuzz", "regex") if find_spec(name) is None]
if _missing:
    raise MissingPackageError(f"Not installed: {', '.join(_missing)}; {install_command('webshop')}")
