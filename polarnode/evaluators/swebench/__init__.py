"""`swebench`: instances of SWE-bench and SWE-Gym, judged by the `swebench` package's own specs, log parsers and grader, in a clean container."""

from polarnode.evaluators.swebench.config import SwebenchConfig
from polarnode.evaluators.swebench.judging import EVALUATOR

__all__ = ["EVALUATOR", "SwebenchConfig"]
