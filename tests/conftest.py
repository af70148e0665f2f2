"""What all tests in Python share: the scope command, temporary folders, and what tests with PyTorch need.

SCOPE_COMMAND, SCOPE_LIBRARY, SCOPE_FAULT_SHIM, SCOPE_CHROMIUM and CC name the programs under test and those that help; ctest sets
them (tests/CMakeLists.txt). Nothing here imports the package scope_attn or PyTorch before a test asks for it.
"""
import os
import pathlib
import re
import resource
import shutil
import signal
import stat
import subprocess
import tempfile

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
BUILD = REPOSITORY / "build" / "release"  # whose files are taken where no other is named
COMMAND = os.path.abspath(os.environ.get("SCOPE_COMMAND", BUILD / "bin" / "scope"))
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # graphs of an earlier version of the operators answer nothing


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Temporary folders go with the run; pytest by itself keeps those of the last three."""
    if config.option.basetemp is None:
        folder = tempfile.mkdtemp()
        config.option.basetemp = os.path.join(folder, "tmp")
        config.add_cleanup(lambda: shutil.rmtree(folder))


class Scope:
    """The scope command. A command that is refused must change nothing below `folder`."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, *arguments, limit=None, **options):
        """Runs it to its end. limit: the most bytes that a file may get; a write past it fails as on a full disk."""
        if limit is not None:
            # Python ignores SIGXFSZ, and so does the command then.
            options |= {"restore_signals": False, "preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))}
        return subprocess.run(self.words(arguments), capture_output=True, text=True, errors="replace", **options)

    def start(self, *arguments, **options):
        """A process with pipes for what it says."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        return subprocess.Popen(self.words(arguments), text=True, errors="replace", **options)

    def accept(self, *arguments, **options):
        """The command succeeds. Returns what it says on standard output."""
        __tracebackhide__ = True
        result = self(*arguments, **options)
        assert result.returncode == 0, f"{arguments}: exit {result.returncode}: {result.stdout}{result.stderr}"
        return result.stdout

    def refuse(self, code, words, *arguments, **options):
        """The command exits with `code`, says each of `words` on standard error, and changes nothing."""
        __tracebackhide__ = True
        before = self.snapshot()
        # A refusal takes no minute: a command that does not come back waits for a pipe, or reads without end.
        result = self(*arguments, **{"timeout": 120, **options})
        said = result.stdout + result.stderr
        assert result.returncode == code, f"{arguments}: exit {result.returncode}, expected {code}: {said}"
        for word in [words] if isinstance(words, str) else words:
            assert word in result.stderr, f"{arguments}: nothing about {word!r} in: {result.stderr}"
        assert not re.search(r"\d{30}", result.stderr), f"{arguments}: an endless number in: {result.stderr}"
        after = self.snapshot()
        assert after == before, f"{arguments}: changed {dict(set(after.items()) ^ set(before.items()))}"
        return result

    def snapshot(self, folder=None):
        """Every name below a folder with what is there: a link's target, what a write changes of a file, other things' inode."""
        found = {}
        for place, folders, names in os.walk(os.fsencode(folder or self.folder)):
            for path in (os.path.join(place, name) for name in folders + names):
                status = os.lstat(path)
                if stat.S_ISLNK(status.st_mode):
                    found[path] = os.readlink(path)
                elif stat.S_ISREG(status.st_mode):
                    found[path] = status.st_ino, status.st_size, status.st_mtime_ns
                else:
                    found[path] = status.st_ino
        return found

    @staticmethod
    def words(arguments):
        return [COMMAND, *(each if isinstance(each, bytes) else str(each) for each in arguments)]


@pytest.fixture(scope="session")
def scope(tmp_path_factory):
    """The command; all that tests write lies below the folder that it watches."""
    return Scope(tmp_path_factory.getbasetemp())


@pytest.fixture
def tmp_path(tmp_path_factory):
    """A folder of the test's own. Its name, unlike that of pytest's, holds no word that a message is searched for."""
    return tmp_path_factory.mktemp("t")


@pytest.fixture(scope="session")
def library():
    """libscope.so. An empty SCOPE_LIBRARY: it has a sanitizer, whose runtime must be loaded before the interpreter."""
    return os.path.abspath(os.environ.get("SCOPE_LIBRARY", BUILD / "libscope.so") or pytest.skip("the library has a sanitizer"))


@pytest.fixture(scope="session")
def compiler():
    return os.environ.get("CC", "cc")


@pytest.fixture(scope="session")
def repository():
    return REPOSITORY


@pytest.fixture(scope="session")
def data():
    return REPOSITORY / "tests" / "data"


@pytest.fixture(scope="session")
def bundled():
    """The folder of the bundled video model."""
    return REPOSITORY / "models" / "tiny-wan"


@pytest.fixture
def interruptible():
    """Commands take interrupts: they leave ignored what their parent ignores, as nohup and a shell's & do."""
    before = {number: signal.signal(number, handler)
              for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL))}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# ---- with PyTorch


@pytest.fixture(scope="session")
def device():
    import torch
    return torch.device(os.environ.get("SCOPE_TEST_DEVICE", "cpu"))  # cuda: of tests/python_package/run_cuda.sh


@pytest.fixture
def dtype(device):
    import torch
    return torch.float32 if device.type == "cpu" else torch.bfloat16


@pytest.fixture
def qkv(device, dtype):
    import torch
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 3, 280, 64, generator=generator).to(device, dtype) for _ in range(3)]


@pytest.fixture
def generate(scope, tmp_path):
    """generate(tensors, *flags) -> the latents that `scope generate` writes, batch dimension added."""
    from safetensors.torch import load_file, save_file

    def run(tensors, *flags):
        given = tmp_path / "in.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, given)
        condition = () if "--condition" in flags else ("--condition", given)
        scope.accept("generate", "-o", tmp_path / "out", "--latents", "--noise", given, *flags, *condition)
        return load_file(tmp_path / "out" / "latents.safetensors")["latents"][None]

    return run
