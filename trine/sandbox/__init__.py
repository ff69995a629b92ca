"""Where untrusted programs run: pooled child processes with CPU, memory and wall limits.

Chat templates and GGUF headers come with a model, so they are somebody else's programs. They
run in a child that holds nothing, may open nothing it does not need, and is killed when it
takes too much (rule S4 of the architecture).
"""

from __future__ import annotations

from .pool import Exceeded, Failed, Sandbox, SandboxError

__all__ = ["Exceeded", "Failed", "Sandbox", "SandboxError"]
