"""One file from an HTTP address: resumed where an earlier attempt stopped, and never used before its md5 is right."""

from __future__ import annotations

import hashlib
import http.client
import re
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Any

from feddpc.data.progress import bar
from feddpc.data.specs import Archive
from feddpc.errors import DataError

TIMEOUT = 20.0
#: No official archive is as large; a server that sends without end must not fill the disk.
LARGEST = 1 << 30
_CHUNK = 1 << 20


def download(archive: Archive, folder: Path, *, show: bool | None = None, timeout: float = TIMEOUT) -> Path:
    """Fetch ``archive`` into ``folder`` and return its path; a failed attempt leaves its ``.part`` file."""
    target = folder / archive.file
    part = folder / f"{archive.file}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if target.is_file() and file_md5(target) == archive.md5:
            return target
        resumed = part.is_file() and part.stat().st_size > 0
        _transfer(archive, part, show, timeout)
        if resumed and file_md5(part) != archive.md5:
            part.unlink()  # the old beginning may belong to another file: once more, from the start
            _transfer(archive, part, show, timeout)
        found = file_md5(part)
        if found != archive.md5:
            part.unlink()
            raise DataError(f"{archive.url} delivered a file with md5 {found}, not {archive.md5}: it was discarded")
        part.replace(target)
    except urllib.error.HTTPError as error:
        error.close()
        raise DataError(f"{archive.url} answered {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise DataError(f"{archive.url} cannot be reached ({error.reason})") from error
    except (TimeoutError, http.client.HTTPException, ConnectionError, ssl.SSLError) as error:
        raise DataError(
            f"{archive.url} broke off ({str(error) or type(error).__name__}): run the command again to resume"
        ) from error
    except OSError as error:
        raise DataError(
            f"cannot write {part} ({error.strerror or error}): free some space or set FEDDPC_CACHE"
        ) from error
    return target


def file_md5(path: Path) -> str:
    """Return the md5 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _transfer(archive: Archive, part: Path, show: bool | None, timeout: float) -> None:
    have = part.stat().st_size if part.is_file() else 0
    assert archive.url is not None, "only archives with an address are downloaded"
    request = urllib.request.Request(archive.url, headers={"User-Agent": "feddpc"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        response = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not have:
            raise
        error.close()
        return  # nothing lies beyond what we have: the md5 decides whether it is the file
    with response:
        if have and not _continues(response, have):
            have = 0  # the server ignored the range and sends the whole file
        length = response.headers.get("Content-Length")
        total = have + int(length) if length and length.isdecimal() else None
        with (
            part.open("ab" if have else "wb") as file,
            bar(archive.file, total, done=have, show=show, size=True) as advance,
        ):
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                advance(len(chunk))
                if file.tell() > LARGEST:
                    raise DataError(f"{archive.url} sends more than {LARGEST >> 20} MB, which no archive has: stopped")
    got = part.stat().st_size
    if total is not None and got < total:
        raise ConnectionError(f"after {got} of {total} bytes")


def _continues(response: IO[Any], have: int) -> bool:
    header = getattr(response, "headers", {}).get("Content-Range", "")
    match = re.match(r"bytes (\d+)-", header)
    return getattr(response, "status", None) == http.HTTPStatus.PARTIAL_CONTENT and bool(
        match and int(match[1]) == have
    )
