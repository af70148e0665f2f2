"""Seeds of python -m scope_attn.reproduce: prompt i has its own, and a folder keeps those that it began with."""
import json

import pytest

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
import tiny_folders
import tiny_pipelines as tiny
from scope_attn.reproduce import __main__ as command

if tiny.DEVICE != "cpu":
    pytest.skip("the CPU shows it", allow_module_level=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The command on a tiny Wan with the same prompt twice: its videos differ by their noise alone."""
    folder = tmp_path_factory.mktemp("seeds")
    (folder / "prompts.txt").write_text("a cat walks\na cat walks\n")
    tiny_folders.save("wan2.1-t2v", folder / "model")

    def run(out, *more):
        given = {"--setting": "wan2.1-t2v", "--model": folder / "model", "--prompts": folder / "prompts.txt",
                 "--out": folder / out, "--methods": "scope", "--size": "64x64", "--frames": 5, "--steps": 2, "--min-tokens": 0}
        return command.main([str(word) for pair in given.items() for word in pair] + list(more)), folder / out

    return run


def frames(video):
    return [path.read_bytes() for path in sorted(video.glob("frame_*.png"))]


def test_seeds(run, capsys):
    status, out = run("first", "--seed", "7")
    assert status == 0
    for method in ("dense", "scope"):
        videos = [out / method / f"{i:04d}" for i in range(2)]
        assert [json.loads((video / "run.json").read_text())["seed"] for video in videos] == [7, 8]
        first, second = map(frames, videos)
        assert len(first) == 5 and first != second, "each prompt has noise of its own"
    status, other = run("second", "--seed", "8", "--first", "1")
    assert status == 0
    assert frames(other / "dense" / "0000") == frames(out / "dense" / "0001"), "the seed is all that they differ in"

    made = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    capsys.readouterr()
    for more in (("--seed", "8"), ()):
        assert run("first", *more)[0] == 2
        said = capsys.readouterr().err
        assert "seed 7" in said and "give another folder" in said
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == made, "nothing was touched"
