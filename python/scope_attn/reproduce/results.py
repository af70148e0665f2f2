"""A folder of results: what it was made with, its videos, which appear whole, and what was measured of them."""
from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy
from PIL import Image, ImageOps

from .settings import Refused


class Clip(NamedTuple):
    prompt: str
    image: Optional[Path]  # of image to video

    def about(self) -> list:
        return [self.prompt, self.image and hashlib.sha256(self.image.read_bytes()).hexdigest()]


def read_clips(path: Path, from_image: bool, first: Optional[int]) -> list[Clip]:
    """A prompt on each line; before it, for image to video, the image's path from the file's folder, and a tab."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()][:first]
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"--prompts: {error}") from None
    if not lines:
        raise Refused(f"--prompts: {path} has no prompts")
    clips = []
    for line in lines:
        name, tab, prompt = line.partition("\t")
        if from_image and not (tab and prompt.strip()):
            raise Refused(f'--prompts: {path}: got "{line[:80]}", expected IMAGE<tab>PROMPT: this setting starts from images')
        image = path.parent / name.strip() if from_image else None
        if image is not None:
            try:
                Image.open(image).verify()
            except Exception as error:  # whatever a format's reader says
                raise Refused(f"--prompts: {path}: {image} is no image that can be read: {error}") from None
        clips.append(Clip(prompt.strip() if from_image else line, image))
    return clips


def cropped(image: Path, size: tuple[int, int]) -> Image.Image:
    """The largest middle part of the size's shape, 16:9 at 1280x720, scaled to it."""
    return ImageOps.fit(ImageOps.exif_transpose(Image.open(image)).convert("RGB"), size, Image.Resampling.LANCZOS)


def write_whole(path: Path, text: str):
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, value: Any):
    write_whole(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def appeared(path: Path) -> Path:
    """What a rank wrote; a shared file system may show it to other machines a minute late."""
    for _ in range(120):
        if path.exists():
            return path
        time.sleep(1)
    raise FileNotFoundError(f"{path} was written by another rank, and does not appear here: --out must be on a file system that all share")


def ffmpeg() -> Optional[str]:
    """The command, or the one that the package imageio-ffmpeg brings."""
    try:
        import imageio_ffmpeg
        return imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError):
        return shutil.which("ffmpeg")


class Results:
    NAME = "reproduce.json"

    def __init__(self, folder: Path):
        self.folder = folder
        self.profile = folder / "profile.csv"  # SVOO's

    def check(self, about: dict[str, Any]):
        """Refuses a folder of another run. More prompts, or fewer, are the same run."""
        if not self.folder.exists():
            return
        if not self.folder.is_dir():
            raise Refused(f"--out: {self.folder} is no folder")
        path = self.folder / self.NAME
        if not path.exists():
            if any(self.folder.iterdir()):
                raise Refused(f"--out: {self.folder} holds something else, and no {self.NAME}; give an empty or a new folder")
            return
        try:
            saved = dict(json.loads(path.read_text(encoding="utf-8")))
            prompts = saved["prompts"]
        except (ValueError, KeyError, TypeError) as error:
            raise Refused(f"--out: {path} is none of ours: {error!r}") from None
        for name, value in about.items():
            if name != "prompts" and saved.get(name) != value:
                raise Refused(f"--out: {self.folder} has {name} {saved.get(name)!r}, and this run {value!r}; give another folder")
        for i, (theirs, ours) in enumerate(zip(prompts, about["prompts"])):
            if theirs != ours:
                raise Refused(f"--out: {self.folder} has another prompt or image {i}: {theirs[0]!r}, and this run "
                              f"{ours[0]!r}; give another "
                              "folder")

    def begin(self, about: dict[str, Any]):
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / self.NAME
        if path.exists():
            saved = json.loads(path.read_text(encoding="utf-8"))["prompts"]
            about = dict(about, prompts=max(saved, about["prompts"], key=len))
        write_json(path, about)

    def video(self, label: str, clip: int) -> Path:
        return self.folder / label / f"{clip:04d}"

    def measured(self, label: str, clip: int) -> Path:
        return self.folder / label / f"{clip:04d}.quality.json"

    def vbench(self, label: str) -> Path:
        return self.folder / label / "vbench.json"

    def left_out(self, label: str) -> Path:
        """What could not be measured of a method, and why."""
        return self.folder / label / "left_out.json"

    def read(self, path: Path) -> Any:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def write_video(self, label: str, clip: int, frames: numpy.ndarray, fps: int, about: dict[str, Any]):
        """frames: [frames, height, width, 3] in [0, 1]. If another run was first, its video stays."""
        final = self.video(label, clip)
        part = final.with_name(f".{final.name}.{uuid.uuid4().hex}")
        part.mkdir(parents=True)
        try:
            pictures = (frames.clip(0, 1) * 255).round().astype(numpy.uint8)
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda i: Image.fromarray(pictures[i]).save(part / f"frame_{i:03d}.png"), range(len(pictures))))
            command = ffmpeg()
            if command:  # to look at, and for VBench; the frames are the result
                made = subprocess.run([command, "-nostdin", "-loglevel", "error", "-framerate", str(fps), "-i", part / "frame_%03d.png",
                                       "-crf", "10", "-pix_fmt", "yuv420p", part / "clip.mp4"])
                if made.returncode != 0:
                    (part / "clip.mp4").unlink(missing_ok=True)
                    print(f"{final}: ffmpeg made no clip.mp4 (status {made.returncode}); the frames are there", file=sys.stderr)
            write_json(part / "run.json", about)
            try:
                part.rename(final)
            except OSError:
                if not final.exists():
                    raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
