"""Which worker a leg goes to: one gateway, one of a pool, or the worker that a request header names."""
