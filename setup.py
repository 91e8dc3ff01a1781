"""Hand the whole of setup.cfg to setuptools, and two inner loops in C that are left out where nothing compiles them."""

import sys

from setuptools import Extension, setup

# Buffers belong to the stable ABI since Python 3.11: from there on one build serves all versions.
STABLE = sys.version_info >= (3, 11)

setup(
    ext_modules=[
        Extension(
            f"pipette_launch.{name}",
            sources=[f"pipette_launch/{name.replace('.', '/')}.c"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if STABLE else [],
            # Sums keep the digits that numpy gives them, and no path of the building machine stays.
            extra_compile_args=["-O3", "-ffp-contract=off", "-g0"],
            py_limited_api=STABLE,
            optional=True,
        )
        for name in ("cost.pipeline._longest_path", "search.assignment._swaps")
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE else {},
)
