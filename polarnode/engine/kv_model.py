"""One engine's prefix cache and scheduler as SGLang 0.5.23 has them, in virtual time.

Pure: requests in, times and events out. Prompts are keys of whole pages, each of which also stands for
everything before it. Modelled are the radix tree with LRU eviction of leaves that nobody reads, the entry
rule, reading in chunks before sampling, and retraction (sglang `srt/managers/schedule_policy.py`,
`scheduler.py`, `schedule_batch.py`, `srt/mem_cache/unified_radix_cache.py`). Not modelled are the overlap of
reading with sampling, CUDA graphs, overheads of the CPU, and the tokens that a page's unused end costs a
running request.

The constants are those of a dense 8B model in bf16 on an H100. They hold as long as no GPU was lent to
measure them.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Final, Literal

from attrs import define, field, frozen

RESERVED: Final = 4096  # tokens that a request is expected to sample at most (CLIP_MAX_NEW_TOKENS)
# The part that is kept free of what running requests may still sample. It falls with each step.
FIRST_RATIO, LAST_RATIO, RATIO_STEPS = 0.7, 0.098, 600
RETRACT_STEPS: Final = 20  # steps that are kept free after a retraction, for each request that still runs
STEPS: Final = 4  # steps of sampling at once; whatever arrives meanwhile waits for 50 ms at most


@frozen(kw_only=True)
class KvConstants:
    """Constants of an engine, with sizes in tokens. A chunk of n tokens behind a past of p is read in n /
    prefill_tokens_per_s seconds, times 1 + p / past_tokens. A step of sampling takes step_s, plus request_s
    for each request and context_s for each token of context.
    """

    capacity: int
    page: int = 64
    prefill_tokens_per_s: float = 30_000.0
    past_tokens: float = 28_000.0
    step_s: float = 7.5e-3
    request_s: float = 5e-5
    context_s: float = 5.9e-8
    chunk: int = 8192
    most_running: int = 256


@frozen
class KvEvent:
    """A request was read (`began`, with the tokens that the cache had) or is over (`ended`)."""

    at: float
    request: str
    kind: Literal["began", "ended"]
    cached: int = 0


# ── the tree ────────────────────────────────────────────────────────────


@define(eq=False)
class _TreeNode:
    """Pages that follow those of `parent`. `readers` is the number of requests that hold this node or one
    below it.
    """

    keys: list[Hashable]
    parent: "_TreeNode | None"
    children: "dict[Hashable, _TreeNode]" = field(factory=dict)
    readers: int = 0
    used: int = 0


@define(eq=False)
class _PageTree:
    """A radix tree of pages. `pages` counts all of them, and `held` those that some request reads."""

    root: _TreeNode = field(factory=lambda: _TreeNode([], None))
    pages: int = 0
    held: int = 0
    _leaves: list[tuple[int, int, _TreeNode]] = field(factory=list)  # by use; old entries are in it too
    _numbers: "count[int]" = field(factory=lambda: count(1))
    # Numbers in place of times, because many times are the same.
    _uses: "count[int]" = field(factory=lambda: count(1))

    def match(
        self, keys: Sequence[Hashable], *, most: int | None = None, use: bool = True
    ) -> tuple[_TreeNode, int]:
        """The deepest node of a prefix of `keys` (of the first `most`), which is split if the prefix ends
        within it, and the number of pages of the prefix. This counts as a use of them, unless `use` is False.
        """
        node, at, now = self.root, 0, next(self._uses)
        most = len(keys) if most is None else min(most, len(keys))
        while at < most:
            child = node.children.get(keys[at])
            if child is None:
                break
            same = _same(child.keys, keys, at, most)
            if same < len(child.keys):
                child = self._split_node(child, same)
            if use:
                self._mark_used(child, now)
            node, at = child, at + same
            if same < len(child.keys):
                break
        return node, at

    def insert(self, keys: Sequence[Hashable]) -> _TreeNode:
        """Keep these pages. Returns the node in which they end."""
        node, at = self.match(keys)
        if at < len(keys):
            leaf = _TreeNode(list(keys[at:]), node)
            node.children[keys[at]] = leaf
            self.pages += len(leaf.keys)
            self._mark_used(leaf, next(self._uses))
            node = leaf
        return node

    def hold(self, node: _TreeNode, change: int) -> None:
        """Add one reader (1) or remove one (-1)."""
        at: _TreeNode | None = node
        while at is not None and at.parent is not None:
            before, at.readers = at.readers, at.readers + change
            if not before or not at.readers:
                self.held += change * len(at.keys)
            if not at.readers:
                self._push(at)
            at = at.parent

    def evict(self, pages: int) -> None:
        """Drop leaves that nobody reads, those used longest ago first, until so many pages are free."""
        while pages > 0 and self._leaves:
            used, _, node = heappop(self._leaves)
            if used != node.used or node.readers or node.children or node.parent is None:
                continue
            del node.parent.children[node.keys[0]]
            pages -= len(node.keys)
            self.pages -= len(node.keys)
            parent, node.parent = node.parent, None
            self._push(parent)

    def age(self, keys: Sequence[Hashable]) -> None:
        """Let those of these pages that no other prefix shares be evicted first."""
        node, _ = self.match(keys, use=False)
        below = 0
        while node.parent is not None and len(node.children) == below and not node.readers:
            node.used, below = 0, 1
            self._push(node)
            node = node.parent

    def _mark_used(self, node: _TreeNode, now: int) -> None:
        node.used = now
        self._push(node)

    def _push(self, node: _TreeNode) -> None:
        if not node.children and not node.readers and node.parent is not None:
            heappush(self._leaves, (node.used, next(self._numbers), node))

    def _split_node(self, node: _TreeNode, at: int) -> _TreeNode:
        assert node.parent is not None
        upper = _TreeNode(node.keys[:at], node.parent, readers=node.readers, used=node.used)
        node.parent.children[upper.keys[0]] = upper
        node.keys, node.parent = node.keys[at:], upper
        upper.children[node.keys[0]] = node
        self._mark_used(node, next(self._uses))  # as in SGLang, although nobody asked for this part
        return upper


def _same(ours: Sequence[Hashable], keys: Sequence[Hashable], at: int, end: int) -> int:
    """How many pages of `ours` stand in `keys` from that place on, before `end`."""
    most = min(len(ours), end - at)
    if ours[:most] == keys[at : at + most]:
        return most
    return next(number for number in range(most) if ours[number] != keys[at + number])


# ── the engine ────────────────────────────────────────────────────────────


@define(eq=False)
class _Request:
    """A request. `own` are the tokens that are in no page of the tree. `unread` are tokens of the prompt, and
    of what was sampled before a retraction.
    """

    name: str
    pages: Sequence[Hashable]
    tail: Sequence[Hashable]
    prompt: int
    sample: int
    max_new: int
    node: _TreeNode | None = None
    cached: int = 0
    unread: int = 0
    own: int = 0
    sampled: int = 0
    began: bool = False

    @property
    def context(self) -> int:
        return self.prompt + self.sampled

    @property
    def expected(self) -> int:
        """The tokens that the entry rule still expects of it."""
        return min(max(self.max_new - self.sampled, 0), RESERVED)


@define(eq=False)
class KvModel:
    """An engine. Call `submit` and `abort` in order of time, and `advance` to see what happened."""

    constants: KvConstants
    retracted: int = 0
    read_tokens: int = 0
    cached_tokens: int = 0
    _tree: _PageTree = field(factory=_PageTree, init=False)
    _waiting: "deque[_Request]" = field(factory=deque, init=False)
    _reading: "deque[_Request]" = field(factory=deque, init=False)
    _running: "dict[str, _Request]" = field(factory=dict, init=False)
    _own: int = field(default=0, init=False)  # tokens of requests that are in no page of the tree
    _reserve_ratio: float = field(default=FIRST_RATIO, init=False)
    _full: bool = field(default=False, init=False)  # no request enters before another has left
    _clock: float = field(default=0.0, init=False)
    # The iteration that is under way: when it ends, the tokens read by request, and the steps of sampling.
    _ends: float | None = field(default=None, init=False)
    _parts: list[tuple[_Request, int]] = field(factory=list, init=False)
    _steps: int = field(default=0, init=False)

    # ── from outside ──────────────────────────────────────────────────────────

    def submit(
        self,
        request: str,
        pages: Sequence[Hashable],
        *,
        prompt: int,
        sample: int,
        max_new: int,
        tail: Sequence[Hashable] = (),
        now: float,
    ) -> None:
        """Submit a request that will sample `sample` tokens. `pages` are the keys of its prompt's whole
        pages, and `tail` those of the pages that follow when it has ended. Raises ValueError for a request
        that the cache cannot hold alone.
        """
        if prompt + sample > self.constants.capacity:
            raise ValueError(f"{prompt} and {sample} tokens do not fit {self.constants.capacity}")
        most_new = max(sample, min(max_new, self.constants.capacity - prompt - 1))
        self._waiting.append(_Request(request, pages, tail, prompt, sample, most_new))
        self._clock = max(self._clock, now) if self._ends is None else self._clock

    def abort(self, request: str) -> None:
        """End a request, wherever it is."""
        self._waiting = deque(each for each in self._waiting if each.name != request)
        found = [each for each in (*self._reading, *self._running.values()) if each.name == request]
        self._reading = deque(each for each in self._reading if each.name != request)
        self._running.pop(request, None)
        self._parts = [part for part in self._parts if part[0].name != request]
        for each in found:
            self._leave(each)
            self._full = False

    def forget(self, pages: Sequence[Hashable]) -> None:
        """Note a prefix that is not needed soon, which is evicted before others."""
        self._tree.age(pages)

    def flush(self) -> None:
        """Drop every prefix that nobody reads."""
        self._tree.evict(self._tree.pages)

    def sampled(self, request: str) -> int:
        """The tokens that a running request has sampled; 0 for any other request. A request that was
        retracted and runs again keeps what it had.
        """
        running = self._running.get(request)
        return 0 if running is None else running.sampled

    @property
    def used(self) -> int:
        """The tokens in the cache, with those that could be evicted."""
        return self._own + self._tree.pages * self.constants.page

    @property
    def evictable(self) -> int:
        """The tokens of prefixes that no request reads."""
        return (self._tree.pages - self._tree.held) * self.constants.page

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running) + len(self._reading)

    # ── time ──────────────────────────────────────────────────────────────────

    def next_time(self) -> float | None:
        """When something happens without another request. None if nothing ever does."""
        if self._ends is not None:
            return self._ends
        return self._clock if self._waiting or self._reading or self._running else None

    def advance(self, now: float) -> list[KvEvent]:
        """Everything that happened until then, in order."""
        events: list[KvEvent] = []
        while True:
            if self._ends is None:
                self._enter()
                if not self._begin_iteration():
                    self._clock = max(self._clock, now)
                    return events
            assert self._ends is not None
            if self._ends > now:
                return events
            self._clock, self._ends = self._ends, None
            self._end_iteration(events)

    def _begin_iteration(self) -> bool:
        """Read a chunk, or else sample a few steps; False when there is nothing to do."""
        if self._reading:
            self._ends = self._clock + self._read_chunk()
        elif self._running:
            self._ends = self._clock + self._sample_steps()
        else:
            self._reserve_ratio, self._full = FIRST_RATIO, False
        return self._ends is not None

    def _read_chunk(self) -> float:
        """Take the next chunk of prompts. Returns its seconds."""
        constants, left, seconds = self.constants, self.constants.chunk, 0.0
        for request in self._reading:
            part = min(left, request.unread)
            past = request.context - request.unread + part / 2
            seconds += part / constants.prefill_tokens_per_s * (1 + past / constants.past_tokens)
            self._parts.append((request, part))
            left -= part
            if left <= 0:
                break
        return max(seconds, constants.step_s)

    def _sample_steps(self) -> float:
        """Take some steps, as many as there is room for. Returns their seconds."""
        constants = self.constants
        self._make_room()
        requests = self._running.values()
        least = min(request.sample - request.sampled for request in requests)
        room = (self._free() + self.evictable) // len(self._running)
        self._steps = max(1, min(STEPS, least, room))
        context = sum(request.context for request in requests)
        step = constants.step_s + constants.request_s * len(self._running) + constants.context_s * context
        growth = constants.context_s * len(self._running) * self._steps * (self._steps - 1) / 2
        return self._steps * step + growth

    def _end_iteration(self, events: list[KvEvent]) -> None:
        parts, self._parts = self._parts, []
        for request, part in parts:
            request.unread -= part
            self.read_tokens += part
            self._keep(request)
            if not request.unread:
                self._reading.remove(request)
                self._running[request.name] = request
                if not request.began:
                    request.began = True
                    events.append(KvEvent(self._clock, request.name, "began", request.cached))
                request.sampled += 1  # the first token comes from what was read
                self._end_if_sampled(request, events)
        if self._steps:
            needed = self._steps * len(self._running) - self._free()
            self._tree.evict(-(-needed // self.constants.page))
            for request in list(self._running.values()):
                request.sampled += self._steps
                request.own += self._steps
                self._own += self._steps
                self._end_if_sampled(request, events)
            fallen = self._steps * (FIRST_RATIO - LAST_RATIO) / RATIO_STEPS
            self._reserve_ratio = max(LAST_RATIO, self._reserve_ratio - fallen)
            self._steps = 0

    def _end_if_sampled(self, request: _Request, events: list[KvEvent]) -> None:
        if request.sampled >= request.sample:
            del self._running[request.name]
            self._leave(request)
            self._tree.insert([*request.pages, *request.tail])
            self._full = False
            events.append(KvEvent(self._clock, request.name, "ended"))

    # ── memory ────────────────────────────────────────────────────────────────

    def _free(self) -> int:
        return self.constants.capacity - self.used

    def _enter(self) -> None:
        """Let requests in, first come, first served, while the entry rule lets them and the next chunk has
        room. A request that was refused waits until another leaves. Nothing is evicted before all of them
        hold what they found.
        """
        page = self.constants.page
        left = self.constants.chunk - sum(each.unread for each in self._reading)
        while self._waiting and left > 0 and not self._full and self.running < self.constants.most_running:
            request = self._waiting[0]
            # At least one token is read, because otherwise there would be nothing to sample from.
            node, pages = self._tree.match(request.pages, most=(request.context - 1) // page)
            self._tree.hold(node, 1)
            unread = request.context - pages * page
            there = self._free() + self.evictable
            if not self._fits(unread, request, there):
                self._tree.hold(node, -1)
                self._full = self.running > 0
                break
            self._waiting.popleft()
            request.node, request.unread, request.own = node, unread, unread
            if not request.began:
                request.cached = pages * page
                self.cached_tokens += request.cached
            self._own += unread
            left -= unread
            self._reading.append(request)
        self._tree.evict(-(self._free() // page))

    def _fits(self, unread: int, request: _Request, there: int) -> bool:
        """The entry rule. A request that is alone needs no more than its prompt, because what it may sample
        was bounded.
        """
        if not self.running:
            return unread <= there
        page = self.constants.page
        promised = sum(each.expected for each in self._running.values()) * self._reserve_ratio
        promised += sum(each.expected + page for each in self._reading)
        return unread + request.expected + page < there - promised

    def _make_room(self) -> None:
        """Retract requests until the others have room for a step: those with the fewest sampled tokens first,
        and of several such the longest. One request stays.
        """
        retracted = False
        while len(self._running) > 1 and self._free() + self.evictable < len(self._running):
            request = min(self._running.values(), key=lambda each: (each.sampled, -each.prompt))
            del self._running[request.name]
            self._leave(request)
            self._waiting.append(request)
            self.retracted += 1
            retracted = True
        if retracted:
            left = self._running.values()
            most = sum(each.max_new for each in left) + 1
            self._reserve_ratio = min(1.0, sum(each.sampled + RETRACT_STEPS for each in left) / most)
            self._full = False

    def _keep(self, request: _Request) -> None:
        """Let others find what was read of a prompt, while the rest is read and while the request samples."""
        assert request.node is not None
        page = self.constants.page
        node = self._tree.insert(request.pages[: (request.context - request.unread) // page])
        self._tree.hold(node, 1)
        self._tree.hold(request.node, -1)
        own = request.context - min(len(request.pages), (request.context - request.unread) // page) * page
        self._own += own - request.own
        request.node, request.own = node, own

    def _leave(self, request: _Request) -> None:
        if request.node is not None:
            self._tree.hold(request.node, -1)
        self._own -= request.own
        request.node, request.own, request.unread = None, 0, 0
