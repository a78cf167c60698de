"""What pyproject.toml cannot declare: packages more than those that are found.

The recipes of images, `runtimes/`, stand beside the package in a checkout, and inside it in a wheel, as
`polarnode/runtimes/`. The rest of the build is in pyproject.toml.
"""

from setuptools import find_namespace_packages, setup

RECIPES = "polarnode.runtimes"

setup(
    packages=[
        *find_namespace_packages(include=["polarnode*"]),
        RECIPES,
        *(f"{RECIPES}.{folder}" for folder in find_namespace_packages("runtimes")),
    ]
)
