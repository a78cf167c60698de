"""The mutants: what each rule of the token contract is, where it stands, how it is broken, and which tests
say so.

Grouped as the rules are: what a path is, where a request attaches, what a prompt is, what is recorded, what
is trained, what is checked.
"""

from mutants import CASES, CONTRACT, SESSIONS, Mutant

EXTENDS_TURN = f"{CONTRACT}::test_prompt_starts_with_extended_turn"
NEVER_ENCODED = f"{CONTRACT}::test_sampled_text_never_encoded"
BENIGN_ECHO = f"{CONTRACT}::test_benign_echo_changes_no_prompt"
CHANGED_MESSAGE = f"{CONTRACT}::test_changed_message_attaches_above_itself"
PARENT_CONDITIONED = f"{CASES}::test_parent_conditioned_on_request_prefix"
OTHER_TOOLS = f"{CASES}::test_other_tools_make_another_root"
TWINS = f"{CASES}::test_twins_told_apart_by_ids"
TWINS_FLAGGED = f"{CASES}::test_twins_without_ids_flagged"
CONTROL_TEXT = f"{CASES}::test_client_control_strings_are_text"
ONE_RENDER = f"{CASES}::test_canonical_tokens_equal_one_render"
MASKS_ADD_UP = f"{CASES}::test_masks_cover_sampled_tokens_once"
SAMPLE_ENDS = f"{CASES}::test_any_sample_end_kept_and_closed"
ANSWER_RESUMED = f"{CASES}::test_trailing_answer_resumes_exactly"
REFERENCE_YIELDS = f"{CASES}::test_reference_yields_to_changed_message"
REWRITTEN_ANSWER = f"{CASES}::test_rewritten_answer_loses_its_tokens"
STOP_STRING = f"{CASES}::test_stop_string_cuts_shown_text_only"
RESUMED_ONCE = f"{CASES}::test_only_unextended_cut_answer_resumes"
CUT_CHOICES = f"{CASES}::test_choices_cut_together_all_trained"
SIBLING_CHOICES = f"{CASES}::test_choices_are_trained_siblings"
RECORDED = f"{CASES}::test_engine_logprobs_recorded_unchanged"
INVARIANTS = "tests/merge/test_merge_checks.py"
BUILDERS = "tests/merge/test_merge_builders.py"
FORKS = "tests/merge/test_merge_forks.py"
LINEAGE = "tests/merge/test_merge_lineage.py"
REFERENCES = "tests/merge/test_merge_references.py"
FINGERPRINT = "tests/merge/test_merge_fingerprint.py"
EXCHANGE = "tests/gateway/test_exchange.py"
RESUME = "tests/gateway/test_exchange_resume.py"
SLICES = "tests/merge/test_merge_slices.py"
CARRIED = "tests/merge/test_merge_carried.py"
THOUGHTS = "tests/merge/test_merge_thoughts.py"
BY_TOKENS = "tests/merge/test_merge_by_tokens.py"
REPEATS = "tests/core/test_repeats.py"
LINE = "tests/support/test_waiting_line.py"
CUT = "tests/properties/test_disconnects.py::test_cut_call_keeps_sampled_tokens"
ORDER = "tests/rollouts/test_group_order.py"
LOOPS = "tests/gateway/test_model_plane_repeats.py"


def rules(module: str, *broken: tuple[str, str, str, tuple[str, ...]]) -> tuple[Mutant, ...]:
    return tuple(
        Mutant(name=name, module=f"polarnode.{module}", old=old, new=new, tests=tests)
        for name, old, new, tests in broken
    )


PATHS = rules(
    "merge.fingerprint",
    (
        "the fingerprint ignores what the client wrote",
        '{message.role}|{message.text}")',
        '{message.role}|")',
        (CHANGED_MESSAGE,),
    ),
    (
        "the fingerprint ignores who spoke",
        '_digest(f"{key}{message.role}|',
        '_digest(f"{key}|',
        (FINGERPRINT,),
    ),
    (
        "the fingerprint ignores what came before",
        '_digest(f"{key}assistant|"',
        '_digest("assistant|"',
        (CHANGED_MESSAGE,),
    ),
    (
        "thinking is in the fingerprint",
        "parts = [message.text.strip(_BLANK_CHARS)]",
        "parts = [message.text.strip(_BLANK_CHARS), message.thinking]",
        (f"{BENIGN_ECHO}[drops_thinking-openai_chat]",),
    ),
    (
        "blanks around our text count",
        "parts = [message.text.strip(_BLANK_CHARS)]",
        "parts = [message.text]",
        (f"{BENIGN_ECHO}[trims_text-anthropic]",),
    ),
    (
        "the spelling of arguments counts",
        "parts += (call.name, spell(call.arguments))",
        "parts += (call.name, call.arguments)",
        (f"{BENIGN_ECHO}[sorts_arguments-openai_chat]",),
    ),
    (
        "the calls of an answer do not count",
        "    for call in message.calls:\n        parts",
        "    for call in ():\n        parts",
        (FINGERPRINT,),
    ),
    (
        "tools are not in the root's key",
        '_digest(f"{tools}.{thinking}")',
        '_digest(f"{thinking}")',
        (OTHER_TOOLS,),
    ),
    ("a key that stands twice is read", 'raise ValueError("a key stands twice")', "pass", (FINGERPRINT,)),
)
REFS = rules(
    "merge.attach",
    (
        "a forged reference is believed",
        "index = self._made.get(run[start : start + _REF_DIGITS])",
        "index = int(run[start : start + _INDEX_DIGITS], 16)",
        (REFERENCES,),
    ),
    (
        "references of another session are believed",
        'payload = f"{self.session_id}:{index}".encode()',
        'payload = f"{index}".encode()',
        (REFERENCES,),
    ),
    (
        "ids are known in one spelling only",
        'bare = _SEPARATORS.sub("", opaque)',
        "bare = opaque",
        (REFERENCES,),
    ),
)
ATTACHING = rules(
    "merge.attach",
    (
        "a reference overrides a changed message",
        "candidates = self.ledger.find_by_prompt(before)\n        proven",
        "candidates = list(self.ledger.turns)\n        proven",
        (REFERENCE_YIELDS,),
    ),
    (
        "a reference excuses other words",
        "any(text is not None and (not text.strip() or same_text(ours.text, text)) for text in texts)",
        "bool(recorded)",
        (REWRITTEN_ANSWER,),
    ),
    (
        "a stop string that comes back is another text",
        "self._stopped(position, message, before) or self._edited_answer_key",
        "self._edited_answer_key",
        ("tests/merge/test_merge_stops.py",),
    ),
    (
        "twins that ended at other stop strings are the same",
        "if stop is None else walk.ledger.find_by_stop(key, stop)",
        "if True else ()",
        ("tests/merge/test_merge_stops.py",),
    ),
    (
        "a change is excused without proof",
        "if index in proven and is_edited_answer(",
        "if is_edited_answer(",
        ("tests/merge/test_merge_attach.py",),
    ),
    (
        "among twins the one least proven is taken",
        "most = max(scores.values())",
        "most = min(scores.values())",
        (TWINS,),
    ),
    (
        "twins that tie are not told of",
        "if len(tied) > 1\n",
        "if len(tied) > 99\n",
        (TWINS_FLAGGED,),
    ),
    (
        "an attached message is passed over",
        "        key = advance(before, message, canonical=self.memo.canonical)\n        if",
        "        key = before if not message.text else advance(before, message)\n        if",
        ("tests/merge/test_merge_attach.py",),
    ),
)
LEDGER = rules(
    "merge.ledger",
    (
        "the engine's failures can be extended",
        'return turn.state != "failed" and turn.answer is not None',
        "return turn.answer is not None",
        ("tests/merge/test_merge_ledger.py", LINEAGE),
    ),
    (
        "a history lacks its samples",
        "        prompt += turn.sampled\n",
        "        prompt += turn.sampled[:0]\n",
        (EXTENDS_TURN,),
    ),
    (
        "a sibling takes the place of its twin",
        "self._after.setdefault(key, []).append(turn.index)",
        "self._after[key] = [turn.index]",
        (TWINS,),
    ),
    (
        "an answer in two halves is known in two pieces only",
        "        if not self._goes_on(turn):\n            return (turn.message_key,)",
        "        if True:\n            return (turn.message_key,)",
        ("tests/merge/test_merge_ledger.py", LINEAGE),
    ),
)
PLANS = rules(
    "merge.lineage",
    (
        "what is new lacks its first message",
        "conversation.messages[found.matched :])\n",
        "conversation.messages[found.matched + 1 :])\n",
        (EXTENDS_TURN,),
    ),
    (
        "what is new repeats the answer",
        "conversation.messages[found.matched :])\n",
        "conversation.messages[max(0, found.matched - 1) :])\n",
        (EXTENDS_TURN, NEVER_ENCODED),
    ),
    (
        "a restored session forgets its numbers",
        "            lineages._graph.enter(turn)\n",
        "",
        (SESSIONS, LINEAGE),
    ),
    (
        "a restored session forgets who asked",
        "            lineages._paths.note(Path.read(turn.before_key), turn.role)\n",
        "",
        (SESSIONS, LINEAGE),
    ),
    (
        "a restored session loses its last turn",
        "sorted(turns, key=lambda turn: turn.index):",
        "sorted(turns, key=lambda turn: turn.index)[:-1]:",
        (SESSIONS,),
    ),
    (
        "a turn that is not the planned one is kept",
        "        self._check_planned(plan, turn)\n",
        "",
        (LINEAGE,),
    ),
    ("a turn can be recorded twice", "        del self._graph.plans[turn.index]\n", "", (LINEAGE,)),
    (
        "halves of an answer are put together in the wrong order",
        "for part in reversed(parts)",
        "for part in parts",
        (LINEAGE, RESUME),
    ),
)
NAMES = rules(
    "merge.turn_kinds",
    (
        "a retry always takes its twin's place",
        "lineage = earlier.lineage if self._is_replaceable(index) else self.next_lineage\n            ",
        "lineage = earlier.lineage\n            ",
        (LINEAGE,),
    ),
    (
        "a cut turn goes on twice",
        'return turn.state == "partial" and bool(turn.sampled) and room and untouched',
        'return turn.state == "partial" and bool(turn.sampled) and room',
        (RESUMED_ONCE,),
    ),
    (
        "a whole turn is gone on with",
        'return turn.state == "partial" and bool',
        "return bool",
        (RESUMED_ONCE,),
    ),
)
PROMPTS = (
    *rules(
        "gateway.call",
        (
            "a whole answer that is cut loses what its reader had not seen",
            "            if withheld is not None:  #",
            "            if False:  #",
            (CUT,),
        ),
        (
            "a history is rendered anew",
            "        if history is None:\n",
            "        if history is None or new:\n",
            (EXTENDS_TURN, NEVER_ENCODED),
        ),
        (
            "a history loses its last token",
            "prompt=history + suffix.ids",
            "prompt=history[:-1] + suffix.ids",
            (EXTENDS_TURN,),
        ),
        (
            "a sample is encoded again",
            "prompt=history + suffix.ids",
            (
                "prompt=history[:-3] +"
                " ids(self.tokenizer.encode_plain(b''.join(map(self.tokenizer.token_bytes,"
                " history[-3:])).decode(errors='replace'))) + suffix.ids"
            ),
            (EXTENDS_TURN, NEVER_ENCODED),
        ),
    ),
    *rules(
        "tokens.template",
        (
            "a cut sample is not closed",
            "else self._close(sampled, conversation, opening)",
            "else ids()",
            (SAMPLE_ENDS,),
        ),
        (
            "the close is not counted",
            "close_length=len(close), notes=notes",
            "close_length=0, notes=notes",
            (SAMPLE_ENDS,),
        ),
        (
            "an answer that comes back last is closed",
            "if not new and not prefill and not (sampled and sampled[-1] in self.stop_ids):",
            "if sampled is None:",
            (ANSWER_RESUMED,),
        ),
        (
            "client text stays as the guard made it",
            "text, encode = rendered.guard.show(piece), self",
            "text, encode = piece, self",
            (CONTROL_TEXT,),
        ),
        (
            "the guard is lifted before the split",
            "self._control.split(rendered.text)",
            "self._control.split(rendered.guard.show(rendered.text))",
            (CONTROL_TEXT,),
        ),
        (
            "the turn end is written twice",
            "if sampled and sampled[-1] in self.family.turn_ends\n",
            "if False\n",
            (SAMPLE_ENDS, ONE_RENDER),
        ),
    ),
    *rules(
        "tokens.template",
        (
            "an open thought is not closed",
            'thought = self.family.think_close if mode == "thinking" else None',
            "thought = None",
            (SAMPLE_ENDS,),
        ),
    ),
    *rules(
        "tokens.rendering",
        (
            "client text reaches the template as it is",
            "[_guarded(shape, guard) for shape in messages]",
            "list(messages)",
            (CONTROL_TEXT,),
        ),
    ),
    *rules(
        "tokens.tokenizer",
        (
            "client text is encoded with control tokens",
            "= tokenizer.encode_batch_fast([text], add",
            "= self._chat.backend_tokenizer.encode_batch_fast([text], add",
            (CONTROL_TEXT,),
        ),
    ),
    *rules(
        "tokens.rendering",
        (
            "only values are made inert, no keys",
            "{self._hidden(key): self.hide(item)",
            "{key: self.hide(item)",
            ("tests/tokens/test_tokens_guard.py",),
        ),
    ),
)
RECORDS = (
    *rules(
        "gateway.sample",
        (
            "the stop token is dropped",
            "return len(chunk.ids), self.parser.feed(chunk.ids)",
            'return len(chunk.ids) - (chunk.finish_reason == "stop"), self.parser.feed(chunk.ids)',
            (EXTENDS_TURN,),
        ),
        (
            "tokens behind the end are kept",
            "                return place + 1, joined(deltas)",
            "                return len(chunk.ids), joined(deltas)",
            (STOP_STRING, EXCHANGE),
        ),
        (
            "versions are not cut with the tokens",
            "self.spans = _within(chunk.version_spans, len(self.ids))",
            "self.spans = chunk.version_spans",
            (RECORDED,),
        ),
        (
            "logprobs are shifted by one",
            "self.logprobs.extend(chunk.logprobs[:kept])",
            "self.logprobs.extend(chunk.logprobs[1:kept] + chunk.logprobs[:1])",
            (RECORDED,),
        ),
        (
            "a resumed prefix is sampled again",
            "self._unsent_deltas = self.parser.feed(self.resumed_prefix)",
            "self._unsent_deltas = self.parser.feed(self.resumed_prefix); self.ids.extend(self.resumed_prefix)",
            (SESSIONS, RESUME),
        ),
    ),
    *rules(
        "gateway.sample",
        (
            "the close is not in the turn",
            "prompt_delta=sample.rendered.delta",
            "prompt_delta=sample.rendered.delta[sample.rendered.close_length :]",
            (SAMPLE_ENDS,),
        ),
        (
            "an answer without a token can be extended",
            "if sample.ids else None\n    held",
            "if sample is not None else None\n    held",
            (EXCHANGE, SESSIONS),
        ),
    ),
    *rules(
        "gateway.exchange",
        (
            "a turn is recorded behind the last bytes",
            '        yield self._record(sample, "complete", at)\n        data +=',
            "        data +=",
            (EXTENDS_TURN, EXCHANGE),
        ),
        (
            "a cut call keeps no turn",
            '            yield self._record(sample, "complete" if sample.full else "partial", at)\n',
            "",
            (EXCHANGE, SESSIONS),
        ),
        (
            "only the first choice is recorded",
            "        for _, sample in list(self._in_progress()):",
            "        for _, sample in list(self._in_progress())[:1]:",
            ("tests/gateway/test_exchange_choices.py", SESSIONS),
        ),
    ),
)
TRAINING = (
    *rules(
        "merge.builders",
        (
            "a shared turn is trained in every row",
            "if turn.index in selection.trained_indexes and turn.index not in taken\n",
            "if turn.index in selection.trained_indexes\n",
            (INVARIANTS, MASKS_ADD_UP),
        ),
        (
            "the leaf alone is trained",
            "for turn in line if turn.index in selection.trained_indexes and",
            "for turn in line[-1:] if turn.index in selection.trained_indexes and",
            (INVARIANTS, MASKS_ADD_UP),
        ),
    ),
    *rules(
        "merge.selection",
        (
            "only one leaf is a row",
            "return tuple(turn for turn in self.trained if turn.index not in inner)",
            "return tuple(turn for turn in self.trained if turn.index not in inner)[:1]",
            (INVARIANTS,),
        ),
        (
            "what a fork inherited is trained again",
            "    if turn.index < settings.inherited_turns:\n",
            "    if turn.index < 0:\n",
            (FORKS,),
        ),
        (
            "superseded turns are trained",
            "if retried and not settings.train_superseded:",
            "if retried and settings.train_superseded:",
            (BUILDERS,),
        ),
        (
            "failed turns are trained",
            'if turn.state == "failed" and not (',
            'if turn.state == "failed" and (',
            (INVARIANTS,),
        ),
        (
            "side calls are trained",
            "return None if turn.role in settings.train_roles else turn.role",
            "return None",
            (BUILDERS,),
        ),
        (
            "another choice supersedes",
            "for turn in living if turn.reason != EXTRA_CHOICE for request",
            "for turn in living for request",
            (CUT_CHOICES,),
        ),
    ),
    *rules(
        "merge.builders",
        (
            "versions are not moved with their turn",
            "at = turn.prompt_length - start\n",
            "at = 0\n",
            (INVARIANTS,),
        ),
        (
            "logprobs of a row are shifted by one",
            "chances[start:end] = memoryview(turn.logprobs)",
            "chances[start:end] = turn.logprobs[1:] + turn.logprobs[:1]",
            (INVARIANTS,),
        ),
        (
            "the last prompt token is trained",
            "mask[turn.prompt_length - cut.start : turn.end - cut.start]",
            "mask[turn.prompt_length - cut.start - 1 : turn.end - cut.start - 1]",
            (INVARIANTS,),
        ),
        (
            "a row's prompt is too long",
            "first = next((turn.prompt_length for turn in shown), cut.end)",
            "first = next((turn.end for turn in shown), cut.end)",
            (INVARIANTS,),
        ),
    ),
)
CHECKING = (
    *rules(
        "merge.invariants",
        ("turns are not checked", "    check_turns(turns)\n    by_index", "    by_index", (INVARIANTS,)),
        (
            "a token may be trained twice",
            "            if twice:\n",
            "            if twice < 0:\n",
            (INVARIANTS,),
        ),
        (
            "a token may be left untrained",
            "    if trained != due:\n",
            "    if trained > due:\n",
            (INVARIANTS,),
        ),
        (
            "a turn may be left out in silence",
            "    if twice or unknown or silent:\n",
            "    if twice or unknown:\n",
            (INVARIANTS,),
        ),
        (
            "strangers may be left out",
            "    if twice or unknown or silent:\n",
            "    if twice or silent:\n",
            (INVARIANTS,),
        ),
        ("the parts of a row are not checked", "    check_parts(built.traces, by_index)\n", "", (SLICES,)),
    ),
    *rules(
        "merge.invariants",
        (
            "a sample's ids are not compared",
            '        _same(f"invariant 1: {name}, sample of turn {turn.index}", tokens, start, turn.sampled)\n',
            "",
            (INVARIANTS,),
        ),
        (
            "a prompt's ids are not compared",
            (
                '        _same(\n            f"invariant 1: {name}, prompt of turn {turn.index}",\n'
                "            tokens,\n            start - len(turn.prompt_delta),\n"
                "            turn.prompt_delta,\n        )\n"
            ),
            "        pass\n",
            (INVARIANTS,),
        ),
        (
            "spans are not compared",
            "if trace.offset < 0 or places != expected:",
            "if trace.offset < 0:",
            (INVARIANTS,),
        ),
        (
            "the mask may lie outside samples",
            "    if ones != sampled:\n",
            "    if ones < sampled:\n",
            (INVARIANTS,),
        ),
        (
            "logprobs are not compared",
            "    if found != expected:\n        place",
            "    if len(found) != len(expected):\n        place",
            (INVARIANTS,),
        ),
        (
            "versions are not compared",
            "    if found != expected:\n        wrong",
            "    if len(found) > 99:\n        wrong",
            (INVARIANTS,),
        ),
        (
            "a trace may end late",
            "if not trace.turn_spans or end != len(trace.token_ids):",
            "if not trace.turn_spans:",
            (INVARIANTS,),
        ),
        (
            "spans may overlap",
            "if span.start < end or span.end <= span.start:",
            "if span.end <= span.start:",
            (INVARIANTS,),
        ),
        (
            "a prompt may be trained",
            "<= len(trace.token_ids) or early:",
            "<= len(trace.token_ids):",
            (INVARIANTS,),
        ),
        (
            "a trace may hold a failed turn",
            "    if not train_failed:\n",
            "    if train_failed is None:\n",
            (INVARIANTS,),
        ),
    ),
    *rules(
        "merge.invariants",
        (
            "a prompt of another length passes",
            "    if turn.prompt_length != before + len(turn.prompt_delta):\n",
            "    if turn.prompt_length < len(turn.prompt_delta):\n",
            (INVARIANTS,),
        ),
        (
            "a logprob may be missing",
            "    if len(turn.logprobs) != sampled:\n",
            "    if len(turn.logprobs) > sampled:\n",
            (INVARIANTS,),
        ),
        (
            "a logprob may be no number",
            "    if not isfinite(sum(turn.logprobs)):\n",
            "    if sum(turn.logprobs) > 0:\n",
            (INVARIANTS,),
        ),
        (
            "versions may have gaps",
            "if span.start != end or span.end <= span.start:",
            "if span.end <= span.start:",
            (INVARIANTS,),
        ),
        (
            "inherited turns may be trained",
            '(reasons.get(index) == "inherited") != (index < inherited)]',
            'reasons.get(index) == "inherited" and index >= inherited]',
            (FORKS,),
        ),
        (
            "a turn may be left out as inherited that is not",
            '(reasons.get(index) == "inherited") != (index < inherited)]',
            'reasons.get(index) != "inherited" and index < inherited]',
            (FORKS,),
        ),
        (
            "a fork may have idle rows",
            "if inherited and 1 not in trace.loss_mask]",
            "if inherited < 0]",
            (FORKS,),
        ),
        (
            "two turns may have one number",
            "        if turn.index in by_index:\n",
            "        if turn.index < 0:\n",
            (INVARIANTS,),
        ),
    ),
)

PARTS = (
    *rules(
        "merge.invariants",
        (
            "parts may be out of order",
            "    if (trace.part, trace.parts) != due or trace.part >= trace.parts:\n",
            "    if trace.part >= trace.parts:\n",
            (SLICES,),
        ),
        (
            "a part may begin with a trained token",
            "    if trace.offset and trace.loss_mask[0]:\n",
            "    if trace.offset < 0 and trace.loss_mask[0]:\n",
            (SLICES,),
        ),
        (
            "parts may overlap",
            "if trace.offset < end or not _is_ancestor(",
            "if not _is_ancestor(",
            (SLICES,),
        ),
        (
            "parts may be of two lines",
            "if trace.offset < end or not _is_ancestor(last, trace.turn_spans[0].turn, by_index):",
            "if trace.offset < end:",
            (SLICES,),
        ),
        (
            "a row may be longer than was asked",
            "    if limit is not None and (length > limit) != trace.over_long:\n",
            "    if limit is not None and length < 0:\n",
            (SLICES,),
        ),
    ),
    *rules(
        "merge.invariants",
        (
            "alternatives are not compared",
            "    if trace.top is not None and trace.top != row_top_logprobs(line, trained):\n",
            "    if trace.top is not None and trace.top.rows < 0:\n",
            (SLICES, CARRIED),
        ),
        (
            "experts are not compared",
            "    if trace.routed is not None and trace.routed != row_routed_experts(",
            "    if trace.routed is None and trace.routed != row_routed_experts(",
            (SLICES, CARRIED),
        ),
    ),
    *rules(
        "merge.builders",
        ("a long row is not cut", "    if limit is None or end <= limit:\n", "    if end > 0:\n", (SLICES,)),
        (
            "a sample that is too long is not marked",
            "over_long=length > limit",
            "over_long=False",
            (SLICES,),
        ),
        (
            "parts show what came before them twice",
            "floor = cut[-1].end if cut else begin",
            "floor = begin",
            (SLICES,),
        ),
    ),
    *rules(
        "merge.builders",
        (
            "a part's spans are those of the row",
            "start=turn.prompt_length - cut.start, end=turn.end - cut.start)",
            "start=turn.prompt_length, end=turn.end)",
            (SLICES,),
        ),
    ),
    *rules(
        "core.trajectory",
        (
            "alternatives that are missing are passed over",
            "TopLogprobs.joined(found) if len(found) == len(trained) else None",
            "TopLogprobs.joined(found)",
            (CARRIED, SLICES),
        ),
    ),
    *rules(
        "merge.token_extras",
        (
            "a session carries without end",
            "        if self.size >= self.limit:\n",
            "        if self.size < 0:\n",
            (CARRIED,),
        ),
    ),
    *rules(
        "merge.lineage",
        (
            "thoughts that a harness dropped are not given back",
            "        return evolve(message, thinking=self.ledger.thinking(author, key))",
            "        return message",
            (THOUGHTS,),
        ),
        (
            "thoughts are given to who claims to be ours",
            "        return turn is not None and is_edited_answer(self.references, turn, message)\n",
            "        return turn is not None\n",
            (THOUGHTS,),
        ),
        (
            "the template's word on thoughts is not asked",
            "and self.drops(new)\n",
            "and not self.drops(new)\n",
            (THOUGHTS,),
        ),
    ),
    *rules(
        "merge.token_forest",
        (
            "a hash is believed without proof",
            "            if twins and twins[-1].line.begins(text, end):\n",
            "            if twins:\n",
            (BY_TOKENS,),
        ),
        (
            "a record extends the shortest turn",
            "zip(reversed(lengths), reversed(found), strict=True)",
            "zip(lengths, found, strict=True)",
            (BY_TOKENS,),
        ),
        (
            "twins are all extended through the last",
            "return twins.pop() if len(twins) > 1 else twins[0]",
            "return twins[-1]",
            (BY_TOKENS,),
        ),
    ),
)

CURSORS = "tests/core/test_cursors.py"

CURSORED = rules(
    "core.cursors",
    (
        "a position in a shared log does not name it",
        'f"{self.log}:{self.position}" if self.log else str(self.position)',
        "str(self.position)",
        (CURSORS,),
    ),
    (
        "a position of an old fleet is no more than garbled",
        "if OLD_FLEET_CURSOR.fullmatch(text):",
        "if False:",
        (CURSORS,),
    ),
)

REPEATED = rules(
    "core.repeats",
    (
        "other arguments are the same call",
        "one.arguments == other.arguments or _sorted(one) == _sorted(other)",
        "True",
        (REPEATS,),
    ),
    (
        "a changed result is a repeat",
        "        and all(map(_same, one.results, other.results))\n",
        "",
        (REPEATS,),
    ),
    ("what a user wrote does not count", "        and _same(one.beside, other.beside)\n", "", (REPEATS,)),
    ("any result is an error", "    ends = ends.lower()\n", "    return True\n", (REPEATS,)),
    (
        "no result is an error",
        "    if len(result) > MAX_ERROR_CHARS:\n",
        "    if result:\n",
        (REPEATS,),
    ),
    (
        "the same error counts for the same call alone",
        "(_alike(turn, last) or (errors and _errors(turn) == errors))",
        "_alike(turn, last)",
        (REPEATS,),
    ),
) + rules(
    "gateway.live_sessions",
    (
        "a loop is seen and no call refused",
        '            return "repeats"\n',
        "            return None\n",
        (LOOPS,),
    ),
    (
        "a loop ends its own conversation alone",
        'self.spent_clock == "repeats" or equal_turns',
        "equal_turns",
        (LOOPS,),
    ),
    (
        "a foreign history is this session's",
        "if most is None or charged < most:",
        "if most is None:",
        (LOOPS,),
    ),
)

WAITING = (
    *rules(
        "support.waiting_line",
        (
            "a group that has begun is like any other",
            "        self._begun.add(cohort)\n",
            "",
            (f"{LINE}::test_begun_group_precedes_older_unbegun",),
        ),
        (
            "who waits does not see that its group has begun",
            "        for priority in self._waiting.get(cohort, ()):\n",
            "        for priority in ():\n",
            (f"{LINE}::test_group_members_enter_together",),
        ),
        ("the youngest group goes first", "cohort.age, cohort\n", "-cohort.age, cohort\n", (ORDER,)),
        (
            "the less urgent goes first",
            "return -priority, cohort not",
            "return priority, cohort not",
            (LINE,),
        ),
        (
            "a line keeps groups that are over",
            "            self._heap.clear()",
            "            pass",
            (f"{LINE}::test_those_that_give_up_leave_nothing_behind",),
        ),
    ),
    *rules(
        "rollouts.scheduler",
        (
            "each task is a group of its own",
            "self._cohorts.setdefault(group_id, EntryCohort())",
            "EntryCohort()",
            (ORDER,),
        ),
    ),
    *rules(
        "engine.protocol",
        (
            "pieces that leave together lose the first one's tokens",
            'ids=b"".join(piece.ids for piece in run)',
            'ids=b"".join(piece.ids for piece in run[1:])',
            ("tests/engine/test_engine_protocol.py",),
        ),
    ),
    *rules(
        "rollouts.session",
        (
            "sessions wait without their group",
            "(priority=self.order.spec.priority, cohort=self.order.cohort, place=place)",
            "(priority=self.order.spec.priority, place=place)",
            (ORDER,),
        ),
    ),
)

MUTANTS = (
    *PATHS,
    *REFS,
    *ATTACHING,
    *LEDGER,
    *PLANS,
    *NAMES,
    *PROMPTS,
    *RECORDS,
    *TRAINING,
    *CHECKING,
    *PARTS,
    *CURSORED,
    *REPEATED,
    *WAITING,
)
