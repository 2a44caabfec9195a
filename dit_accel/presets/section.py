"""Base classes of preset sections: frozen, strict models, some of which have several forms."""

from typing import Annotated, Any, ClassVar, Self, Union, get_args

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic.fields import FieldInfo

from dit_accel.errors import PresetError, shown

MOST_TOKENS = 2**31 - 1  # bound for keys that count tokens or blocks


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class Formed(Section):
    """A section with forms: the value of one key, the chooser, selects a subclass with its own keys.

    Calling the section's class returns the form: ``Schedule(control="interval", interval=5)`` is an
    ``IntervalSchedule``. If code reads a key that a form lacks, the form has it as a class constant, with the value
    that has no effect. Section ``skip`` needs no such constants, because only its policy reads it.
    """

    chooser: ClassVar[str]  # the key that selects the form
    forms: ClassVar[dict[str, type[Any]]]  # by the chooser's value; only the section has them, not its forms

    def __new__(cls, *args: Any, **values: Any) -> Self:
        return super().__new__(cls._form(values) if cls.is_formed() else cls)

    @classmethod
    def form_of(cls, values: Any) -> str | None:
        """Return the name of the form that a section's values choose, perhaps an invalid one; None = not a section."""
        if isinstance(values, cls):
            return str(getattr(values, cls.chooser))
        if not isinstance(values, dict):
            return None
        return str(values.get(cls.chooser, cls.model_fields[cls.chooser].default))

    @classmethod
    def foreign_keys(cls, form: Any) -> list[str]:
        """Return the keys that other forms have and this form lacks; empty if ``form`` is no form."""
        if not isinstance(form, str) or form not in cls.forms:
            return []
        known = cls.forms[form].model_fields
        return [key for other in cls.forms.values() for key in other.model_fields if key not in known]

    @classmethod
    def is_formed(cls) -> bool:
        return "forms" in vars(cls)

    @classmethod
    def _form(cls, values: dict[str, Any]) -> type[Any]:
        if (form := cls.form_of(values)) not in cls.forms:
            raise PresetError(f"{cls.chooser} must be one of {', '.join(cls.forms)}, got {shown(form)}")
        return cls.forms[form]

    @model_validator(mode="wrap")
    @classmethod
    def _as_form(cls, values: Any, handler: Any) -> Any:
        if not isinstance(values, dict):
            return handler(values)
        if cls.is_formed():
            return cls._form(values).model_validate(values)
        for key in values:
            owners = [name for name, form in cls.forms.items() if key in form.model_fields]
            if owners and key not in cls.model_fields:
                chooser, owner = cls.chooser, owners[0]
                why = f"belongs to {chooser} '{owner}', and {chooser} is '{cls.form_of(values)}'"
                raise ValueError(f"{key} {why}: remove it, or set {chooser} to {owner}")
        return handler(values)

    @model_validator(mode="after")
    def _says_its_form(self) -> Self:
        """Mark the chooser as set, because a dump may contain the set values only."""
        section = formed(type(self))
        assert section is not None
        if getattr(self, self.chooser) != section.model_fields[self.chooser].default:
            self.__pydantic_fields_set__.add(self.chooser)
        return self


def any_form(section: type[Formed]) -> Any:
    """Return the type of a field that holds one of a section's forms."""
    forms = tuple(Annotated[form, Tag(name)] for name, form in section.forms.items())
    return Annotated[Union[forms], Field(discriminator=Discriminator(section.form_of))]  # noqa: UP007


def formed(model: type[BaseModel]) -> type[Formed] | None:
    """Return the section that a model is, or is a form of; None = a model without forms."""
    return next((base for base in model.__mro__ if issubclass(base, Formed) and base.is_formed()), None)


def section_in(field: FieldInfo) -> type[Section] | None:
    """Return the section that a field of a model holds, not one of its forms; None = the field holds a value."""
    kind: Any = field.annotation
    while get_args(kind):  # Annotated[Form, …] | …
        kind = get_args(kind)[0]
    if not (isinstance(kind, type) and issubclass(kind, Section)):
        return None
    return formed(kind) or kind
