"""`python -m polarnode.cli`: the command where no script of it is installed."""

from polarnode.cli.main import main

if __name__ == "__main__":
    main(prog_name="polarnode")
