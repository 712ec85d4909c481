"""Settings: their declaration, and all settings of a run."""
