"""``ferrule cache``: what the disk cache of compiled kernels holds, and how to empty it."""

from __future__ import annotations

import time

import click

from .. import cache
from . import readable


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "less than a minute ago"


@click.command("cache")
@click.argument("action", type=click.Choice(["show", "clear", "path"]), default="show")
def command(action: str) -> None:
    """Show, clear or locate the disk cache of compiled kernels.

    ACTION is "show" (the default), "clear" or "path". FERRULE_CACHE_DIR moves the cache.
    """
    disk = cache.default()
    if action == "path":
        click.echo(disk.path)
    elif action == "clear":
        size = disk.size()
        count = disk.clear()
        entries = "1 entry" if count == 1 else f"{count} entries"
        click.echo(f"Removed {entries} ({readable(size)}) from {disk.path}")
    else:
        _show(disk)


def _show(disk: cache.Cache) -> None:
    click.echo(f"folder   {disk.path}")
    reason = disk.reason_disabled
    if reason is not None:
        click.echo(f"unusable {reason}")
    entries = disk.entries()
    total = sum(entry.size for entry in entries)
    click.echo(f"entries  {len(entries)}")
    click.echo(f"size     {readable(total)} of {readable(disk.max_bytes)} at most")
    if entries:
        now = time.time()
        click.echo(f"newest   used {_ago(now - entries[0].last_use)}")
        click.echo(f"oldest   used {_ago(now - entries[-1].last_use)}")
