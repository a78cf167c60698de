"""Logprobs of sequences under adapters, by transformers and peft: a program of its own, because peft is among the
trainers' packages (.venv/oracles), where the tests do not look.

In: {"model": a checkpoint's folder, "rows": [[adapter's folder or "", ids]]}. Out: for each row the float32
logprob of every id but the first, at temperature 1.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

ORACLES = Path(sys.prefix) / "oracles"


def main() -> None:
    asked = json.load(sys.stdin)
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    models: dict[str, Any] = {}
    found = []
    for folder, ids in asked["rows"]:
        if folder not in models:
            base = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32)
            models[folder] = PeftModel.from_pretrained(base, folder).eval() if folder else base.eval()
        with torch.no_grad():
            logits = models[folder](torch.tensor([ids])).logits[0, :-1].float()
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist())
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    sys.path.append(str(ORACLES))
    warnings.simplefilter("ignore")
    main()
