"""`polarnode generate`: what was asked (`command`), the sessions (`run`), what is written of them (`export`, `table`), and their words (`words`)."""

from polarnode.cli.generate.command import OPTIONS, asked, generate

__all__ = ["OPTIONS", "asked", "generate"]
