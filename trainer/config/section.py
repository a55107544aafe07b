"""The base class and the common types of recipe sections."""

import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Ratio = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(ge=1)]
PathText = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path on this machine; `~` is expanded."""
Precision = Literal["fp32", "bf16", "fp16"]


def execution(default: Any) -> Any:
    """Declare a key that does not change results: it is not hashed and may differ between two starts of a run."""
    return Field(default, json_schema_extra={"execution": True})


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    @classmethod
    def kinds(cls) -> "dict[str, type[Section]]":
        """Return the sections that may stand in place of this one, by its key `kind`; they have its keys and more."""
        return {}
