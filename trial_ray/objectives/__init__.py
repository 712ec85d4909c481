"""The objective, equation by equation: pure functions of flat tensors (``docs/methods.md`` lists them)."""
