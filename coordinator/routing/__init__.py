"""Which worker a leg goes to: one gateway, a static pool, or the worker that a request header names."""
