"""Former functions that read requests, for programs that call them; :func:`dit_accel.serving.http.requests.read` does.

They raise :class:`~dit_accel.serving.api.RequestError` as that function does.
"""

from __future__ import annotations

from dit_accel.serving.engine import VideoForm
from dit_accel.serving.http.api import Limits, Served
from dit_accel.serving.http.requests import EditRequest, Fields, ImageRequest, VideoRequest, read


def read_request(body: bytes, limits: Limits, model: str) -> ImageRequest:
    """Parse and check the JSON body of a request for images."""
    return read(body, ImageRequest, Served(model, None, limits))


def read_edit(fields: Fields, limits: Limits, model: str) -> EditRequest:
    """Check the fields of a form for an edit, and decode its images."""
    return read(fields, EditRequest, Served(model, None, limits))


def read_video(body: bytes | Fields, limits: Limits, model: str, form: VideoForm) -> VideoRequest:
    """Parse and check a request for a video of this form: a JSON body, or the fields of a form."""
    return read(body, VideoRequest, Served(model, None, limits, form))
