"""``feddpc federate keys``: makes, registers, replaces and revokes keys and certificates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from feddpc.cli.commands import Command, CommandGroup

app = typer.Typer(
    cls=CommandGroup, help="Make, register, replace and revoke keys and certificates.", no_args_is_help=True
)

Folder = Annotated[Path, typer.Argument(help="The folder with the keys, on the server.")]
Link = Annotated[str, typer.Option("--superlink", help="The SuperLink's name in Flower's config.toml.")]
Days = Annotated[int, typer.Option(min=1, help="Days until the server's certificate expires.")]


@app.command(cls=Command)
def make(
    folder: Annotated[Path, typer.Argument(help="Folder for the files; existing files are kept.")],
    host: Annotated[
        list[str], typer.Option(help="A name or address under which nodes reach the server; may be repeated.")
    ],
    nodes: Annotated[int, typer.Option(min=1, help="Number of node keys.")],
    days: Days = 365,
) -> None:
    """Make certificates for a server and keys for its nodes."""
    from feddpc.federate import keys as keyring
    from feddpc.flower import check_flwr

    check_flwr()
    created = keyring.make(folder, list(dict.fromkeys([*host, *keyring.LOOPBACK])), nodes, days)
    expires = keyring.read_certificate(created.server).not_valid_after_utc
    typer.echo(f"server: {created.ca}, {created.server}, {created.server_key}; valid until {expires:%Y-%m-%d}")
    node = created.folder / "node-i"
    typer.echo(f"send {node} to node i only, {created.ca} to every node; keep {created.ca_key} secret")


@app.command(cls=Command)
def register(
    folder: Folder,
    superlink: Link,
    key: Annotated[list[str] | None, typer.Option(help="Such as node-3; may be repeated. [default: all]")] = None,
) -> None:
    """Register node keys at the SuperLink; those that are registered already stay."""
    from feddpc.federate.flower_cli import FlowerCli
    from feddpc.federate.node_keys import NodeKeys

    added = NodeKeys(folder).register(FlowerCli(superlink), key)
    for entry in added:
        typer.echo(f"{entry.name}: registered as node {entry.node_id}")
    if not added:
        typer.echo("all keys are registered already")


@app.command(cls=Command)
def revoke(
    folder: Folder,
    key: Annotated[str, typer.Argument(help="Such as node-3.")],
    superlink: Link,
    node_id: Annotated[str | None, typer.Option(help="For a key registered by other means than `register`.")] = None,
) -> None:
    """Revoke a node's key: the SuperLink refuses the node from now on, and the key can never come back."""
    from feddpc.federate.flower_cli import FlowerCli
    from feddpc.federate.node_keys import NodeKeys

    entry = NodeKeys(folder).revoke(FlowerCli(superlink), key, node_id)
    typer.echo(f"{entry.name}: node {entry.node_id} is revoked; its public key is in {folder / 'revoked'}")


@app.command("rotate-node", cls=Command)
def rotate_node(
    folder: Folder, number: Annotated[int, typer.Argument(min=0, help="The node's number.")], superlink: Link
) -> None:
    """Make and register a new key for a node; the old one stays valid until it is revoked."""
    from feddpc.federate import keys as keyring
    from feddpc.federate import rotation
    from feddpc.federate.flower_cli import FlowerCli
    from feddpc.federate.node_keys import NodeKeys

    path = rotation.rotate_node(keyring.Keys(folder), number)
    nodes = NodeKeys(folder)
    nodes.rename(path.name, f"{path.name}.old")
    typer.echo(f"new key: {path}; the old one is {path}.old")
    (entry,) = nodes.register(FlowerCli(superlink), [path.name])
    typer.echo(
        f"{entry.name}: registered as node {entry.node_id}; send it to the node, restart its SuperNode, and then"
    )
    typer.echo(f"feddpc federate keys revoke {folder} {path.name}.old --superlink {superlink}")


@app.command("rotate-server", cls=Command)
def rotate_server(
    folder: Folder,
    host: Annotated[
        list[str] | None, typer.Option(help="Other names or addresses; may be repeated. [default: as before]")
    ] = None,
    days: Days = 365,
) -> None:
    """Make a new certificate for the server; restart the SuperLink to use it. Nodes need nothing new."""
    from feddpc.federate import keys as keyring
    from feddpc.federate import rotation

    keys = keyring.Keys(folder)
    rotation.rotate_server(keys, host or (), days)
    expires = keyring.read_certificate(keys.server).not_valid_after_utc
    typer.echo(f"new certificate: {keys.server}, valid until {expires:%Y-%m-%d}; the old one is {keys.server}.old")
    typer.echo("restart the SuperLink, then its proxy if it has one; nodes reconnect by themselves")


@app.command("rotate-authority", cls=Command)
def rotate_authority(
    folder: Folder,
    finish: Annotated[bool, typer.Option("--finish", help="Take the old authority out of ca.crt.")] = False,
) -> None:
    """Replace the authority: nodes trust the old and the new one until this is finished."""
    from feddpc.federate import keys as keyring
    from feddpc.federate import rotation

    keys = keyring.Keys(folder)
    if finish:
        rotation.finish_authority(keys)
        typer.echo(f"{keys.ca} has the new authority only; send it to the nodes when it suits you")
        return
    rotation.begin_authority(keys)
    typer.echo(f"1. send {keys.ca}, which has both authorities, to every node and restart its SuperNode")
    typer.echo(f"2. feddpc federate keys rotate-server {folder}, restart the SuperLink, then its proxy if it has one")
    typer.echo(f"3. feddpc federate keys rotate-authority {folder} --finish")
