"""Models that judge, behind OpenAI Chat endpoints of the node's own config."""

from polarnode.shell.judges.client import HttpJudge, Judges, JudgeStatistics, open_judges

__all__ = ["HttpJudge", "JudgeStatistics", "Judges", "open_judges"]
