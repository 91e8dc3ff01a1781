"""Hand the whole of setup.cfg to setuptools."""

from setuptools import setup

setup()
