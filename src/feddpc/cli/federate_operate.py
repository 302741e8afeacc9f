"""``feddpc federate check`` and ``supervise``: operating a federation on several machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from feddpc.cli.flags import UNFINISHED


def check(
    address: Annotated[
        str | None, typer.Argument(help="HOST:PORT of a SuperLink, to look at it as a node does.")
    ] = None,
    ca: Annotated[Path | None, typer.Option(help="The authority's certificate, ca.crt.")] = None,
    key: Annotated[Path | None, typer.Option(help="The node's private key: would the SuperLink let it in?")] = None,
    keys: Annotated[Path | None, typer.Option(help="On the server: the folder with keys and certificates.")] = None,
    superlink: Annotated[
        str | None, typer.Option(help="On the server: its name in Flower's config.toml, to ask which nodes it knows.")
    ] = None,
    peer: Annotated[Path | None, typer.Option(help="What `check --json` printed on another machine.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare clocks, versions, certificates and keys, from a node or the server; exit code 1: warnings, 2: errors."""
    from feddpc.errors import BadInputError
    from feddpc.federate import findings, link_checks
    from feddpc.federate.flower_cli import FlowerCli
    from feddpc.flower import check_flwr

    check_flwr()
    if (ca is None) != (address is None) or (key is not None and address is None):
        raise BadInputError("give HOST:PORT and --ca together; --key needs both of them")
    if superlink is not None and keys is None:
        raise BadInputError("--superlink needs --keys, the folder whose keys it is asked about")
    found = findings.check_versions(peer)
    if address is not None and ca is not None:
        found += link_checks.check_link(address, ca, key)
    if keys is not None:
        found += findings.check_folder(keys)
        found += link_checks.check_nodes(keys, None if superlink is None else FlowerCli(superlink))
    typer.echo(findings.report(found) if as_json else "\n".join(map(str, found)))
    raise typer.Exit(findings.worst(found))


def supervise(
    app: Annotated[Path, typer.Argument(help="Folder of the Flower app.")],
    superlink: Annotated[str, typer.Argument(help="The SuperLink's name in Flower's config.toml.")],
    run_config: Annotated[
        list[str] | None, typer.Option("--run-config", "-c", help="As for `flwr run`; may be repeated.")
    ] = None,
    failures: Annotated[int, typer.Option(min=1, help="Failures in a row after which it gives up.")] = 5,
    wait: Annotated[
        float, typer.Option(min=0.1, help="Seconds before the first new attempt; then twice as long.")
    ] = 10.0,
    longest_wait: Annotated[float, typer.Option(min=0.1, help="The longest wait in seconds.")] = 600.0,
    poll: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks at the run.")] = 5.0,
    run_folder: Annotated[
        Path | None, typer.Option(help="The run's folder: a new round in it sets the count of failures to zero.")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="File with the run's id: a new supervisor goes on watching that run.")
    ] = None,
) -> None:
    """Submit an app, again when its run fails; exit code 0: completed or stopped by somebody, 3: it gave up."""
    from feddpc.federate.supervise import GaveUpError, Supervisor
    from feddpc.flower import check_flwr
    from feddpc.runs.stop import Stop

    check_flwr()
    stop = Stop()
    supervisor = Supervisor(
        app,
        superlink,
        config=run_config or [],
        failures=failures,
        wait=wait,
        longest_wait=longest_wait,
        poll=poll,
        run_folder=run_folder,
        state=state,
        stop=stop,
        tell=typer.echo,
    )
    try:
        with stop.on_interrupt():
            supervisor.run()
    except GaveUpError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(UNFINISHED) from None
