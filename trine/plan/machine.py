"""Which platform: the one asked for, the first that is there, or, only to plan for it, a GPU that is not.

It does not know models.
"""

from __future__ import annotations

from typing import Any

from trine import registry
from trine.chip import CHIPS, Chip
from trine.config import Config
from trine.errors import ConfigError, Unsupported
from trine.platforms.base import Facts

from .record import Reasons


class Pretended:
    """A GPU that is not here: enough of a platform to plan for it."""

    asynchronous = True

    def __init__(self, chip: Chip) -> None:
        self.chip, self.name = chip, chip.platform

    def facts(self) -> Facts:
        chip = self.chip
        return Facts(chip.platform, chip.name, chip.cores, chip.memory, capability=chip.capability)

    def memory(self) -> tuple[int, int]:
        return self.chip.memory, self.chip.memory

    def graph(self) -> Any:
        return self


def platform(config: Config, reasons: Reasons, *, real: bool) -> Any:
    """The platform asked for, or the first that is there."""
    if config.platform in CHIPS:
        if real:
            raise ConfigError(
                f"platform: {config.platform} is for `trine plan`, which pretends; to run on a GPU that is here: "
                f"{CHIPS[config.platform].platform}",
                "platform",
            )
        found: Any = Pretended(CHIPS[config.platform])
    else:
        found = _first(config)
    if config.tensor_parallel_size != 1:
        raise Unsupported(
            f"tensor_parallel_size {config.tensor_parallel_size}: the platform {found.name} is one device; give 1, or leave it out"
        )
    _note(found, config, reasons)
    return found


def _first(config: Config) -> Any:
    asked = config.platform != "auto"
    kinds = (
        [registry.get("platforms", config.platform)]
        if asked
        else sorted(registry.find("platforms").values(), key=lambda kind: kind.order)
    )
    refusals = [(kind.name, kind.cannot()) for kind in kinds]
    able = [kind for kind, (_, cannot) in zip(kinds, refusals, strict=True) if cannot is None]
    if not able:
        said = "; ".join(f"{name} cannot: {cannot}" for name, cannot in refusals)
        raise Unsupported(f"no platform can run: {said}")
    return able[0]()


def _note(platform: Any, config: Config, reasons: Reasons) -> None:
    facts: Facts = platform.facts()
    if platform.asynchronous:
        generation = ".".join(map(str, facts.capability))
        what = f"{facts.chip}, generation {generation}, {facts.cores} multiprocessors"
    else:
        what = f"{facts.chip}, {facts.cores} cores{''.join(', ' + feature for feature in facts.features)}"
    pretended = (
        "; pretended, it need not be here; libraries beside Triton are those of here"
        if config.platform in CHIPS
        else ""
    )
    reasons.note("platform", platform.name, what + pretended)
