"""The objective, equation by equation: pure functions of flat tensors (``docs/algorithm.md`` lists them)."""
