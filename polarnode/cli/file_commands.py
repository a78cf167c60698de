"""The commands that read files alone: `replay`, `merge` and `check`.

Keep heavy imports inside the commands, as in `main`.
"""

import sys
from pathlib import Path
from typing import Final

import click

from polarnode.cli.options import existing_path_type, folder


@click.command(short_help="Show which turn each recorded request extends, and its new tokens.")
@click.argument("folder", metavar="DIR", type=existing_path_type())
@click.option(
    "--tokenizer",
    type=folder(exists=True),
    help="Checkpoint folder; weights are not needed. [default: the embedded polarnode-tiny]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per request; totals to stderr.")
@click.option(
    "--against",
    "other",
    type=existing_path_type(),
    metavar="OTHER",
    help="Compare with another recording, or two files of trajectories: print the first prompt that differs,"
    " and its words.",
)
def replay(folder: Path, tokenizer: Path | None, as_json: bool, other: Path | None) -> None:
    """Replay recorded requests (NN-request.json) and show which turn each one extends, why, and how many of
    its tokens are new; or, with --against, where two recordings begin to differ.

    \b
    polarnode replay recordings/
    polarnode replay --json --tokenizer /models/Qwen3-8B recordings/ | jq .kind
    polarnode replay recordings/4f1c09aa --against recordings/77d0e2b1
    polarnode replay --tokenizer /models/Qwen3-8B one.jsonl --against other.jsonl

    Record requests with --record-requests. Every folder under DIR that holds requests is one session. No
    engine is started: the answer to a request is taken from the requests after it. Two recordings are
    compared session by session: those of the same name, or the only ones. Of two files of trajectories the
    prompts in their rows are compared; the words are token ids without --tokenizer.

    Exit codes: 0 when every request was accepted, and with --against when both have the same prompts; 1
    otherwise.
    """
    from polarnode.cli import recordings

    if other is not None:
        if tokenizer is not None and folder.is_dir():
            raise click.UsageError("--against compares texts of recordings: leave --tokenizer out")
        sys.exit(recordings.compare_recordings(folder, other, tokenizer, as_json=as_json))
    if not folder.is_dir():
        raise click.UsageError(f"{folder} is a file: name a folder with requests, or give --against OTHER")
    sys.exit(recordings.replay(folder, tokenizer, as_json=as_json))


@click.command(short_help="Merge model calls recorded elsewhere into training rows.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path))
@click.option(
    "--output", "-o", type=click.Path(dir_okay=False, path_type=Path), help="File to write. [default: stdout]"
)
def merge(file: Path, output: Path | None) -> None:
    """Merge FILE (JSONL; - for stdin), model calls of any engine or gateway, into training rows. Every
    sampled token is trainable exactly once.

    \b
    polarnode merge calls.jsonl -o rows.jsonl
    zcat calls.jsonl.gz | polarnode merge - | head -1

    \b
    Input line: {session_id, turn_id, prompt_ids, sampled_ids, logprobs,
                 weight_version?}
    Output row: {session_id, token_ids, loss_mask, logprobs, turn_spans,
                 version_spans}

    The calls of one session must be in the order they were made; sessions may be interleaved. A call extends
    a row when its prompt begins with an earlier prompt and reply of the session, token for token. Any other
    call begins a new row. Counts go to stderr.

    Exit codes: 0 when every line was a valid call; 1 when one was not: it is reported on stderr, and the
    other lines are still merged.
    """
    from polarnode.cli import recordings

    sys.exit(recordings.merge(file, output))


@click.command("check", short_help="Verify a node's journal, also while the node runs.")
@click.argument(
    "state_dir",
    metavar="[STATE_DIR]",
    required=False,
    default=Path(".polarnode"),
    type=click.Path(exists=True, path_type=Path),
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check(state_dir: Path, as_json: bool) -> None:
    """Verify the journal in STATE_DIR (.polarnode): the file, every row's checksum and bytes, what rows refer
    to, and the order of events. It changes nothing, and a node may run on it meanwhile.

    \b
    polarnode check
    polarnode check --json /data/polarnode | jq .faults

    Exit codes: 0 when there are no faults; 1 otherwise. Each fault is one line.
    """
    from polarnode.cli import recordings

    sys.exit(recordings.check(state_dir, as_json=as_json))


FILE_COMMANDS: Final = (replay, merge, check)
