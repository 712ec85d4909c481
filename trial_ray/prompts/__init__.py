"""Writing a policy's prompts and reading its responses."""
