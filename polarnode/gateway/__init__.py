"""One model call, from its request to its recorded turn.

`machine` decides what happens. It takes the events and returns the commands of `call_events`, and it never
waits, reads a clock or opens a socket. `call` drives it. `live_sessions` keeps the sessions, `endpoint`
serves them over HTTP, and `replay` plans recorded sessions.
"""
