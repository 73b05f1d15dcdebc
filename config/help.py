"""What `dragoman --help` prints: this server's commands, a line each. Django's own are listed by `dragoman help
--commands`.
"""

from __future__ import annotations

GROUPS = {
    "Serve": {
        "serve": "Serve a model: all of the server in one command",
        "web": "A process that serves the registered deployments",
        "reconcile": "A process that runs their workers",
        "doctor": "Check settings, ports, the model and the machine first",
        "health": "Whether a process of this machine does its work",
        "conformance": "Ask a running server in every dialect, and judge it",
    },
    "Deployments": {
        "deploy": "Register a model and start a deployment of it",
        "change": "Change a deployment's scaling, engine options or version",
        "scale": "Ask for a number of workers",
        "stop": "Stop a deployment",
        "delete": "Delete a deployment",
        "rollback": "Serve an earlier version of an adapter again",
        "status": "Show deployments, workers, load and scaling decisions",
        "flight": "Show what running workers did last",
    },
    "API keys": {
        "createkey": "Create an API key and print it",
        "revokekey": "Revoke an API key",
        "usage": "Show who used how many tokens",
    },
    "Set up": {
        "migrate": "Make or update the tables of the registry",
        "createsuperuser": "Add a user of the admin",
        "makesecret": "Write random secrets into files",
        "cluster-certificates": "Make certificates for the hosts of a cluster",
    },
}
"""The lines of the commands, by group."""
WIDTH = max(len(name) for group in GROUPS.values() for name in group)


def help_text(program: str) -> str:
    """The whole text."""
    lines = [f"usage: {program} COMMAND [OPTIONS]"]
    for title, commands in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:{WIDTH}}  {line}" for name, line in commands.items())]
    lines += ["", f"`{program} COMMAND --help` has the options.", f"`{program} help --commands` lists Django's too."]
    return "\n".join(lines)
