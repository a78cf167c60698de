"""The node: everything put together, in the order it must come apart.

Journal, engines, runtimes, control plane and sessions are contexts, opened in this order and closed in reverse, so that a service outlives its
users. Stopping has an order of its own: refuse new tasks, end the sessions with what they have, then leave the contexts.
"""

import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from socket import socket

import trio
from attrs import define, evolve, frozen

from polarnode.config import NodeConfig
from polarnode.conversation import Json
from polarnode.errors import ConfigError, ModelError, boundary
from polarnode.harnesses import registry as harnesses
from polarnode.merge.trajectory import Identity, Result, assemble
from polarnode.records import Outcome
from polarnode.shell.engine import Engines, EngineSettings, open_engines
from polarnode.shell.gates import Gate
from polarnode.shell.journal import Journal, UnfinishedSession, open_journal
from polarnode.shell.live import LiveSessions
from polarnode.shell.orders import House, Stages
from polarnode.shell.podman import ImageBuilder, Runtimes, RuntimesSettings, default_state_dir, open_runtimes
from polarnode.shell.scheduler import Scheduler, Who
from polarnode.tasks import TaskSpec
from polarnode.tokens import LoadedModel, load_model
from polarnode.web.model_plane import ModelPlane
from polarnode.web.server import open_server

logger = logging.getLogger(__name__)

LOADING_LIMIT = 1  # a tokenizer is loaded once, in a thread of its own
