"""Former place of the function that reads an edit, for programs that call it here."""

from dit_accel.serving.http.api import Limits, Served
from dit_accel.serving.http.requests import EditRequest, Fields, read


def read_edit(fields: Fields, limits: Limits, model: str) -> EditRequest:
    """Check the fields of a form for an edit, and decode its images."""
    return read(fields, EditRequest, Served(model, None, limits))
