"""SWE-bench instances as they are published: admitted unmodified, with everything that grades kept private.

Lists come as JSON lists or as JSON text of one. What the harness needs beyond the instance (image, parser) is in the row, or
follows from its repository and id by rule.
"""

import json
from typing import Annotated, ClassVar

from pydantic import AliasChoices, Field, field_validator, model_validator

from rollstream.environments.code.grading import EvalType
from rollstream.environments.code.logs import PARSERS, is_junk, parser_name
from rollstream.environments.code.patches import Patch, read_patch
from rollstream.environments.protocol import Task
from rollstream.settings import SweBenchSettings

IMAGE_TEMPLATE = SweBenchSettings().image_template
PUBLIC_FIELDS = frozenset(
    {"instance_id", "repo", "base_commit", "problem_statement", "version", "environment_setup_commit", "image"}
)
"""Everything else grades: patches, test names, hints, and the script that runs them."""


class SweBenchTask(Task):
    """One instance. Fields of the published rows that nothing here uses are left out."""

    public_fields: ClassVar[frozenset[str]] = PUBLIC_FIELDS

    instance_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)]
    repo: Annotated[str, Field(min_length=1)]
    base_commit: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{7,64}$")]
    problem_statement: Annotated[str, Field(min_length=1)]
    patch: str = ""
    """The reference; what `oracle` hands in."""
    test_patch: str = ""
    version: str = ""
    environment_setup_commit: str | None = None
    fail_to_pass: tuple[str, ...] = Field(validation_alias=AliasChoices("FAIL_TO_PASS", "fail_to_pass"))
    pass_to_pass: tuple[str, ...] = Field(default=(), validation_alias=AliasChoices("PASS_TO_PASS", "pass_to_pass"))
    image: str | None = None
    eval_script: str | None = None
    test_command: str | None = None
    """Instead of an `eval_script`: run as it is, after the test patch is applied."""
    log_parser: str | None = None
    eval_type: EvalType = "pass_and_fail"

    @field_validator("fail_to_pass", "pass_to_pass", mode="before")
    @classmethod
    def _list_or_its_json(cls, value: object) -> object:
        if value is None or value == "":
            return ()
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except json.JSONDecodeError:
                raise ValueError("expected a list of test ids, or the JSON text of one") from None
        if not isinstance(value, list | tuple) or not all(isinstance(name, str) and name for name in value):
            raise ValueError("expected a list of test ids, or the JSON text of one")
        return tuple(value)

    @field_validator("eval_type", mode="before")
    @classmethod
    def _default_eval_type(cls, value: object) -> object:
        return value or "pass_and_fail"

    @model_validator(mode="after")
    def _can_be_graded(self) -> "SweBenchTask":
        if not any(not is_junk(name) for name in self.fail_to_pass):
            raise ValueError("FAIL_TO_PASS names no test, so nothing could tell that the bug is mended")
        if self.parser is None:
            raise ValueError(f"log_parser is none of {', '.join(sorted(PARSERS))} nor SWE-bench's name of one")
        if self.test_patch.strip() and not isinstance(read_patch(self.test_patch.encode()), Patch):
            raise ValueError("test_patch is no diff of files in the repository")
        return self

    @property
    def parser(self) -> str | None:
        """Our name of the log parser; None if the row names one that there is not."""
        return parser_name(self.log_parser, self.repo)

    def image_name(self, template: str = IMAGE_TEMPLATE) -> str:
        """The image that its box is made of: the row's own, else by rule."""
        return self.image or image_of(self.instance_id, template)


def image_of(instance_id: str, template: str = IMAGE_TEMPLATE) -> str:
    """The name of an instance's image.

    Raises:
        ValueError: the template has another placeholder than `{id}` and `{instance_id}`.
    """
    try:
        return template.format(id=instance_id.lower().replace("__", "_1776_"), instance_id=instance_id)
    except (KeyError, IndexError) as error:
        raise ValueError(f"expected {{id}} or {{instance_id}} in the image template {template!r}, found {error}") from None
