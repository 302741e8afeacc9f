"""Which node keys a SuperLink knows: registers and revokes them, and remembers the node ids in the folder of keys.

Flower lists nodes by id and never shows their keys, so ``nodes.json`` maps the fingerprint of every key that was
registered here to its id. A revoked key is refused by the SuperLink for ever; Flower does not register it again.
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from feddpc.errors import BadInputError
from feddpc.federate.flower_cli import KEY_IN_USE, NODE_NOT_FOUND, FlowerCli, FlowerCliError
from feddpc.storage import explain_os_errors, make_folder, replace_text

NAME = "nodes.json"


@dataclass
class NodeKey:
    """A key that was registered: its name here, the node's id at the SuperLink, and when it was revoked, if it was."""

    name: str
    node_id: str
    registered: str
    revoked: str | None = None


class NodeKeys:
    """The node keys of a folder, and what the SuperLink was told about them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / NAME
        self.entries = self._read()

    def public_keys(self) -> dict[str, Path]:
        """Return the files of the public keys in the folder by their names: ``node-0``, ``node-0.old``."""
        return {path.name.removesuffix(".pub"): path for path in sorted(self.folder.glob("node-*.pub"))}

    def entry(self, public_key: Path) -> NodeKey | None:
        """Return what is known about a key."""
        return self.entries.get(fingerprint(public_key))

    def register(self, link: FlowerCli, names: list[str] | None = None) -> list[NodeKey]:
        """Register the keys ``names``, by default all; return those that the SuperLink did not know.

        A SuperLink that lost its database knows none of them, whatever the folder says.
        """
        known = self.public_keys()
        for name in names or []:
            self._check_known(name)
        names = names or list(known)
        there = link.nodes() if any(self.entry(known[name]) for name in names) else {}
        added = []
        for name in names:
            if (entry := self.entry(known[name])) is not None:
                if entry.revoked:
                    raise BadInputError(
                        f"{known[name]} was revoked on {entry.revoked}: make a new key with `feddpc federate keys "
                        f"rotate-node {self.folder} NUMBER`"
                    )
                if entry.node_id in there:
                    continue
            try:
                node_id = link.register(known[name], name)
            except FlowerCliError as error:
                if error.code != KEY_IN_USE:
                    raise
                raise BadInputError(
                    f"the SuperLink knows {known[name]} already, or has revoked it, and Flower does not say under "
                    f"which id: look for it in `flwr supernode list {link.connection}`, or make a new key with "
                    f"`feddpc federate keys rotate-node {self.folder} NUMBER`"
                ) from None
            added.append(NodeKey(name, node_id, _today()))
            self.entries[fingerprint(known[name])] = added[-1]
            self._write()
        return added

    def revoke(self, link: FlowerCli, name: str, node_id: str | None = None) -> NodeKey:
        """Remove a node from the SuperLink, and its key from the folder; ``node_id`` if it was registered elsewhere.

        If that is not the node's id, nothing is changed: a key that is valid must not be recorded as revoked.
        """
        public = self._check_known(name)
        entry = self.entry(public)
        if entry is None and node_id is None:
            raise BadInputError(
                f"{public} was not registered with `feddpc federate keys register`, so its node's id is unknown: give "
                f"--node-id from `flwr supernode list {link.connection}`"
            )
        entry = entry or NodeKey(name, str(node_id), "unknown")
        if entry.revoked:
            raise BadInputError(f"{public} was revoked already, on {entry.revoked}")
        wanted = node_id or entry.node_id
        if owner := [other.name for other in self.entries.values() if other.node_id == wanted and other is not entry]:
            raise BadInputError(f"node {wanted} has the key {owner[0]}, not {name}: nothing was changed")
        if wanted != entry.node_id and entry.node_id in link.nodes():
            raise BadInputError(
                f"{name} is registered as node {entry.node_id}, not {wanted}: leave --node-id out; nothing was changed"
            )
        try:
            link.unregister(wanted)
        except FlowerCliError as error:
            if error.code != NODE_NOT_FOUND:
                raise
            if link.nodes().get(wanted) != "unregistered":  # else somebody removed it before
                raise BadInputError(
                    f"the SuperLink knows no node {wanted}, so the key {name} may still be valid; nothing was changed. "
                    f"Give the --node-id that `flwr supernode list {link.connection}` shows; if the SuperLink lost its "
                    f"database, run `feddpc federate keys register {self.folder} --superlink {link.connection}` first"
                ) from None
        entry.name, entry.node_id, entry.revoked = name, wanted, _today()
        self.entries[fingerprint(public)] = entry
        self._write()
        with explain_os_errors(self.folder):
            make_folder(self.folder / "revoked")
            public.rename(self.folder / "revoked" / f"{name}-{entry.node_id}.pub")
            (self.folder / name).unlink(missing_ok=True)
        return entry

    def rename(self, old: str, new: str) -> None:
        """Note that a key has another name."""
        for entry in self.entries.values():
            if entry.name == old and not entry.revoked:
                entry.name = new
        self._write()

    def _check_known(self, name: str) -> Path:
        known = self.public_keys()
        if name not in known:
            raise BadInputError(f"{self.folder} has no key {name!r}: it has {', '.join(known) or 'none'}")
        return known[name]

    def _read(self) -> dict[str, NodeKey]:
        if not self.file.exists():
            return {}
        try:
            with explain_os_errors(self.file):
                return {key: NodeKey(**value) for key, value in json.loads(self.file.read_text("utf-8")).items()}
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise BadInputError(
                f"{self.file} cannot be read ({error}): restore it, or remove it and register the keys again"
            ) from None

    def _write(self) -> None:
        entries = {key: asdict(entry) for key, entry in self.entries.items()}
        with explain_os_errors(self.file):
            replace_text(self.file, json.dumps(entries, indent=2) + "\n")


def fingerprint(public_key: Path) -> str:
    """Return the fingerprint of a public key in OpenSSH's form, as ``ssh-keygen -l`` shows it."""
    with explain_os_errors(public_key):
        words = public_key.read_text("utf-8", errors="replace").split()
    try:
        blob = base64.b64decode(words[1], validate=True)
    except (IndexError, ValueError):
        raise BadInputError(f"{public_key} is no public key in OpenSSH's form") from None
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def _today() -> str:
    return f"{dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC"
