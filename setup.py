"""Compiles the native kernels into the package where there is a compiler; without one Trine works, in plain torch."""

import importlib.util
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path(__file__).parent / "trine" / "kernels" / "native" / "build.py"


def compiled():
    spec = importlib.util.spec_from_file_location("trine_native_build", NATIVE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build(module.wanted())


class Build(build_py):
    def run(self):
        for reason in compiled():
            sys.stderr.write(f"the native kernels were not compiled: {reason}\n")
        super().run()


class Wheel(bdist_wheel):
    """One for any Python, of one platform."""

    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": Build, "bdist_wheel": Wheel})
