"""python -m scope_attn.reproduce on whole tiny pipelines: all six settings from end to end, going on, ranks, measures, refusals."""
import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
import diffusers
import numpy
from PIL import Image
from safetensors.numpy import save_file

import tiny_folders
import tiny_pipelines as tiny
from scope_attn.reproduce import __main__ as command
from scope_attn.reproduce import maker, metrics, profile, quality, results, work
from scope_attn.reproduce.settings import METHODS, PAPER_COLUMNS, SETTINGS, Method, control

if tiny.DEVICE != "cpu":
    pytest.skip("the CPU shows it", allow_module_level=True)

SCOPE = os.environ.get("SCOPE_COMMAND", str(Path(__file__).parents[2] / "build/release/bin/scope"))
CONTROL = "dense:_native_math"
SMALL = "--size", "224x128", "--frames", "9", "--steps", "5", "--min-tokens", "0"
TWO = "--no-control", "--methods", "svoo", "scope"
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
    assert run(place, "wan2.1-t2v", out, *TWO) == 0
    return out


@pytest.mark.parametrize("setting", SETTINGS)
def test_six(place, tmp_path, capsys, setting):
    """Every method of the paper, ours and the control; the table has our figures and the paper's. $SCOPE_TABLES collects the six."""
    out = tmp_path / "out"
    assert run(place, setting, out, "--first", "1") == 0
    shown = capsys.readouterr().out
    about = json.loads((out / "table.json").read_text())
    rows = {row["method"]: row for row in about["rows"]}
    assert list(rows) == ["dense", CONTROL, *METHODS[1:]]
    assert rows["scope-paper"]["paper"]["psnr"] == SETTINGS[setting].paper["scope-paper"][0]
    assert (about["dense_backend"], about["compile"], about["negative_prompt"]) == ("native", False, SETTINGS[setting].negative)
    control = rows.pop(CONTROL)
    assert (control["psnr"] == "equal" or control["psnr"] > 60) and control["ssim_box"] > 0.999 and control["density"] is None
    for method, row in rows.items():
        files = {path.name for path in (out / method / "0000").iterdir()}
        assert files - {"clip.mp4"} == {"run.json", *(f"frame_{i:03d}.png" for i in range(9))}
        assert ("clip.mp4" in files) == bool(results.ffmpeg()) and row["videos"] == 1 and row["seconds"] > 0
        if method != "dense":
            assert 25 < row["psnr"] < 80 and 0.7 < row["ssim"] <= 1 and 0.7 < row["ssim_box"] <= 1 and 0.3 < row["density"] < 0.95
    ours = rows["scope-paper"]
    assert str(ours["paper"]["psnr"]) in shown and f"{ours['psnr']:.2f}" in shown and rows["scope-mean"]["paper"] is None
    assert json.loads((out / "scope-paper/0000/run.json").read_text())["receipt"][0].startswith("scope-paper")
    lines = (out / "profile.csv").read_text().splitlines()
    assert lines[0] == "step,layer,head,density" and len(lines) == 1 + 5 * 2 * 2
    assert "profile" in " ".join(json.loads((out / "svoo/0000/run.json").read_text())["receipt"])
    if "SCOPE_TABLES" in os.environ:
        with open(os.environ["SCOPE_TABLES"], "a") as file:
            file.write((out / "table.md").read_text() + "\n")


def test_goes_on(place, made, capsys):
    """What is missing is made again with the same bits, and nothing else is."""
    before, table_before = videos(made), (made / "table.md").read_text()
    for gone in ("dense/0000", "svoo/0001"):
        shutil.rmtree(made / gone)
    assert run(place, "wan2.1-t2v", made, *TWO) == 0
    assert "2 of 2: svoo, prompt 1" in capsys.readouterr().out and videos(made) == before
    assert run(place, "wan2.1-t2v", made, *TWO) == 0
    assert " of " not in capsys.readouterr().out.split("###")[0]
    figures = [line.split("|")[2:5] for line in table_before.splitlines() if line.startswith("| sc")]
    assert figures == [line.split("|")[2:5] for line in (made / "table.md").read_text().splitlines() if line.startswith("| sc")]


def test_more_methods(place, made, tmp_path, capsys):
    """A method that is added later, and fewer prompts."""
    out = tmp_path / "out"
    shutil.copytree(made, out)
    assert run(place, "wan2.1-t2v", out, "--no-control", "--methods", "scope:rho=0.5", "--first", "1") == 0
    shown = capsys.readouterr().out
    assert "1 of 1: scope:rho=0.5" in shown and len(json.loads((out / results.Results.NAME).read_text())["prompts"]) == 2


def python(*given):
    return subprocess.Popen([sys.executable, *map(str, given)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_killed(place, made, tmp_path):
    """A process that dies leaves whole videos alone, and the next run makes the rest."""
    out = tmp_path / "out"
    given = arguments(place, "wan2.1-t2v", out, *TWO)
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
                     *arguments(place, "wan2.1-t2v", out, *TWO))
    said, wrong = process.communicate()
    assert process.returncode == 0, wrong
    assert sorted(line.split(":")[0] for line in said.splitlines() if " of 7: " in line) == [f"{i} of 7" for i in range(1, 8)]
    assert said.count("###") == 1 and videos(out) == videos(made)


@needs_command
def test_quality_is_the_command(made):
    """PSNR and SSIM of `scope evaluate`, to rounding."""
    dense, scope = made / "dense/0001", made / "scope/0001"
    for skip in (0, 1):
        subprocess.run([SCOPE, "evaluate", dense, scope, "--skip", str(skip), "--json", made / "evaluate.json"], check=True)
        theirs = json.loads((made / "evaluate.json").read_text())
        cpu = torch.device("cpu")
        ours = quality.compare(dense, scope, skip, cpu)
        assert ours["psnr"] == pytest.approx(theirs["psnr"], abs=1e-9) and ours["ssim"] == pytest.approx(theirs["ssim"], abs=1e-9)
    os.remove(made / "evaluate.json")


def test_equal_videos(made):
    cpu = torch.device("cpu")
    same = quality.compare(made / "dense/0000", made / "dense/0000", 0, cpu)
    assert same == dict(psnr=None, ssim=pytest.approx(1), ssim_box=pytest.approx(1))


def test_frames_that_count(tmp_path):
    """The given frames do not; videos of other lengths, or of given frames alone, are no measurement."""
    for name, values in (("a", (0, 90, 90)), ("b", (255, 90, 100)), ("short", (0, 90))):
        (tmp_path / name).mkdir()
        for i, value in enumerate(values):
            Image.new("RGB", (16, 16), (value,) * 3).save(tmp_path / name / f"frame_{i:03d}.png")
    cpu = torch.device("cpu")
    assert quality.compare(tmp_path / "a", tmp_path / "b", 2, cpu)["psnr"] == pytest.approx(20 * math.log10(255 / 10))
    assert quality.compare(tmp_path / "a", tmp_path / "b", 1, cpu)["psnr"] is None, "one of its frames is equal"
    for a, b, skip in (("a", "b", 3), ("a", "short", 1)):
        with pytest.raises(ValueError, match=f"expected as many, and more than {skip}"):
            quality.compare(tmp_path / a, tmp_path / b, skip, cpu)


def test_box_ssim():
    """Of every pixel's 11 x 11 window, with zeros beyond the frame, written out."""
    a, b = (torch.rand(3, 13, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in (0, 1))
    (pa, pb), found = (torch.nn.functional.pad(x, (5, 5, 5, 5)) for x in (a, b)), []
    for c, y, x in numpy.ndindex(3, 13, 12):
        wa, wb = (p[c, y:y + 11, x:x + 11] for p in (pa, pb))
        ma, mb = wa.mean(), wb.mean()
        va, vb, cov = (wa**2).mean() - ma**2, (wb**2).mean() - mb**2, (wa * wb).mean() - ma * mb
        found.append((2 * ma * mb + 1e-4) * (2 * cov + 9e-4) / ((ma**2 + mb**2 + 1e-4) * (va + vb + 9e-4)))
    assert quality.frame_ssim_box(a, b) == pytest.approx(float(sum(found)) / len(found), abs=1e-12)


@needs_command
def test_profile_is_the_command(tmp_path):
    """Densities of `scope profile --samples all`."""
    q, k, v = 3 * torch.randn(3, 2, 200, 24, generator=torch.Generator().manual_seed(0))
    save_file({name: x.numpy() for name, x in zip("qkv", (q, k, v))}, tmp_path / "qkv.safetensors")
    subprocess.run([SCOPE, "profile", f"0:0:{tmp_path}/qkv.safetensors", "--samples", "all", "-o", tmp_path / "profile.csv"], check=True)
    theirs = [float(line.split(",")[3]) for line in (tmp_path / "profile.csv").read_text().splitlines()[1:]]
    assert profile.densities(q.transpose(0, 1), k.transpose(0, 1), 200).tolist() == pytest.approx(theirs, abs=1e-4)
    assert profile.densities(q.transpose(0, 1), k.transpose(0, 1), 50).tolist() == pytest.approx(theirs, abs=0.05)


LPIPS = """import torch
class LPIPS(torch.nn.Module):
    def __init__(self, net, verbose):
        super().__init__()
        self.factor = dict(alex=1, vgg=10)[net]
        if net == "vgg" and {offline}: raise OSError("<urlopen error [Errno 111]\\nConnection refused>")
    def forward(self, a, b): return self.factor * ((a - b).abs().mean() + float(a.min() < 0))
"""
VBENCH = """import json, os
class VBench:
    def __init__(self, device, info, output): self.output = output
    def evaluate(self, videos_path, name, dimension_list, mode):
        clips = os.listdir(videos_path)
        assert mode == "custom_input" and sorted(clips) == ["0000.mp4", "0001.mp4"] and os.path.exists(f"{videos_path}/0000.mp4")
        if dimension_list[0].startswith("aes") and {offline}: raise RuntimeError("wget: unable to resolve host")
        found = {each: [len(each) / 100, [dict(video_path=clip) for clip in clips]] for each in dimension_list}
        json.dump(found, open(f"{self.output}/{name}_eval_results.json", "w"))
"""


def interpreter(folder, offline, **packages):
    """A Python that has these packages, as --metrics-python takes it, and none of ours."""
    folder.mkdir()
    for name, source in packages.items():
        (folder / f"{name}.py").write_text(source.replace("{offline}", str(offline)))
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}" exec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_metrics(place, made, tmp_path, capfd):
    """LPIPS and VBench by another interpreter: what lacks its weights leaves its columns, a note, and is measured when they are there."""
    out = tmp_path / "out"
    shutil.copytree(made, out)
    for clip in out.glob("*/0*/"):
        if clip.is_dir():
            (clip / "clip.mp4").touch()

    def table(python):
        assert run(place, "wan2.1-t2v", out, *TWO, "--metrics-python", python) == 0
        return {row["method"]: row for row in json.loads((out / "table.json").read_text())["rows"]}, capfd.readouterr().out

    rows, shown = table(interpreter(tmp_path / "alone", False, lpips=LPIPS))
    assert rows["scope"]["lpips_vgg"] and rows["dense"]["imaging_quality"] is None and rows["dense"]["lpips_vgg"] is None
    assert "BackConsist: pip install vbench" in shown and "pip install lpips" not in shown
    for path in out.glob("*/*.quality.json"):  # nothing of LPIPS is known again
        found = json.loads(path.read_text())
        path.write_text(json.dumps({name: found[name] for name in quality.MEASURES}))

    rows, shown = table(interpreter(tmp_path / "offline", True, lpips=LPIPS, vbench=VBENCH))
    assert "LPIPS of the net vgg is left out: OSError: <urlopen error [Errno 111] Connection refused>; torchvision downloads" in shown
    assert shown.count("VBench's aesthetic_quality is left out: RuntimeError: wget: unable to resolve host") == 1
    assert rows["scope"]["lpips_alex"] and rows["scope"]["lpips_vgg"] is None and rows["scope"]["psnr"]
    assert rows["dense"]["imaging_quality"] == 0.15 and rows["dense"]["aesthetic_quality"] is None

    rows, shown = table(interpreter(tmp_path / "online", False, lpips=LPIPS, vbench=VBENCH))
    frames = [numpy.stack([numpy.asarray(Image.open(path), float) for path in sorted(out.glob(f"{name}/*/*.png"))])
              for name in ("dense", "scope")]
    apart = abs(frames[0] - frames[1]).mean() / 255
    expected = dict(lpips_alex=1 + 2 * apart, lpips_vgg=10 * (1 + 2 * apart), lpips_svg2=10 * apart)  # frames in [-1, 1], SVG2's in [0, 1]
    assert {name: rows["scope"][name] for name in expected} == pytest.approx(expected, rel=1e-3)
    assert [rows["dense"][name] for name in metrics.DIMENSIONS] == [0.15, 0.17, 0.19, 0.22]
    assert "left out" not in shown and "pip install" not in shown and " of 6" not in shown

    broken = tmp_path / "broken"
    path = interpreter(broken, False, lpips=LPIPS, vbench="import os\nos._exit(7)\n")
    (out / "scope/vbench.json").unlink()
    rows, shown = table(path)
    assert "their process ended with status 7" in shown and rows["scope"]["lpips_vgg"] and rows["scope"]["imaging_quality"] is None


def test_metrics_stand_alone():
    """The file that another interpreter runs imports nothing of the package, and neither numpy nor PyTorch before it must."""
    code = f"import sys, runpy; sys.argv = ['metrics.py', 'probe']; runpy.run_path({metrics.__file__!r}, run_name='__main__'); " \
        "assert not {'numpy', 'torch', 'scope_attn'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert set(json.loads(done.stdout)) == {"lpips", "vbench", "missing"}


def calls(monkeypatch):
    """The backend and mask of each of diffusers' own attention calls."""
    seen, registry = [], maker.attention_dispatch._AttentionBackendRegistry
    for name in ("native", "_native_math"):
        name = maker.attention_dispatch.AttentionBackendName(name)

        def watched(query, key, value, attn_mask=None, *rest, own=registry._backends[name], name=name, **more):
            seen.append((name.value, attn_mask is not None))
            return own(query, key, value, attn_mask, *rest, **more)

        monkeypatch.setitem(registry._backends, name, watched)
    return seen


@pytest.mark.parametrize("setting", ("wan2.1-t2v", "hunyuan-t2v", "hunyuan-i2v"))
def test_dense_is_one(place, tmp_path, monkeypatch, setting):
    """Dense videos, and dense calls of sparse ones, come from --dense-backend, without a mask; the control from its own."""
    seen = calls(monkeypatch)
    given = "--first", "1", "--methods", "scope-paper", "--dense-backend", "_native_math"
    assert run(place, setting, tmp_path / "out", "--no-control", *given) == 0
    dense = len(seen)
    assert set(seen) == {("_native_math", False)}
    seen.clear()
    assert run(place, setting, tmp_path / "out", *given) == 0  # the control, and nothing else
    assert set(seen) == {("_native_math", False), ("native", False)} and 10 < seen.count(("native", False)) < dense  # one tries it


@pytest.mark.parametrize("setting", ("hunyuan-t2v", "hunyuan-i2v"))
def test_padding(place, tmp_path, monkeypatch, setting):
    """HunyuanVideo without padding and mask makes the video that it makes with them, to rounding."""
    out, given = [], ("--first", "1", "--no-control", "--methods", "dense")
    for name in ("without", "with"):
        assert run(place, setting, tmp_path / name, *given) == 0
        out.append(numpy.stack([numpy.asarray(Image.open(path), int) for path in sorted((tmp_path / name).glob("dense/0000/*.png"))]))
        monkeypatch.setattr(maker, "leave_out_padding", lambda pipe: None)
    assert abs(out[0] - out[1]).max() <= 1 and out[0].std() > 1


def test_padding_is_cut():
    """Every valid token stays, and no other; a tokenizer that pads in front is refused: diffusers would take the padding for the prompt."""
    class Pipe:
        def encode_prompt(self, mask):
            return torch.arange(12).reshape(1, 3, 4), torch.zeros(1, 4), torch.tensor([mask])

        class transformer:
            transformer_blocks = single_transformer_blocks = ()

    pipe = Pipe()
    maker.leave_out_padding(pipe)
    embeds, _, mask = pipe.encode_prompt([1, 1, 0])
    assert (embeds == torch.arange(8).reshape(1, 2, 4)).all() and mask.tolist() == [[1, 1]]
    with pytest.raises(work.Refused, match="expected it behind"):
        pipe.encode_prompt([0, 1, 1])


def test_compiled(place, tmp_path, monkeypatch):
    """Every method's blocks are compiled, before what is timed begins, and videos stay the same to rounding."""
    graphs, own = [], maker.Maker.make

    def make(self, *given):
        before = maker.counters["stats"]["unique_graphs"]
        said = own(self, *given)
        graphs.append(maker.counters["stats"]["unique_graphs"] - before)
        return said

    monkeypatch.setattr(maker.Maker, "make", make)
    small = "--size", "64x64", "--frames", "5", "--steps", "2", "--first", "1", "--no-control", "--methods", "scope-paper"
    for name, more in (("eager", ()), ("compiled", ("--compile",))):
        assert run(place, "wan2.1-t2v", tmp_path / name, *small, *more) == 0
    table = (tmp_path / "compiled/table.md").read_text()
    assert "dense attention native, compiled, on CPU" in table
    assert graphs[:2] == [0, 0] and all(count > 0 for count in graphs[2:]), "eager videos, then compiled ones"
    for method in ("dense", "scope-paper"):
        assert json.loads((tmp_path / f"compiled/{method}/0000/run.json").read_text())["graphs_compiled"] == 0
        frames = [numpy.stack([numpy.asarray(Image.open(path), int) for path in sorted((tmp_path / name / method).glob("0000/*.png"))])
                  for name in ("eager", "compiled")]
        assert abs(frames[0] - frames[1]).max() <= 1


@pytest.mark.parametrize("compiled", (False, True))
def test_warm_up(tmp_path, monkeypatch, compiled):
    """One step, which no time counts, before the first video of a method, or where graphs are compiled before each."""
    seen, clock, saved = [], iter(range(100)), []

    class Pipe:
        def __call__(self, callback_on_step_end=None, generator=None, **given):
            steps = 0
            for steps in range(1, given["num_inference_steps"] + 1):
                self._interrupt = False
                if callback_on_step_end:
                    callback_on_step_end(self, steps - 1, None, {})
                if self._interrupt:
                    break
            seen.append((made.ready, generator.initial_seed(), steps, given["output_type"]))
            assert given["prompt"] == "a cat" and given["negative_prompt"] == "dark"
            next(clock)  # a call takes 2 s, by this clock
            return SimpleNamespace(frames=[numpy.zeros((2, 16, 16, 3))])

    made = maker.Maker.__new__(maker.Maker)
    made.options = SimpleNamespace(seed=7, steps=4, compile=compiled)
    made.setting, made.device = SETTINGS["wan2.1-t2v"], torch.device("cpu")
    made.pipe, made.fixed, made.ready = Pipe(), dict(negative_prompt="dark"), None
    write_video = lambda label, number, frames, fps, about: saved.append((label, number, len(frames), fps, about))
    made.results = SimpleNamespace(write_video=write_video)
    monkeypatch.setattr(made, "prepare", lambda method: setattr(made, "ready", method.label))
    monkeypatch.setattr(maker, "now", lambda device: next(clock))
    dense, other = Method("dense", "dense", {}, "native"), control("_native_math")
    for method, number in ((dense, 0), (dense, 1), (other, 1)):
        made.make(method, number, results.Clip("a cat", None))
    expected = [("dense", 7, 1, "latent"), ("dense", 7, 4, "np"), ("dense", 8, 1, "latent"), ("dense", 8, 4, "np"),
                (other.label, 8, 1, "latent"), (other.label, 8, 4, "np")]
    assert seen == expected if compiled else seen == expected[:2] + expected[3:]
    assert [clip[:4] for clip in saved] == [("dense", 0, 2, 16), ("dense", 1, 2, 16), (other.label, 1, 2, 16)]
    assert [(clip[4]["seconds"], clip[4]["seed"], clip[4]["backend"]) for clip in saved] == [
        (2, 7, "native"), (2, 8, "native"), (2, 8, "_native_math")]


def test_what_the_pipeline_is_given(place, tmp_path, monkeypatch):
    """Guidance, shift, sizes and steps of the setting; the negative prompt of SVG2's and SpargeAttn's scripts, another, or none."""
    seen = []
    for kind in (diffusers.WanPipeline, diffusers.HunyuanVideoPipeline):
        def called(self, *given, own=kind.__call__, **more):
            names = "guidance_scale", "guidance_scale_2", "width", "height", "num_frames", "num_inference_steps"
            negative = more.get("negative_prompt")
            seen.append((negative and negative[:12], self.scheduler.config.get("flow_shift"), *map(more.get, names)))
            return own(self, *given, **more)

        monkeypatch.setattr(kind, "__call__", called)
    small = "--size", "64x48", "--frames", "5", "--steps", "1", "--first", "1", "--no-control", "--methods", "dense"
    for i, (setting, more) in enumerate((("wan2.1-t2v", ()), ("wan2.2-t2v", ()), ("wan2.1-t2v", ("--negative-prompt", "dark")),
                                         ("wan2.1-t2v", ("--negative-prompt", "none")), ("hunyuan-t2v", ()))):
        assert run(place, setting, tmp_path / str(i), *small, *more) == 0
    assert list(dict.fromkeys(seen)) == [
        ("Bright tones", 5, 5, None, 64, 48, 5, 1), ("色调艳丽，过曝，静态，细", 12, 4, 3, 64, 48, 5, 1),
        ("dark", 5, 5, None, 64, 48, 5, 1),
        (None, 5, 5, None, 64, 48, 5, 1), (None, None, 6, None, 64, 48, 5, 1)]


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
    assert run(place, "wan2.1-t2v", out, "--no-control", "--methods", "scope-mean") == 1
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
    "negative": (["--setting", "hunyuan-t2v", "--negative-prompt", "dark"], "HunyuanVideo's guidance is embedded"),
    "backend": (["--dense-backend", "cudnn"], '--dense-backend: got "cudnn", expected of diffusers\' _flash_3'),
    "our backend": (["--dense-backend", "scope"], '--dense-backend: got "scope"'),
    "backend that cannot": (["--control-backend", "_native_xla"], "_native_xla does not run here"),
    "no control": (["--control-backend", "native"], "got native, which dense videos are made with"),
    "control of none": (["--no-control", "--control-backend", "_native_flash"], "no control row"),
    "interpreter": (["--metrics-python", "no/python"], "no/python does not run"),
    "no interpreter": (["--metrics-python", shutil.which("false")], "is no Python 3.9 or later"),
    "no packages": (["--metrics-python", shutil.which("python3")], "has neither lpips nor vbench"),
    "folder's backend": (["--dense-backend", "_native_flash", "--out", "made"], "has dense_backend 'native', and this run '_native_flash'"),
    "folder's compile": (["--compile", "--out", "made"], "has compile False, and this run True"),
    "folder's negative": (["--negative-prompt", "none", "--out", "made"], "has negative_prompt 'Bright tones"),
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
        assert len(setting.paper) == 5 and all(len(row) == len(PAPER_COLUMNS) for row in setting.paper.values())
        sparse = [row for method, row in setting.paper.items() if method != "dense"]
        assert setting.paper["scope-paper"][:3] == (max(row[0] for row in sparse), max(row[1] for row in sparse),
                                                    min(row[2] for row in sparse))


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
