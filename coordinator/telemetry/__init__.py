"""What tells of requests and of the fleet, and answers none.

``attempt`` tells of one call of one worker, with bodies that ``redact`` has been over. ``tracing`` passes trace context
on, and ``otel`` exports spans. ``pace`` times tokens, ``server_timing`` tells a client how long its legs took, and
``model_names`` are those that a metric may have. ``recent`` keeps the last requests for the page of ``status``.

Its neighbours in ``coordinator`` are ``logs``, ``metrics``, and ``outcome``, which tells of one request.
"""
