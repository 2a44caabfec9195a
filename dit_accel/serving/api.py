"""Former place of the limits and errors of requests, for programs that import them from here."""

from dit_accel.serving.http.api import Limits as Limits
from dit_accel.serving.http.api import RequestError as RequestError
