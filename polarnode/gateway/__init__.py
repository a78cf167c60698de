"""One model request as a machine: told what happened, it says what to do. Whoever waits imports it from here.

Below the line: nothing in this room waits, reads a clock or opens a socket. `events` and `commands` are its
two vocabularies, `machine` decides.
"""
