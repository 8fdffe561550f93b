"""Starts the service: load the model, open the state folder, listen."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

from strop.config.schema.training_service import TrainingServiceConfig
from strop.extras import require
from strop.serve.accounts import load_accounts
from strop.serve.app import build_app
from strop.serve.host import AdapterHost
from strop.serve.service import TrainingService
from strop.serve.store import StateStore
from strop.serve.trainer import ModelTrainer, TrainerLimits

log = logging.getLogger(__name__)


def build_service(config: TrainingServiceConfig, host: AdapterHost) -> TrainingService:
    """The service of a configuration over a loaded model."""
    server = config.server
    store = StateStore(Path(server.state_dir).expanduser())
    base_model = server.base_model or str(config.model.path)
    store.claim(base_model)
    limits = TrainerLimits(
        resident=server.max_adapters,
        snapshot_steps=server.snapshot_steps,
        ephemeral_samplers=server.ephemeral_samplers,
        published=server.max_samplers,
    )
    return TrainingService(ModelTrainer(host, store, limits), store, server, base_model)


def serve(config: TrainingServiceConfig) -> None:
    """Load the model and serve requests until the process is stopped."""
    uvicorn = require("uvicorn", extra="serve", why="strop serve-train")
    server = config.server
    accounts = load_accounts(server.tokens_file, server.host)
    listener = _listen(server.host, server.port)  # first: a port in use is reported at once
    from strop.serve.policy_host import PolicyHost

    service = build_service(config, PolicyHost.build(config))
    app = build_app(service, accounts)
    settings = uvicorn.Config(app, log_level="warning", lifespan="on", server_header=False)
    address = f"http://{_shown(server.host)}:{listener.getsockname()[1]}"
    log.info("%s is trained at %s; set TINKER_BASE_URL to it", service.base_model, address)
    uvicorn.Server(settings).run(sockets=[listener])


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"server.host={host} server.port={port} cannot be used: {reason}.") from error
