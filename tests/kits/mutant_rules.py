"""The mutants: what each rule of the token contract is, where it stands, how it is broken, and which tests
say so.

Grouped as the rules are: what a path is, where a request attaches, what a prompt is, what is recorded, what
is trained, what is checked.
"""

from mutants import CASES, CONTRACT, SESSIONS, Mutant

P1 = f"{CONTRACT}::test_p1_a_prompt_starts_with_the_turn_it_extends"
P2 = f"{CONTRACT}::test_p2_sampled_text_never_reaches_the_encoder"
P3 = f"{CONTRACT}::test_p3_a_benign_echo_changes_no_prompt"
P4 = f"{CONTRACT}::test_p4_a_changed_client_message_attaches_above_itself_and_is_shown"
P5 = f"{CASES}::test_p5_a_parent_was_conditioned_on_exactly_what_the_request_says"
P5_TOOLS = f"{CASES}::test_p5_the_same_words_under_other_tools_are_another_root"
P6 = f"{CASES}::test_p6_twins_are_told_apart_by_their_ids"
P6_FLAG = f"{CASES}::test_p6_twins_without_ids_are_flagged"
P7 = f"{CASES}::test_p7_every_control_string_is_text_wherever_a_client_writes_it"
P8 = f"{CASES}::test_p8_canonical_tokens_make_the_prompt_of_one_render"
P9 = f"{CASES}::test_p9_the_masks_add_up_to_every_sampled_token_once"
P10 = f"{CASES}::test_p10_however_a_sample_ends_it_is_kept_and_closed_by_the_rule"
P10_ON = f"{CASES}::test_p10_an_answer_with_nothing_behind_it_goes_on_exactly"
P10_REF = f"{CASES}::test_p10_a_reference_never_overrides_a_changed_client_message"
P10_TEXT = f"{CASES}::test_p10_our_words_rewritten_are_no_longer_ours"
P10_STOP = f"{CASES}::test_p10_a_stop_string_cuts_what_is_shown_and_not_what_was_sampled"
P10_TWICE = f"{CASES}::test_p10_only_a_cut_answer_that_nothing_went_on_from_is_gone_on_with"
P10_CUT_N = f"{CASES}::test_p10_choices_that_are_cut_together_are_all_trained"
P10_N = f"{CASES}::test_p10_choices_of_one_call_are_siblings_and_each_is_trained"
RECORDED = f"{CASES}::test_p10_what_the_engine_said_of_each_token_is_what_is_recorded"
LAWS = "tests/merge/test_merge_checks.py"
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
CUT = (
    "tests/properties/test_disconnects.py::test_a_cut_call_keeps_what_was_sampled_and_leaves_nothing_running"
)
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
        (P4,),
    ),
    (
        "the fingerprint ignores who spoke",
        '_digest(f"{key}{message.role}|',
        '_digest(f"{key}|',
        (FINGERPRINT,),
    ),
    ("the fingerprint ignores what came before", '_digest(f"{key}assistant|"', '_digest("assistant|"', (P4,)),
    (
        "thinking is in the fingerprint",
        "parts = [message.text.strip(_BLANK_CHARS)]",
        "parts = [message.text.strip(_BLANK_CHARS), message.thinking]",
        (f"{P3}[drops_thinking-openai_chat]",),
    ),
    (
        "blanks around our text count",
        "parts = [message.text.strip(_BLANK_CHARS)]",
        "parts = [message.text]",
        (f"{P3}[trims_text-anthropic]",),
    ),
    (
        "the spelling of arguments counts",
        "parts += (call.name, spell(call.arguments))",
        "parts += (call.name, call.arguments)",
        (f"{P3}[sorts_arguments-openai_chat]",),
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
        (P5_TOOLS,),
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
        (P10_REF,),
    ),
    (
        "a reference excuses other words",
        "any(text is not None and (not text.strip() or same_text(ours.text, text)) for text in texts)",
        "bool(recorded)",
        (P10_TEXT,),
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
        (P6,),
    ),
    (
        "twins that tie are not told of",
        "if len(tied) > 1\n",
        "if len(tied) > 99\n",
        (P6_FLAG,),
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
        (P1,),
    ),
    (
        "a sibling takes the place of its twin",
        "self._after.setdefault(key, []).append(turn.index)",
        "self._after[key] = [turn.index]",
        (P6,),
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
        (P1,),
    ),
    (
        "what is new repeats the answer",
        "conversation.messages[found.matched :])\n",
        "conversation.messages[max(0, found.matched - 1) :])\n",
        (P1, P2),
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
        (P10_TWICE,),
    ),
    ("a whole turn is gone on with", 'return turn.state == "partial" and bool', "return bool", (P10_TWICE,)),
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
            (P1, P2),
        ),
        (
            "a history loses its last token",
            "prompt=history + suffix.ids",
            "prompt=history[:-1] + suffix.ids",
            (P1,),
        ),
        (
            "a sample is encoded again",
            "prompt=history + suffix.ids",
            (
                "prompt=history[:-3] +"
                " ids(self.tokenizer.encode_plain(b''.join(map(self.tokenizer.token_bytes,"
                " history[-3:])).decode(errors='replace'))) + suffix.ids"
            ),
            (P1, P2),
        ),
    ),
    *rules(
        "tokens.template",
        (
            "a cut sample is not closed",
            "else self._close(sampled, conversation, opening)",
            "else ids()",
            (P10,),
        ),
        (
            "the close is not counted",
            "close_length=len(close), notes=notes",
            "close_length=0, notes=notes",
            (P10,),
        ),
        (
            "an answer that comes back last is closed",
            "if not new and not prefill and not (sampled and sampled[-1] in self.stop_ids):",
            "if sampled is None:",
            (P10_ON,),
        ),
        (
            "client text stays as the guard made it",
            "text, encode = rendered.guard.show(piece), self",
            "text, encode = piece, self",
            (P7,),
        ),
        (
            "the guard is lifted before the split",
            "self._control.split(rendered.text)",
            "self._control.split(rendered.guard.show(rendered.text))",
            (P7,),
        ),
        (
            "the turn end is written twice",
            "if sampled and sampled[-1] in self.family.turn_ends\n",
            "if False\n",
            (P10, P8),
        ),
    ),
    *rules(
        "tokens.template",
        (
            "an open thought is not closed",
            'thought = self.family.think_close if mode == "thinking" else None',
            "thought = None",
            (P10,),
        ),
    ),
    *rules(
        "tokens.rendering",
        (
            "client text reaches the template as it is",
            "[_guarded(shape, guard) for shape in messages]",
            "list(messages)",
            (P7,),
        ),
    ),
    *rules(
        "tokens.tokenizer",
        (
            "client text is encoded with control tokens",
            "= tokenizer.encode_batch_fast([text], add",
            "= self._chat.backend_tokenizer.encode_batch_fast([text], add",
            (P7,),
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
            (P1,),
        ),
        (
            "tokens behind the end are kept",
            "                return place + 1, joined(deltas)",
            "                return len(chunk.ids), joined(deltas)",
            (P10_STOP, EXCHANGE),
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
            (P10,),
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
            (P1, EXCHANGE),
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
            (LAWS, P9),
        ),
        (
            "the leaf alone is trained",
            "for turn in line if turn.index in selection.trained_indexes and",
            "for turn in line[-1:] if turn.index in selection.trained_indexes and",
            (LAWS, P9),
        ),
    ),
    *rules(
        "merge.selection",
        (
            "only one leaf is a row",
            "return tuple(turn for turn in self.trained if turn.index not in inner)",
            "return tuple(turn for turn in self.trained if turn.index not in inner)[:1]",
            (LAWS,),
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
            (LAWS,),
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
            (P10_CUT_N,),
        ),
    ),
    *rules(
        "merge.builders",
        ("versions are not moved with their turn", "at = turn.prompt_length - start\n", "at = 0\n", (LAWS,)),
        (
            "logprobs of a row are shifted by one",
            "chances[start:end] = memoryview(turn.logprobs)",
            "chances[start:end] = turn.logprobs[1:] + turn.logprobs[:1]",
            (LAWS,),
        ),
        (
            "the last prompt token is trained",
            "mask[turn.prompt_length - cut.start : turn.end - cut.start]",
            "mask[turn.prompt_length - cut.start - 1 : turn.end - cut.start - 1]",
            (LAWS,),
        ),
        (
            "a row's prompt is too long",
            "first = next((turn.prompt_length for turn in shown), cut.end)",
            "first = next((turn.end for turn in shown), cut.end)",
            (LAWS,),
        ),
    ),
)
CHECKING = (
    *rules(
        "merge.invariants",
        ("turns are not checked", "    check_turns(turns)\n    by_index", "    by_index", (LAWS,)),
        ("a token may be trained twice", "            if twice:\n", "            if twice < 0:\n", (LAWS,)),
        ("a token may be left untrained", "    if trained != due:\n", "    if trained > due:\n", (LAWS,)),
        (
            "a turn may be left out in silence",
            "    if twice or unknown or silent:\n",
            "    if twice or unknown:\n",
            (LAWS,),
        ),
        (
            "strangers may be left out",
            "    if twice or unknown or silent:\n",
            "    if twice or silent:\n",
            (LAWS,),
        ),
        ("the parts of a row are not checked", "    check_parts(built.traces, by_index)\n", "", (SLICES,)),
    ),
    *rules(
        "merge.invariants",
        (
            "a sample's ids are not compared",
            '        _same(f"invariant 1: {name}, sample of turn {turn.index}", tokens, start, turn.sampled)\n',
            "",
            (LAWS,),
        ),
        (
            "a prompt's ids are not compared",
            (
                '        _same(\n            f"invariant 1: {name}, prompt of turn {turn.index}",\n'
                "            tokens,\n            start - len(turn.prompt_delta),\n"
                "            turn.prompt_delta,\n        )\n"
            ),
            "        pass\n",
            (LAWS,),
        ),
        (
            "spans are not compared",
            "if trace.offset < 0 or places != expected:",
            "if trace.offset < 0:",
            (LAWS,),
        ),
        (
            "the mask may lie outside samples",
            "    if ones != sampled:\n",
            "    if ones < sampled:\n",
            (LAWS,),
        ),
        (
            "logprobs are not compared",
            "    if found != expected:\n        place",
            "    if len(found) != len(expected):\n        place",
            (LAWS,),
        ),
        (
            "versions are not compared",
            "    if found != expected:\n        wrong",
            "    if len(found) > 99:\n        wrong",
            (LAWS,),
        ),
        (
            "a trace may end late",
            "if not trace.turn_spans or end != len(trace.token_ids):",
            "if not trace.turn_spans:",
            (LAWS,),
        ),
        (
            "spans may overlap",
            "if span.start < end or span.end <= span.start:",
            "if span.end <= span.start:",
            (LAWS,),
        ),
        ("a prompt may be trained", "<= len(trace.token_ids) or early:", "<= len(trace.token_ids):", (LAWS,)),
        (
            "a trace may hold a failed turn",
            "    if not train_failed:\n",
            "    if train_failed is None:\n",
            (LAWS,),
        ),
    ),
    *rules(
        "merge.invariants",
        (
            "a prompt of another length passes",
            "    if turn.prompt_length != before + len(turn.prompt_delta):\n",
            "    if turn.prompt_length < len(turn.prompt_delta):\n",
            (LAWS,),
        ),
        (
            "a logprob may be missing",
            "    if len(turn.logprobs) != sampled:\n",
            "    if len(turn.logprobs) > sampled:\n",
            (LAWS,),
        ),
        (
            "a logprob may be no number",
            "    if not isfinite(sum(turn.logprobs)):\n",
            "    if sum(turn.logprobs) > 0:\n",
            (LAWS,),
        ),
        (
            "versions may have gaps",
            "if span.start != end or span.end <= span.start:",
            "if span.end <= span.start:",
            (LAWS,),
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
            (LAWS,),
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
            (f"{LINE}::test_a_group_that_has_begun_goes_before_an_older_one_that_has_not",),
        ),
        (
            "who waits does not see that its group has begun",
            "        for priority in self._waiting.get(cohort, ()):\n",
            "        for priority in ():\n",
            (f"{LINE}::test_the_members_of_a_group_enter_one_after_another",),
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
