"""The document of the control plane (OpenAPI 3.1), made from the routes that are served and the types that read and write their bodies.

The rule for whoever edits it: nothing is written down here that the program knows already; a route without an operation fails a test.
"""

from collections.abc import Mapping
from typing import Final

from polarnode.web.control_plane.openapi.document import document
from polarnode.web.control_plane.openapi.engine import ENGINE
from polarnode.web.control_plane.openapi.operations import OPERATIONS, Operation, Where
from polarnode.web.control_plane.openapi.polar import POLAR

EVERY: Final[Mapping[Where, Operation]] = {**OPERATIONS, **ENGINE, **POLAR}

__all__ = ["EVERY", "Operation", "Where", "document"]
