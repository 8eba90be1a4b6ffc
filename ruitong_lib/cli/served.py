"""Verbs that talk to a served model."""

from typing import Annotated, Any

import typer

from ruitong_lib.cli import Json, app, print_json


@app.command()
def probe(
    url: Annotated[str, typer.Argument(help="The server's address, e.g. http://127.0.0.1:8000/v1.")],
    model: Annotated[
        str,
        typer.Option(help="The model as it is known here (hub id, folder, smollm2-135m): its tokenizer checks ids."),
    ] = "",
    served_model: Annotated[str, typer.Option(help="The server's own name of the model.")] = "",
    api_key_env: Annotated[str, typer.Option(help="The environment variable that holds the key.")] = "",
    as_json: Json = False,
) -> None:
    """Ask a server what can be measured with it: ids, alternatives, replay, raw or processed logprobs, switches.

    Exit code 2 where it cannot be reached or takes no request.
    """
    from ruitong_lib.collect.endpoint import probe_server

    report = probe_server(url, model=model, served_model=served_model, api_key_env=api_key_env)
    if as_json:
        print_json(report)
        return
    server = report["server"]
    print(f"{server['name']} {server['version']}, model {report['model']}\n")
    for name, value in {**report["can"], **_facts(report)}.items():
        print(f"{name:18} {value}")


def _facts(report: dict[str, Any]) -> dict[str, Any]:
    server = report["server"]
    dropped = {f"{kind}: {name}": why for kind, names in report["dropped"].items() for name, why in names.items()}
    return {
        "route": f"{report['route']} (of {', '.join(report['routes'])})",
        "largest k": report["max_k"],
        "logprobs": f"{report['logprob_mode']} in greedy requests; temperature shows in them: "
        f"{report['temperature_in_logprobs']}",
        "seeds": report["seeds"],
        "thinking switch": report["thinking"],
        "prefix cache": server["prefix_cache"],
        "speculation": server["speculation"],
        "dtype": f"{server['dtype']} (the server's word)",
        **{f"refused {name}": why for name, why in {**report["refused"], **report["replay_refused"]}.items()},
        **{f"dropped {name}": why for name, why in dropped.items()},
    }
