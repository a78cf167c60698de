"""This node as a member of its log: its incarnation, what the other nodes are told of it, and its drain.

Each start of a node's process is an incarnation of its name (`journal/log/port.py`). A node alone is the only
member of its own log.
"""

import logging

from attrs import define, evolve, field

from polarnode.journal.log.patience import retry_until_answered
from polarnode.journal.log.port import Claim, Log, NodeFacts

logger = logging.getLogger(__name__)


@define(eq=False)
class LogMembership:
    """The current incarnation of this node. `facts` are what it joined the log with. `draining` says whether
    it takes no new tasks; its sessions go on.
    """

    log: Log
    facts: NodeFacts = field(factory=lambda: NodeFacts(name=""), init=False)
    incarnation: int = field(default=0, init=False)
    # Whether another process with this node's name joined the log after it. Then nothing new begins here.
    replaced: bool = field(default=False, init=False)
    draining: bool = field(default=False, init=False)

    async def join(self, facts: NodeFacts) -> tuple[Claim, ...]:
        """Begin this node's incarnation in the log. Returns the claims that earlier incarnations of its name
        held.
        """
        self.facts = facts
        joined = await retry_until_answered(lambda: self.log.join(facts))
        self.incarnation = joined.incarnation
        return joined.inherited

    async def join_again(self) -> tuple[Claim, ...]:
        """Join the log again after this node was declared lost, because it was stopped for longer than its
        lease. Returns the claims that it held, which are its own again. A node that another process has
        replaced does not join, and holds none.
        """
        rows = {row.incarnation: row for row in await self.log.nodes(every=True)}
        mine = rows.get(self.incarnation)
        if mine is not None and mine.state == "replaced":
            self.replaced = True
            logger.error(
                "another process joined the log as %s: this one ends what it runs and takes nothing new; give"
                " each node a node_id of its own",
                self.facts.name,
            )
            return ()
        logger.warning("this node was silent for longer than its lease: it joins the log again")
        return await self.join(self.facts)

    async def renew_certificate(self, certificate: str) -> None:
        """Tell the other nodes that this one now shows another certificate."""
        self.facts = evolve(self.facts, certificate=certificate)  # for the case that it joins again
        await self.log.renew_certificate(self.incarnation, certificate)

    async def drain(self, draining: bool) -> None:
        """Begin or end a drain, in which the node takes no new tasks. The other nodes of the log are told."""
        self.draining = draining
        await self.log.give_sign(self.incarnation, {"draining": draining})
