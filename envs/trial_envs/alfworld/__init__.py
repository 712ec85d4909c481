"""ALFWorld: household text games on the engine of the ``alfworld`` package."""
