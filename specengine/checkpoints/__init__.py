"""Read and write files: model folders, GGUF, adapters, draft heads, the default model and its shipped head."""

from specengine.checkpoints import embedded
from specengine.files import cache_dir

__all__ = ["cache_dir", "embedded", "resolve"]


def resolve(
    name_or_path: str | None, *, offline: bool = False, progress: embedded.Progress | None = None
) -> str:
    """Return the folder of the embedded model for its name or None; a Hub id or a local path as it is."""
    return (
        str(embedded.path(offline=offline, progress=progress))
        if name_or_path is None or name_or_path == embedded.NAME
        else name_or_path
    )
