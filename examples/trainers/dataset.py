"""A Parquet dataset of tasks, as verl and SkyRL read it: `python dataset.py tasks.jsonl train.parquet`.

Each line of tasks.jsonl is a task, or the part of one that the trainer's task file leaves out:
{"instruction": "…", "runtime": {…}, "evaluator": {…}}. Needs pandas and pyarrow, which both trainers have.
"""

import json
import sys
from pathlib import Path

import pandas as pd


def main(tasks: str, out: str) -> None:
    rows = []
    for index, line in enumerate(Path(tasks).read_text().splitlines()):
        task = json.loads(line)
        rows.append(
            {
                "data_source": "polarnode",
                "prompt": [{"role": "user", "content": task["instruction"]}],
                # JSON text: a table would give every row the fields of all of them
                "extra_info": {"index": index, "polarnode": json.dumps(task)},
            }
        )
    pd.DataFrame(rows).to_parquet(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
