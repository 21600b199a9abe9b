"""The admin REST API of a daemon: what it holds, and why tokens hit or miss.

``app.create_app(source)`` makes the application, ``server.AdminServer`` listens and serves it from a
thread of its own. Requests pass, in this order::

    server.py     connections: how many, how long, malformed HTTP
    guard.py      who may ask: token, Host, Origin; how many at once; failures
    routes.py     one function a route, on at most 8 threads
    prefixes.py   bodies with prompts: bounded, a million tokens in small steps
    problems.py   every error, as application/problem+json (RFC 9457)

Nothing here runs on the event loop that serves engines, but both share the interpreter's lock: no
step holds it for more than a few milliseconds.
"""
