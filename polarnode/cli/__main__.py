"""`python -m polarnode.cli`: the command line without an installed script."""

from polarnode.cli import main

if __name__ == "__main__":
    main(prog_name="polarnode")
