"""Numbers of bytes as people read them."""

from __future__ import annotations


def readable(count: int) -> str:
    """Such as "0 bytes", "512 bytes", "1.5 KiB", "6.0 MiB" and "80.0 GiB"."""
    if count < 1024:
        return f"{count} byte" if count == 1 else f"{count} bytes"
    value, unit = count / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if value < 1023.95:  # 1024.0 is printed as 1.0 of the larger unit
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}"
