"""What SGLang's own detectors make of texts: a program of its own, because importing SGLang takes long and
warns. JSON in, JSON out.

In: [{"calls": detector or null, "thoughts": detector or null, "text": ..., "tools": [[name, parameters],
...]}, ...]. Out: [{"calls": [[name, arguments], ...], "text": ...} or {"thinking": ..., "text": ...}, ...].
"""

import json
import logging
import sys
from typing import Any


def main() -> None:
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    logging.disable()

    def answered(case: dict[str, Any]) -> dict[str, Any]:
        if case["calls"]:
            tools = [
                Tool(type="function", function={"name": name, "parameters": parameters})
                for name, parameters in case["tools"]
            ]
            text, calls = FunctionCallParser(tools, case["calls"]).parse_non_stream(case["text"])
            return {"calls": [[call.name, json.loads(call.parameters)] for call in calls], "text": text}
        thinking, text = ReasoningParser(case["thoughts"], stream_reasoning=False).parse_non_stream(
            case["text"]
        )
        return {"thinking": thinking, "text": text}

    cases = json.load(sys.stdin)
    json.dump([answered(case) for case in cases], sys.stdout)


if __name__ == "__main__":
    main()
