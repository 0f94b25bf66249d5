"""``ferrule cache``: what the disk cache of compiled kernels holds, and how to empty it."""

from __future__ import annotations

import time

import click

from .. import cache
from .faults import Fault, readable


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "less than a minute ago"


@click.command("cache")
@click.argument("action", type=click.Choice(["show", "clear", "path", "add"]), default="show")
@click.argument("folder", required=False, type=click.Path(exists=True, file_okay=False))
def command(action: str, folder: str | None) -> None:
    """Show, clear, locate or fill the disk cache of compiled kernels.

    ACTION is "show" (the default), "clear", "path", or "add FOLDER", which takes in what
    "ferrule build" made: give only folders that you trust. FERRULE_CACHE_DIR moves the cache.
    """
    disk = cache.default()
    if (action == "add") != (folder is not None):
        raise Fault("a FOLDER is given with the action add, and with no other.")
    if folder is not None:
        _add(disk, cache.Cache(folder, quiet=True))
        return
    if action == "path":
        click.echo(disk.path)
    elif action == "clear":
        size = disk.size()
        count = disk.clear()
        entries = "1 entry" if count == 1 else f"{count} entries"
        click.echo(f"Removed {entries} ({readable(size)}) from {disk.path}")
    else:
        _show(disk)


def _add(disk: cache.Cache, carried: cache.Cache) -> None:
    for folder in (disk, carried):
        if folder.reason_disabled is not None:
            raise Fault(f"{folder.path} cannot be used: {folder.reason_disabled}")
    count = 0
    for entry in carried.entries():
        payload = carried.get(entry.key)
        if payload is not None:
            if not disk.put(entry.key, payload):
                why = disk.reason_disabled or "an entry is too large"
                raise Fault(f"{disk.path}: {count} entries were added, then no more: {why}")
            count += 1
    if not count:
        raise Fault(f"{carried.path} has no entries; fill it with `ferrule build --to FOLDER`.")
    click.echo(f"Added {count} entries from {carried.path} to {disk.path}")


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
