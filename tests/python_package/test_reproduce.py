"""python -m scope_attn.reproduce on whole tiny pipelines: all six settings from end to end, going on, ranks, measures, refusals."""
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
import numpy  # noqa: E402
import tiny_folders  # noqa: E402
import tiny_pipelines as tiny  # noqa: E402
from PIL import Image  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402

from scope_attn.reproduce import __main__ as command  # noqa: E402
from scope_attn.reproduce import profile, quality, results, table, work  # noqa: E402
from scope_attn.reproduce.settings import METHODS, SETTINGS  # noqa: E402

if tiny.DEVICE != "cpu":
    pytest.skip("the CPU shows it", allow_module_level=True)

SCOPE = os.environ.get("SCOPE_COMMAND", str(Path(__file__).parents[2] / "build/release/bin/scope"))
SMALL = "--size", "224x128", "--frames", "9", "--steps", "5", "--min-tokens", "0"
needs_command = pytest.mark.skipif(not os.path.exists(SCOPE), reason="there is no scope command")


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """Prompts, images, and the model of each setting as it is asked for."""
    folder = tmp_path_factory.mktemp("reproduce")
    (folder / "t2v.txt").write_text("a cat walks\n\na dog runs slowly\n")
    (folder / "i2v.txt").write_text("noise.png\ta cat walks\ngradient.jpg\ta dog runs slowly\n")
    Image.effect_noise((300, 300), 80).convert("RGB").save(folder / "noise.png")
    Image.radial_gradient("L").resize((400, 200)).convert("RGB").save(folder / "gradient.jpg")
    return folder


def arguments(place, setting, out, *more):
    model = place / setting
    if not model.exists():
        tiny_folders.save(setting, model)
    return ["--setting", setting, "--model", str(model), "--prompts", str(place / f"{setting[-3:]}.txt"), "--out", str(out), *SMALL, *more]


def run(place, setting, out, *more):
    return command.main(arguments(place, setting, out, *more))


def videos(out):
    """Bytes of every frame, by method and prompt."""
    return {str(path.parent.relative_to(out)) + "/" + path.name: path.read_bytes() for path in sorted(out.glob("*/*/frame_*.png"))}


@pytest.fixture(scope="session")
def made(place):
    """Two prompts with two methods, one of which takes a profile."""
    out = place / "made"
    assert run(place, "wan2.1-t2v", out, "--methods", "svoo", "scope") == 0
    return out


@pytest.mark.parametrize("setting", SETTINGS)
def test_six(place, tmp_path, capsys, setting):
    """Every method of the paper and ours; the table has our figures and the paper's. $SCOPE_TABLES collects the six."""
    out = tmp_path / "out"
    assert run(place, setting, out, "--first", "1") == 0
    shown = capsys.readouterr().out
    rows = {row["method"]: row for row in json.loads((out / "table.json").read_text())["rows"]}
    assert list(rows) == list(METHODS)
    for method, row in rows.items():
        files = {path.name for path in (out / method / "0000").iterdir()}
        assert files - {"clip.mp4"} == {"run.json", *(f"frame_{i:03d}.png" for i in range(9))}
        assert ("clip.mp4" in files) == bool(results.ffmpeg()) and row["videos"] == 1 and row["seconds"] > 0
        if method != "dense":
            assert 25 < row["psnr"] < 80 and 0.7 < row["ssim"] <= 1 and 0.3 < row["density"] < 0.95
    assert rows["scope"]["paper"]["psnr"] == SETTINGS[setting].paper["scope"][0] and rows["scope-mean"]["paper"] is None
    assert str(rows["scope"]["paper"]["psnr"]) in shown and f"{rows['scope']['psnr']:.2f}" in shown
    lines = (out / "profile.csv").read_text().splitlines()
    assert lines[0] == "step,layer,head,density" and len(lines) == 1 + 5 * 2 * 2
    assert "profile" in " ".join(json.loads((out / "svoo/0000/run.json").read_text())["receipt"])
    if "SCOPE_TABLES" in os.environ:
        with open(os.environ["SCOPE_TABLES"], "a") as file:
            file.write((out / "table.md").read_text() + "\n")


def test_goes_on(place, made, capsys):
    """What is missing is made again with the same bits, the dense video without the profile's watcher too, and nothing else is."""
    before, table_before = videos(made), (made / "table.md").read_text()
    for gone in ("dense/0000", "svoo/0001"):
        shutil.rmtree(made / gone)
    assert run(place, "wan2.1-t2v", made, "--methods", "svoo", "scope") == 0
    assert "video 2 of 2: svoo, prompt 1" in capsys.readouterr().out and videos(made) == before
    assert run(place, "wan2.1-t2v", made, "--methods", "svoo", "scope") == 0
    assert "video" not in capsys.readouterr().out.split("###")[0]
    figures = [line.split("|")[2:5] for line in table_before.splitlines() if line.startswith("| sc")]
    assert figures == [line.split("|")[2:5] for line in (made / "table.md").read_text().splitlines() if line.startswith("| sc")]


def test_more_methods(place, made, tmp_path, capsys):
    """A method that is added later, and fewer prompts."""
    out = tmp_path / "out"
    shutil.copytree(made, out)
    assert run(place, "wan2.1-t2v", out, "--methods", "scope:rho=0.5", "--first", "1") == 0
    shown = capsys.readouterr().out
    assert "video 1 of 1: scope:rho=0.5" in shown and len(json.loads((out / results.Results.NAME).read_text())["prompts"]) == 2


def python(*given):
    return subprocess.Popen([sys.executable, *map(str, given)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_killed(place, made, tmp_path):
    """A process that dies leaves whole videos alone, and the next run makes the rest."""
    out = tmp_path / "out"
    given = arguments(place, "wan2.1-t2v", out, "--methods", "svoo", "scope")
    process = python("-m", "scope_attn.reproduce", *given)
    while not (out / "dense/0001").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (out / "table.md").exists() and all(len(list(video.iterdir())) >= 10 for video in out.glob("*/0*"))
    assert command.main(given) == 0 and videos(out) == videos(made)


def test_ranks(place, made, tmp_path):
    """Two ranks take each video once, wait for the profile, and give the bits of one."""
    out = tmp_path / "out"
    process = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "scope_attn.reproduce",
                     *arguments(place, "wan2.1-t2v", out, "--methods", "svoo", "scope"))
    said, wrong = process.communicate()
    assert process.returncode == 0, wrong
    assert sorted(line.split(":")[0] for line in said.splitlines() if line.startswith("video")) == [f"video {i} of 6" for i in range(1, 7)]
    assert said.count("###") == 1 and videos(out) == videos(made)


@needs_command
def test_quality_is_the_command(made):
    """PSNR and SSIM of `scope evaluate`, to rounding."""
    dense, scope = made / "dense/0001", made / "scope/0001"
    for skip in (0, 1):
        subprocess.run([SCOPE, "evaluate", dense, scope, "--skip", str(skip), "--json", made / "evaluate.json"], check=True)
        theirs = json.loads((made / "evaluate.json").read_text())
        cpu = torch.device("cpu")
        ours = quality.compare(dense, scope, quality.measures(cpu), skip, cpu)
        assert ours["psnr"] == pytest.approx(theirs["psnr"], abs=1e-9) and ours["ssim"] == pytest.approx(theirs["ssim"], abs=1e-9)
    os.remove(made / "evaluate.json")


def test_equal_videos(made):
    cpu = torch.device("cpu")
    same = quality.compare(made / "dense/0000", made / "dense/0000", quality.measures(cpu), 0, cpu)
    assert same == dict(psnr=None, ssim=pytest.approx(1))


@needs_command
def test_profile_is_the_command(tmp_path):
    """Densities of `scope profile --samples all`."""
    q, k, v = 3 * torch.randn(3, 2, 200, 24, generator=torch.Generator().manual_seed(0))
    save_file({name: x.numpy() for name, x in zip("qkv", (q, k, v))}, tmp_path / "qkv.safetensors")
    subprocess.run([SCOPE, "profile", f"0:0:{tmp_path}/qkv.safetensors", "--samples", "all", "-o", tmp_path / "profile.csv"], check=True)
    theirs = [float(line.split(",")[3]) for line in (tmp_path / "profile.csv").read_text().splitlines()[1:]]
    assert profile.densities(q.transpose(0, 1), k.transpose(0, 1), 200) == pytest.approx(theirs, abs=1e-4)
    assert profile.densities(q.transpose(0, 1), k.transpose(0, 1), 50) == pytest.approx(theirs, abs=0.05)


def test_packages(place, made, tmp_path, monkeypatch, capsys):
    """LPIPS of frames in [-1, 1] and VBench's own results stand in the table, where the packages are."""
    out = tmp_path / "out"
    shutil.copytree(made, out)
    (tmp_path / "lpips.py").write_text("import torch\n"
                                       "class LPIPS(torch.nn.Module):\n"
                                       "    def __init__(self, net, verbose): super().__init__()\n"
                                       "    def forward(self, a, b): return (a - b).abs().mean() / 2 + float(a.min() >= 0)\n")
    (tmp_path / "vbench").mkdir()
    (tmp_path / "vbench/__init__.py").write_text(
        "import json, os\n"
        "class VBench:\n"
        "    def __init__(self, device, info, output): self.output = output\n"
        "    def evaluate(self, videos_path, name, dimension_list, mode):\n"
        "        clips = os.listdir(videos_path)\n"
        "        assert mode == 'custom_input' and sorted(clips) == ['0000.mp4', '0001.mp4']\n"
        "        found = {each: [0.1 * (i + 1), [dict(video_path=clip) for clip in clips]] for i, each in enumerate(dimension_list)}\n"
        "        json.dump(found, open(f'{self.output}/{name}_eval_results.json', 'w'))\n")
    for clip in out.glob("*/0*/"):
        if clip.is_dir():
            (clip / "clip.mp4").touch()
    monkeypatch.syspath_prepend(tmp_path)
    quality.lpips_model.cache_clear()
    assert run(place, "wan2.1-t2v", out, "--methods", "svoo", "scope") == 0
    quality.lpips_model.cache_clear()
    for name in ("lpips", "vbench"):
        sys.modules.pop(name)
    shown = capsys.readouterr().out
    rows = {row["method"]: row for row in json.loads((out / "table.json").read_text())["rows"]}
    frames = [numpy.stack([numpy.asarray(Image.open(path), float) for path in sorted(out.glob(f"{name}/*/*.png"))])
              for name in ("dense", "scope")]
    assert rows["scope"]["lpips"] == pytest.approx(abs(frames[0] - frames[1]).mean() / 255, rel=1e-3)
    assert [rows["dense"][name] for name in quality.DIMENSIONS] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert "pip install" not in shown and "video" not in shown.split("###")[0]


def test_full_disk(place, made, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    shutil.copytree(made, out)
    before = videos(out)
    own, left = Image.Image.save, [4]

    def save(image, path, *rest):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        own(image, path, *rest)

    monkeypatch.setattr(Image.Image, "save", save)
    assert run(place, "wan2.1-t2v", out, "--methods", "scope-mean") == 1
    assert "No space left" in capsys.readouterr().err and videos(out) == before and not list(out.glob("*/.*"))


def test_crop(tmp_path):
    """The middle of an image in the shape of the video."""
    picture = numpy.zeros((40, 320, 3), numpy.uint8)
    picture[:, 160 - 36:160 + 36] = 255
    Image.fromarray(picture).save(tmp_path / "wide.png")
    shown = numpy.asarray(results.cropped(tmp_path / "wide.png", (256, 144)))
    assert shown.shape == (144, 256, 3) and shown.min() > 240


@pytest.mark.parametrize("more, words", {
    "setting": (["--setting", "wan3"], "invalid choice: 'wan3'"),
    "no prompts": (["--prompts", "empty.txt"], "empty.txt has no prompts"),
    "no file": (["--prompts", "nothing.txt"], "nothing.txt"),
    "no image": (["--setting", "wan2.1-i2v", "--prompts", "images.txt"], "missing.png is no image"),
    "no images": (["--setting", "wan2.1-i2v"], "expected IMAGE<tab>PROMPT"),
    "method": (["--methods", "spare"], 'got "spare", expected of scope'),
    "its setting": (["--methods", "scope:roh=1"], 'got "roh=1"'),
    "its value": (["--methods", "scope:rho=2"], "rho"),
    "dense": (["--methods", "dense:rho=0.5"], "takes no settings"),
    "profile": (["--profile", "profile.csv", "--methods", "scope"], "it is svoo's"),
    "no profile": (["--profile", "nothing.csv"], "nothing.csv"),
    "other profile": (["--profile", "empty.txt", "--out", "made"], "is another than"),
    "bad profile": (["--profile", "t2v.txt"], "svoo: profile: "),
    "size": (["--size", "1280x721"], "multiples of 16"),
    "frames": (["--frames", "80"], "one more than a multiple of 4"),
    "density": (["--target-density", "20"], "expected a share in (0, 1]"),
    "negative": (["--setting", "hunyuan-t2v", "--negative-prompt", "dark"], "HunyuanVideo runs without one"),
    "no model": (["--model", "no/such/folder"], "--model: no/such/folder: "),
    "other model": (["--setting", "hunyuan-t2v"], "is a WanPipeline, and hunyuan-t2v takes a HunyuanVideoPipeline"),
    "other folder": (["--out", "."], "holds something else"),
    "a file": (["--out", "t2v.txt"], "is no folder"),
    "folder's setting": (["--setting", "wan2.2-t2v", "--out", "made"], "has setting 'wan2.1-t2v', and this run 'wan2.2-t2v'"),
    "folder's steps": (["--steps", "6", "--out", "made"], "has steps 5, and this run 6"),
    "folder's prompts": (["--prompts", "other.txt", "--out", "made"], "has another prompt or image 1: 'a dog runs slowly'"),
}.values(), ids=lambda value: value if isinstance(value, str) else "")
def test_refused(place, made, monkeypatch, capsys, more, words):
    """Before any work: nothing is written, nothing is lost."""
    monkeypatch.chdir(place)
    Path("empty.txt").write_text("\n \n")
    Path("images.txt").write_text("missing.png\ta cat walks\n")
    Path("other.txt").write_text("a cat walks\na dog walks\n")
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    try:
        status = run(place, "wan2.1-t2v", place / "new", *more)
    except SystemExit as error:
        status = error.code
    assert status == 2 and words in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == before


def test_paper():
    """Five methods of each setting, of which the paper's is the best in PSNR, SSIM and LPIPS, as it says."""
    for setting in SETTINGS.values():
        assert len(setting.paper) == 5 and all(len(row) == len(table.COLUMNS) for row in setting.paper.values())
        sparse = [row for method, row in setting.paper.items() if method != "dense"]
        assert setting.paper["scope"][:3] == (max(row[0] for row in sparse), max(row[1] for row in sparse), min(row[2] for row in sparse))


def test_frames_stay_where_ffmpeg_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results, "ffmpeg", lambda: shutil.which("false"))
    results.Results(tmp_path).write_video("dense", 0, numpy.zeros((2, 16, 16, 3)), 16, {"seconds": 1})
    assert sorted(path.name for path in (tmp_path / "dense" / "0000").iterdir()) == ["frame_000.png", "frame_001.png", "run.json"]
    assert "made no clip.mp4" in capsys.readouterr().err


@pytest.mark.parametrize("kind, given", (("latent_concat", 0), ("token_replace", 1)))
def test_given_frames_of_hunyuan(tmp_path, kind, given):
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(json.dumps({"image_condition_type": kind}))
    assert work.given_frames(str(tmp_path), SETTINGS["hunyuan-i2v"]) == given
    assert work.given_frames("nowhere", SETTINGS["wan2.1-i2v"]) == 1
    assert work.given_frames("nowhere", SETTINGS["hunyuan-t2v"]) == 0
