"""Fields of requests, OpenAI's and ours, their rules for a ``Served`` model (validation's context), and their jobs."""

import re
import secrets
from io import BytesIO
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from PIL import Image
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, model_validator
from pydantic.types import Json

from dit_accel.constants import TARGETS
from dit_accel.errors import PresetError, shortened, shown
from dit_accel.presets import Preset, preset_names
from dit_accel.presets.complaints import did_you_mean
from dit_accel.presets.sections import clashing
from dit_accel.serving.engine import VideoForm
from dit_accel.serving.http.api import Fields, RequestError, Served, explained
from dit_accel.serving.input_images import as_image, as_mask
from dit_accel.serving.loras import require_named
from dit_accel.serving.prompts import CONTRACT, PARTIAL_IMAGES, STREAM, Job, contracted

LONGEST_PROMPT = 4000  # characters
SIDE_UNIT = 16  # pixels of one token in most models
SUFFIXES = {"png": ".png", "jpeg": ".jpg", "webp": ".webp"}
WITHOUT_EFFECT = ("quality", "style", "moderation", "input_fidelity")  # OpenAI's fields that change nothing here
FILES = ("image", "mask", "input_reference")  # fields of forms that are files


class PromptRequest(BaseModel):
    """Fields that images and videos share: OpenAI's up to ``user``, and ours."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    prompt: str = Field(min_length=1, max_length=LONGEST_PROMPT)
    model: str | None = None
    size: str = Field("auto", pattern=r"^(auto|[0-9]{1,5}x[0-9]{1,5})$")
    user: str | None = None
    negative_prompt: str | None = Field(None, max_length=LONGEST_PROMPT)
    seed: int | None = Field(None, ge=0, lt=2**63)
    steps: int | None = Field(None, ge=1)
    guidance: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    preset: str | None = None
    target_error: float | None = Field(None, gt=0, allow_inf_nan=False)
    target_psnr: float | None = Field(None, gt=0, allow_inf_nan=False)
    computed_steps: int | None = Field(None, ge=1)
    max_seconds: float | None = Field(None, gt=0, allow_inf_nan=False)
    loras: dict[str, float] | Json[dict[str, float]] | None = None  # text in a form

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, values: Any) -> Any:
        """Drop optional fields that are null, as OpenAI's clients send them."""
        if not isinstance(values, dict):
            return values
        for name, value in values.items():
            if isinstance(value, bytes) and name in cls.model_fields and name not in FILES:  # pydantic would decode it
                raise RequestError(f"{name} must be text, not a file", name, "invalid_value")
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {name: value for name, value in values.items() if value is not None or name not in optional}

    @model_validator(mode="after")
    def _require_served(self, info: ValidationInfo) -> Self:
        limits = info.context.limits
        if self.preset not in (None, "none", *preset_names()):  # a path of the server is no preset
            meant = did_you_mean(self.preset, preset_names())
            raise RequestError(f"preset {shown(self.preset)} does not exist{meant}", "preset", "invalid_value")
        if clash := clashing(*self.targets):
            raise RequestError(clash, next(iter(self.targets)), "invalid_value")
        require_named(self.loras or {}, info.context.loras)
        require_at_most("steps", self.steps or 1, limits.steps)
        require_at_most("computed_steps", self.computed_steps or 1, self.steps or limits.steps)
        for side in self.sides:
            if side is not None and (side % SIDE_UNIT or not SIDE_UNIT <= side <= limits.side):
                rule = f"sides of {SIDE_UNIT} to {limits.side:,} pixels, multiples of {SIDE_UNIT}"
                raise RequestError(f"size must have {rule}, got {self.size}", "size", "invalid_value")
        return self

    @property
    def targets(self) -> dict[str, Any]:
        return {name: value for name in TARGETS if (value := getattr(self, name)) is not None}

    @property
    def sides(self) -> tuple[int | None, int | None]:
        width, height = (None, None) if self.size == "auto" else map(int, self.size.split("x"))
        return width, height

    def settings(self, **more: Any) -> dict[str, Any]:
        width, height = self.sides
        fields = self.model_dump(include={"prompt", "negative_prompt", "steps", "guidance", "loras"})
        settings = {name.replace("_", "-"): value for name, value in fields.items()}
        settings |= {"height": height, "width": width, **more}
        settings["seed"] = secrets.randbelow(2**32) if self.seed is None else self.seed
        return {key: value for key, value in settings.items() if value is not None}


class ImageRequest(PromptRequest):
    """Body of ``POST /v1/images/generations``; of OpenAI's fields the last ones have no effect here."""

    event: ClassVar[str] = "image_generation"  # beginning of the names of its server-sent events
    n: int = Field(1, ge=1)
    response_format: Literal["b64_json", "url"] = "b64_json"
    output_format: Literal["png", "jpeg", "webp"] = "png"
    stream: bool = False
    partial_images: int = Field(0, ge=0, le=3)
    background: Literal["auto", "opaque"] = "auto"
    output_compression: int = Field(100, ge=100, le=100)
    quality: Literal["auto", "standard", "hd", "low", "medium", "high"] = "auto"
    style: Literal["vivid", "natural"] | None = None
    moderation: Literal["auto", "low"] = "auto"

    @model_validator(mode="after")
    def _require_few(self, info: ValidationInfo) -> Self:
        if self.partial_images and not self.stream:
            raise RequestError("partial_images are events: add stream: true", "partial_images", "invalid_value")
        require_at_most("n", self.n, info.context.limits.images)
        return self

    def notes(self) -> list[str]:
        unused = [name for name in WITHOUT_EFFECT if getattr(self, name, None) not in (None, "auto")]
        notes = [f"{name} has no effect on this server; steps and preset decide on time and quality" for name in unused]
        if self.response_format == "url":
            notes.append("the server keeps no images, so url is a data URL that holds the file")
        return notes

    def jobs(self, **inputs: Any) -> list[Job]:
        settings = self.settings(**inputs) | ({PARTIAL_IMAGES: self.partial_images} if self.partial_images else {})
        return [Job(index, {**settings, "seed": settings["seed"] + index}) for index in range(self.n)]


def _few(files: Any, info: ValidationInfo) -> Any:
    if isinstance(files, list) and len(files) > (most := info.context.limits.images):
        raise RequestError(f"image must be given at most {most} times, got {len(files)}", "image", "limit_exceeded")
    return files


def _decoded(file: Any, info: ValidationInfo) -> Image.Image:
    """Return the image of a file: of a mask grey levels, white where the image changes, otherwise RGB."""
    name, limits = str(info.field_name), info.context.limits
    if not isinstance(file, bytes):
        raise RequestError(f"{name} must be a file in a form", name, "invalid_value")
    try:
        with Image.open(BytesIO(file), formats=[name.upper() for name in SUFFIXES]) as image:
            if max(image.size) > limits.side:
                size = "x".join(map(str, image.size))
                message = f"{name} must have sides of at most {limits.side:,} pixels, got {size}"
                raise RequestError(message, name, "limit_exceeded")
            return as_mask(image) if name == "mask" else as_image(image)
    except RequestError:
        raise
    except Exception:  # decoders raise errors of any type for broken files
        raise RequestError(f"{name} must be a {', '.join(SUFFIXES)} file", name, "invalid_value") from None


ImageFile = Annotated[Any, BeforeValidator(_decoded)]


class EditRequest(ImageRequest):
    """Form of ``POST /v1/images/edits``; the mask is white where the first image changes."""

    event: ClassVar[str] = "image_edit"
    image: Annotated[list[ImageFile], BeforeValidator(_few)]
    mask: ImageFile = None
    strength: float | None = Field(None, gt=0, le=1)
    input_fidelity: Literal["low", "high"] | None = None

    @model_validator(mode="after")
    def _require_equal_sizes(self) -> Self:
        if self.mask is not None and self.mask.size != self.image[0].size:
            size, mask = ("x".join(map(str, image.size)) for image in (self.image[0], self.mask))
            raise RequestError(f"mask must have the first image's size, {size}, got {mask}", "mask", "invalid_value")
        return self

    def jobs(self, **inputs: Any) -> list[Job]:
        images = self.image if len(self.image) > 1 else self.image[0]
        return super().jobs(image=images, mask=self.mask, strength=self.strength, **inputs)


def _number(value: Any) -> Any:
    """Return the number that a text such as "4" or "2.5" stands for; OpenAI's client sends seconds as text."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", value) else value


class VideoRequest(PromptRequest):
    """Body of ``POST /v1/videos``, JSON or a form; ``input_reference`` is the input image, in a form only."""

    seconds: Annotated[float | None, BeforeValidator(_number)] = Field(None, gt=0, le=3600, allow_inf_nan=False)
    num_frames: int | None = Field(None, ge=1)
    fps: float | None = Field(None, ge=1, le=100, allow_inf_nan=False)
    input_reference: ImageFile = None
    stream: bool = False

    @model_validator(mode="after")
    def _require_short(self, info: ValidationInfo) -> Self:
        form, most = info.context.form, info.context.limits.frames
        if self.seconds is not None and self.num_frames is not None:
            raise RequestError("give seconds or num_frames, not both", "seconds", "invalid_value")
        if self.stream and not form.in_chunks:
            raise RequestError("the model decodes once, after its steps: leave out stream", "stream", "unsupported")
        frames = self.frames(form) or 1
        if self.seconds is not None and frames > most:
            raise RequestError(f"seconds must give up to {most:,} frames, got {frames:,}", "seconds", "limit_exceeded")
        require_at_most("num_frames", frames, most)
        return self

    def job(self, form: VideoForm) -> Job:
        more = {"num-frames": self.frames(form), STREAM: self.stream or None}
        return Job(0, self.settings(**more, fps=self.fps, image=self.input_reference))

    def frames(self, form: VideoForm) -> int | None:
        return self.num_frames if self.seconds is None else form.frames(self.seconds, self.fps)


AnyRequest, AnyPrompt = TypeVar("AnyRequest", bound=BaseModel), TypeVar("AnyPrompt", bound=PromptRequest)


def read(body: bytes | Fields, kind: type[AnyRequest], served: Served) -> AnyRequest:
    try:
        if isinstance(body, bytes):
            return kind.model_validate_json(body, context=served)
        return kind.model_validate(_by_name(body), strict=False, context=served)  # numbers of forms are text
    except ValidationError as failure:
        raise explained(failure.errors()[0], kind) from None


def _by_name(fields: Fields) -> dict[str, Any]:
    """Return fields by their names; only ``image`` may be given several times."""
    values: dict[str, Any] = {}
    for name, value in fields:
        if name in ("image", "image[]"):  # OpenAI's names of one and of several
            values.setdefault("image", []).append(value)
        elif name in values:
            raise RequestError(f"{shortened(name)} must be given once", shortened(name), "invalid_value")
        else:
            values[name] = value
    return values


def require_at_most(param: str, value: int, most: int) -> None:
    if value > most:
        raise RequestError(f"{param} must be at most {most:,}, got {value:,}", param, "limit_exceeded")


def requested_preset(request: PromptRequest, served: Served) -> Preset | None:
    """Return the preset of a request, None = plain; raise an error if it does not support the request's targets."""
    try:
        return contracted(served.preset, request.model_dump(include=set(CONTRACT)), served.form)
    except PresetError as error:
        raise RequestError(str(error), next(iter(request.targets), "preset"), "invalid_value") from None
