"""Triton's interpreter without a work that it repeats: it patches triton.language at every call of a device function.

A call of `tl.max` or of a kernel's own helper then looks through some thousand names, which takes longer than what the
call computes.
"""

from __future__ import annotations

from typing import Any


def patch_once_a_launch() -> None:
    """Have the interpreter patch the language for the first call of a launch from each module, and not again."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    if hasattr(patch, "patched"):
        return
    patched: dict[int, Any] = {}  # by address, the global names of modules

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:
            patched.clear()
            super().restore()

    def patch_once(fn: Any) -> Any:
        names = fn.__globals__
        if id(names) in patched:
            return Scope()
        patched[id(names)] = names
        scope = Scope()
        scope._changes = patch(fn)._changes
        return scope

    patch_once.patched = patched  # type: ignore[attr-defined]
    interpreter._patch_lang = patch_once
