"""Several serving processes on one port, which ``server.workers`` asks for.

``supervisor`` starts them, and again those that die; ``crew`` is what it has of them, and ``member`` is one of them.
They talk over a ``channel``. ``ports`` are held for all of them, ``shares`` are their parts of the limits, ``totals``
adds up their metrics, and ``rollout`` applies a changed file in every process or in none.
"""
