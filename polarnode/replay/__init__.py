"""What a harness did, asked again of recorded requests: which lineage each would have had here, and what it would have cost.

Below the line: bytes of files in, values out. `recording` reads one file, `answers` finds what each request was answered with in those that
came after it, `session` plans them all as a live session would. The files themselves, and the printing, are the command line's.
"""
