"""Settings: how one is declared, and all that there are."""
