"""A table of what may be put aside: what each choice saves and costs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from .choice import Link, Measured, choose


@dataclasses.dataclass(frozen=True)
class Row:
    """Tensors of one kind.

    Attributes:
        name: the module that saved them, with * for numbers, and the role of the function of torch.
        count: of these tensors in a forward pass.
        bytes: of all of them: device memory that is free while they are on the host.
        lifetime_seconds: from a save to its first use, on average, while the device computes.
        copy_seconds: that the link needs to copy them to the host and back.
        hidden_bytes: that it can copy beside what the device computes, if nothing else is put aside.
        cost_seconds: for which the device would wait if all of them were put aside and nothing else.
    """

    name: str
    count: int
    bytes: int
    lifetime_seconds: float
    copy_seconds: float
    hidden_bytes: int
    cost_seconds: float


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows, largest first; the last row is the sum. str() is a text to print."""

    rows: tuple[Row, ...]
    forward_seconds: float
    link: Link

    @staticmethod
    def of(
        ranges: Sequence[Measured], forward_seconds: float, link: Link, budget_bytes: int, keep_last: int
    ) -> Table:
        kinds: dict[str, list[Measured]] = {}
        for each in ranges:
            kinds.setdefault(kind_of(each), []).append(each)

        def row(name: str, some: Sequence[Measured]) -> Row:
            choice = choose(
                some,
                forward_seconds,
                link,
                budget_bytes=budget_bytes,
                keep_last=keep_last,
                fraction=None,
            )
            size = sum(each.bytes for each in some)
            used = [each for each in some if each.used is not None]
            rest = size - choice.chosen_bytes
            return Row(
                name=name,
                count=len(some),
                bytes=size,
                lifetime_seconds=sum(each.lifetime for each in used) / max(len(used), 1),
                copy_seconds=size / link.down + size / link.up,
                hidden_bytes=choice.chosen_bytes,
                cost_seconds=rest / link.down + rest / link.up,
            )

        rows = [row(name, some) for name, some in kinds.items()]
        rows.sort(key=lambda each: -each.bytes)
        return Table((*rows, row("all", ranges)), forward_seconds, link)

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.rows)
        head = f"{'what':{width}} {'tensors':>7} {'MiB':>10} {'alive ms':>9} {'copies ms':>9} "
        lines = [head + f"{'hidden MiB':>10} {'costs ms':>9}"]
        for row in self.rows:
            lines.append(
                f"{row.name:{width}} {row.count:7} {row.bytes / 2**20:10.2f} {1e3 * row.lifetime_seconds:9.2f} "
                f"{1e3 * row.copy_seconds:9.2f} {row.hidden_bytes / 2**20:10.2f} {1e3 * row.cost_seconds:9.2f}"
            )
        lines.append(
            f"forward pass {1e3 * self.forward_seconds:.2f} ms; link {self.link.down / 2**30:.2f} GiB/s to the host, "
            f"{self.link.up / 2**30:.2f} GiB/s back"
        )
        return "\n".join(lines)


def kind_of(each: Measured) -> str:
    name = re.sub(r"(?<![^.])\d+(?![^.])", "*", each.name)
    return " ".join(part for part in (name, each.role and f"({each.role})") if part) or "(no name)"
