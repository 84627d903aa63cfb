"""`tlora token`: makes, lists and revokes the tokens of a service, and sets tenants' limits."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, fields, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tlora_megatron.cli.service.in_folder import add_service_argument, open_service
from tlora_megatron.cli.tables import make_table, open_console
from tlora_megatron.config.reader import ConfigError, must

if TYPE_CHECKING:
    from tlora_megatron.service.store import Store


_EPILOG = """\
examples:
  tlora token create ann                      # may submit, and look at what is ann's
  tlora token create ann --gpus 4 --jobs 100  # and sets limits of all that is ann's
  tlora token create watch --scope scrape     # for Prometheus
  tlora token list
  tlora token revoke t0123456789

A token is shown once; the service keeps its SHA-256 alone. Tokens of one tenant share its jobs,
files and limits. --requests-per-s 0 shuts a tenant out.
"""
_LIMITS = {
    "gpus": (int, "GPUs that its training jobs ask for together"),
    "jobs": (int, "unfinished jobs"),
    "upload_bytes": (int, "bytes of its files and of its models' requests"),
    "disk_bytes": (int, "bytes of its files and of the folders of its jobs"),
    "requests_per_s": (float, "requests a second"),
}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "token",
        help="make, list and revoke tokens for a service's HTTP",
        description="Makes, lists and revokes the tokens with which tenants use a service by HTTP.",
        epilog=_EPILOG,
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    create = _action(actions, "create", _create, "make a token, and print it once", " ann --gpus 4")
    create.add_argument("tenant", metavar="TENANT", help="lower-case letters, digits, hyphens")
    create.add_argument(
        "--scope",
        action="append",
        dest="scopes",
        metavar="SCOPE",
        help="what it may do: submit, read, admin or scrape (repeatable; default: submit, read)",
    )
    _add_limits(create)
    limit = _action(actions, "limit", _limit, "set or show a tenant's limits", " ann --jobs 100")
    limit.add_argument("tenant", metavar="TENANT", help="the tenant that tokens are made for")
    _add_limits(limit)
    _action(actions, "list", _list, "list tokens, without their secrets", " --json")
    revoke = _action(
        actions, "revoke", _revoke, "take a token back, within a second", " t0123456789"
    )
    revoke.add_argument("token", metavar="ID", help="as `tlora token list` shows it")


def _action(actions: Any, name: str, run: Any, text: str, example: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=f"example:\n  tlora token {name}{example}\n",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_service_argument(parser)
    parser.set_defaults(command=run)
    return parser


def _add_limits(parser: argparse.ArgumentParser) -> None:
    for name, (kind, text) in _LIMITS.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=kind, metavar="N", help=f"at most N {text}")


def _create(args: argparse.Namespace) -> int:
    with open_service(args) as service:
        try:
            with service.store.transaction():
                made = service.store.tokens.make(args.tenant, args.scopes or ("submit", "read"))
                _set_limits(service.store, args)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(str(error)) from error
    if args.json:
        print(json.dumps({**asdict(made.token), "token": made.secret}, indent=2))
        return 0
    # Alone on its line, whatever the window's width: it is there to be copied.
    print(made.secret)
    console = open_console(stderr=True)
    console.print(f"token {made.token.id} of {made.token.tenant}: it is not shown again")
    return 0


def _limit(args: argparse.Namespace) -> int:
    with open_service(args) as service, service.store.transaction():
        _set_limits(service.store, args)
        limits = asdict(service.store.tenants.limits(args.tenant))
    if args.json:
        print(json.dumps(limits, indent=2))
    else:
        told = ", ".join(f"{name} {'all' if n is None else n}" for name, n in limits.items())
        open_console().print(f"{args.tenant}: {told}")
    return 0


def _set_limits(store: Store, args: argparse.Namespace) -> None:
    """Writes the limits that were given; the others stay."""
    known = store.tenants.limits(args.tenant)
    named = {f.name: getattr(args, f.name, None) for f in fields(known)}
    given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    for name, value in given.items():
        if not value >= 0:
            raise must(f"--{name.replace('_', '-')}", "be at least 0", value)
    if given:
        store.tenants.set_limits(args.tenant, replace(known, **given))


def _list(args: argparse.Namespace) -> int:
    with open_service(args) as service:
        tokens = service.store.tokens.all()
    if args.json:
        print(json.dumps([asdict(token) for token in tokens], indent=2))
        return 0
    table = make_table("token", "tenant", "scopes", "made", "revoked")
    for token in tokens:
        made, revoked = _time(token.created_at), _time(token.revoked_at)
        table.add_row(token.id, token.tenant, ", ".join(token.scopes), made, revoked)
    open_console().print(table)
    return 0


def _revoke(args: argparse.Namespace) -> int:
    from tlora_megatron.service.store import NotFound

    with open_service(args) as service:
        try:
            token = service.store.tokens.revoke(args.token)
        except NotFound as error:
            raise ConfigError(f"{error}; `tlora token list` shows them") from error
    if args.json:
        print(json.dumps(asdict(token), indent=2))
    else:
        open_console().print(f"token {token.id} of {token.tenant} is revoked")
    return 0


def _time(at: float | None) -> str:
    return "-" if at is None else datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M")
