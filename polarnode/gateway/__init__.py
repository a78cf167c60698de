"""One model call from its request to its recorded turn.

`machine` decides what happens, in the events and commands of `call_events`, without waiting, clocks or
sockets; `call` drives it. `live_sessions` keeps the sessions, `endpoint` serves them, `replay` plans recorded
sessions.
"""
