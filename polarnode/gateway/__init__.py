"""One model call, from its request to its recorded turn.

`endpoint` takes a request over HTTP and finds its session, which `live_sessions` keeps. `call` runs the call.
What happens in it is decided by `exchange`, which takes events and returns commands, and never waits, reads a
clock or opens a socket. `replay` plans recorded sessions.
"""
