"""HTTP/1.1 towards clients, on asyncio protocols: what ``wire`` is towards workers.

A general server pays for each request with a router, middlewares, a stream reader, a response object and several
timers. Here llhttp (httptools) reads, one task answers, and one look at all connections, every second or so, finds
those that have run out of time.

=================  ================================================================================
``request``        the head of a request, and its body as it comes
``response``       the one answer to it: whole, or in pieces
``connection``     one client's connection: its requests in their order, its limits, its end
``server``         sockets, routes, and what is answered before a route has the request
=================  ================================================================================
"""
