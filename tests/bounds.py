"""How long a test waits for what must come.

A bound ends a hang and measures nothing: what passes never waits for it, also on a machine that stands still for
some seconds. What must not happen late is told by counts, or by a clock that the test moves itself.
"""

HANG_S = 120.0
