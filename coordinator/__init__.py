"""The process: sockets, order of work, clocks.

One request, in the order in which the modules see it:

[0] ``http``      HTTP/1.1 as clients speak it, and how long they may take over it
[1] ``server``    routes, size cap, JSON; request id and headers become a context
[2] ``context``   RequestContext: frozen input, then one typed slot per leg's result
[3] ``pipeline``  runs the steps in file order and stops at the first answer or error
[4] ``steps.*``   one leg each: build a body with ``envelope.*``, call, keep the result
[5] ``upstream``  the only HTTP client: picks a worker through ``routing``, times, maps errors
[6] ``envelope``  the wire shapes (pure), used at [4] and [7]
[7] ``respond``   the only writer to the client: picks the shape, and ``relay`` pumps it

In front of it stand ``security.keys`` (who may ask) and ``admission`` (who may begin).

What an operator sees of it comes from ``telemetry.attempt`` (one call of one worker) and ``outcome`` (one request):
lines of ``logs``, instruments of ``metrics``, spans and the status page, which ``telemetry`` has.

``config`` is one YAML file as pydantic models, ``registry`` turns its steps into objects, ``links`` says how the
workers of each role are reached, ``planning`` makes of it all the ``plan`` that requests are answered by, and ``app``
puts both together with a server. ``serve`` is the process, ``reload`` puts another plan in place, and ``cli`` is the
command line.

The packages: ``routing`` picks a worker, ``workers`` has what a leg does there (``wire`` is the hot module of the
program), ``settings`` the sections and values of the file, ``security`` keys, certificates and addresses, ``telemetry``
tells what happened, ``processes`` runs several processes on one port, ``rendering`` does what a render service does
where a file says so, ``derender`` has vLLM's parsers in processes of their own, and ``sim`` is the simulated workers of
``demo`` and of the tests.
"""
