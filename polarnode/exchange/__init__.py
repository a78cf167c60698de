"""One model request as a machine: told what happened, it says what to do. Whoever waits imports it from here.

Below the line: nothing in this room waits, reads a clock or opens a socket. `events` and `commands` are its two vocabularies, `machine` decides.
"""

from polarnode.exchange.asking import as_kept
from polarnode.exchange.commands import Abandon, Abort, Answered, Break, Command, Done, Generate, Outgoing, Record, Render, Send
from polarnode.exchange.events import Asked, ClientLeft, EngineFailed, Event, Produced, Quiet, Rendered, SessionEnded, Unrenderable
from polarnode.exchange.machine import SESSION_OVER, Exchange, Terms
from polarnode.exchange.sample import AnswerParser
from polarnode.exchange.speaking import NOTHING, silence, speak

__all__ = [
    "NOTHING", "SESSION_OVER",
    "Abandon", "Abort", "AnswerParser", "Answered", "Asked", "Break", "ClientLeft", "Command", "Done", "EngineFailed", "Event", "Exchange",
    "Generate", "Outgoing", "Produced", "Quiet", "Record", "Render", "Rendered", "Send", "SessionEnded", "Terms", "Unrenderable",
    "as_kept", "silence", "speak",
]  # fmt: skip
