"""What is written on every box, so that whoever finds it knows whose it is. Labels, because that is what engines keep."""

from collections.abc import Mapping
from datetime import datetime

from pydantic import ValidationError

from rollstream.sandboxes.protocol import SandboxTag
from schemas.sandbox import SandboxHolder

PREFIX = "rollstream.sandbox"
HANDLE = PREFIX
"""The label with the box's id."""


def labels(sandbox_id: str, tag: SandboxTag) -> dict[str, str]:
    """A tag as labels; what it does not have is left out."""
    fields = {
        "installation": tag.installation,
        "host": tag.host,
        "expires_at": tag.expires_at.isoformat(),
        "worker": tag.holder.worker,
        "run": tag.holder.run,
        "session": tag.holder.session,
        "consumer_group": tag.holder.consumer_group,
        "fence": None if tag.holder.fence is None else str(tag.holder.fence),
    }
    return {HANDLE: sandbox_id} | {f"{PREFIX}.{name}": value for name, value in fields.items() if value is not None}


def from_labels(found: Mapping[str, str]) -> SandboxTag | None:
    """The tag that labels say, or None if they are not ours or garbage: what nobody can read, nobody removes."""
    if HANDLE not in found:
        return None
    fields = {name.removeprefix(f"{PREFIX}."): value for name, value in found.items()}
    try:
        holder = {name: fields[name] for name in ("worker", "run", "session", "consumer_group", "fence") if name in fields}
        return SandboxTag(
            installation=fields["installation"],
            host=fields["host"],
            holder=SandboxHolder.model_validate(holder),
            expires_at=datetime.fromisoformat(fields["expires_at"]),
        )
    except (KeyError, ValueError, ValidationError):
        return None
