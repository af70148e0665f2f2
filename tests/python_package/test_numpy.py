"""The checks over numpy arrays, with the installed package."""
import pathlib
import subprocess
import sys


def test_package():
    check = pathlib.Path(__file__).parents[1] / "python" / "check_package.py"
    result = subprocess.run([sys.executable, check], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
