"""Frames of a video file, decoded by PyAV (the extra `video`). The only file that imports it."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strop.extras import require

if TYPE_CHECKING:
    from PIL.Image import Image

MIN_FRAMES = 4
"""A shorter sample says little about a video; the processors of the Qwen families take as many."""


class DamagedVideo(ValueError):
    """A file that the decoder cannot read."""


@dataclass(frozen=True)
class DecodedFrames:
    """Frames of a video, and when each of them is shown, in seconds."""

    frames: list[Image]
    times: list[float]


def frame_numbers(total: int, seconds: float, fps: float, most: int) -> list[int]:
    """Numbers of frames spread evenly over a video: `fps` per second, at least MIN_FRAMES, at most `most`."""
    wanted = min(max(int(seconds * fps), MIN_FRAMES), most, total)
    if wanted == 1:
        return [0]
    step = (total - 1) / (wanted - 1)
    return [round(step * number) for number in range(wanted)]


def decode_frames(content: bytes, fps: float, most: int) -> DecodedFrames:
    """Decode a video; MissingExtra without a decoder, DamagedVideo for what it cannot read."""
    av: Any = require("av", extra="video", why="A video file")
    try:
        return _decode(av, content, fps, most)
    except (av.error.FFmpegError, IndexError) as error:
        raise DamagedVideo(f"it is no video that can be decoded ({error})") from error


def _decode(av: Any, content: bytes, fps: float, most: int) -> DecodedFrames:
    times = []
    with av.open(io.BytesIO(content)) as container:  # files often state no number of frames, or a wrong one
        stream = container.streams.video[0]
        rate = float(stream.average_rate or stream.guessed_rate or math.nan)
        for number, frame in enumerate(container.decode(stream)):
            times.append(float(frame.time) if frame.time is not None else number / rate)
    if not times or not all(map(math.isfinite, times)):
        raise DamagedVideo(f"{len(times)} frames could be decoded, and their times are not known")
    seconds = times[-1] - times[0] + 1 / rate if math.isfinite(rate) else times[-1] - times[0]
    chosen = frame_numbers(len(times), seconds, fps, most)
    wanted = set(chosen)
    frames = []
    with av.open(io.BytesIO(content)) as container:
        for number, frame in enumerate(container.decode(container.streams.video[0])):
            if number in wanted:
                frames.append(frame.to_image())
    return DecodedFrames(frames, [times[number] - times[0] for number in chosen])
