"""What users can look up: their training runs, weights, sessions and samplers."""

from __future__ import annotations

from datetime import UTC, datetime

from strop.rewards.server_requests import RequestRefused
from strop.serve.requests import CheckpointPath, Fields
from strop.serve.service import TrainingService
from strop.serve.store import ModelRecord

KIND_OF_FOLDER = {"weights": "training", "sampler_weights": "sampler"}


class Listing:
    """Read-only answers about what a user owns, and the deletion of weights."""

    def __init__(self, service: TrainingService) -> None:
        self.service = service

    def owned_model(self, user: str, model_id: str) -> ModelRecord:
        """A model of the user, ended or not."""
        record = self.service.models.get(model_id)
        if record is None or record.owner != user:
            raise RequestRefused(404, "There is no such training run.")
        return record

    def model_info(self, user: str, model_id: str) -> dict[str, object]:
        record = self.owned_model(user, model_id)
        data = {
            "arch": self.service.trainer.host.facts.architecture,
            "model_name": self.service.base_model,
            "tokenizer_id": self.service.base_model,
        }
        return {
            "type": "get_info",
            "model_id": model_id,
            "model_data": data,
            "is_lora": True,
            "lora_rank": record.rank,
            "model_name": self.service.base_model,
        }

    def weights_info(self, user: str, fields: Fields) -> dict[str, object]:
        record = self.service.weights(user, CheckpointPath.parse(fields.text("tinker_path")))
        return {
            "base_model": self.service.base_model,
            "is_lora": True,
            "lora_rank": record.rank,
            "train_unembed": False,
            "train_mlp": True,
            "train_attn": True,
        }

    def training_run(self, user: str, model_id: str) -> dict[str, object]:
        record = self.owned_model(user, model_id)
        return {
            "training_run_id": model_id,
            "base_model": self.service.base_model,
            "model_owner": user,
            "is_lora": True,
            "lora_rank": record.rank,
            "last_request_time": _time(record.created),
            "user_metadata": record.metadata,
        }

    def training_runs(self, user: str, offset: int, limit: int) -> dict[str, object]:
        own = [record for record in self.service.models.values() if record.owner == user]
        own.sort(key=lambda record: -record.created)
        runs = [self.training_run(user, record.model_id) for record in own[offset : offset + limit]]
        cursor = {"offset": offset, "limit": limit, "total_count": len(own)}
        return {"training_runs": runs, "cursor": cursor}

    def checkpoints(self, user: str, model_id: str) -> dict[str, object]:
        record = self.owned_model(user, model_id)
        found: list[dict[str, object]] = []
        store = self.service.store
        for kind, shown in KIND_OF_FOLDER.items():
            for name in store.checkpoint_names(record.model_id, kind):
                folder = store.checkpoint_folder(model_id, kind, name)
                found.append(
                    {
                        "checkpoint_id": f"{kind}/{name}",
                        "checkpoint_type": shown,
                        "time": _time(folder.stat().st_mtime),
                        "tinker_path": str(CheckpointPath(model_id, kind, name)),
                        "size_bytes": sum(
                            file.stat().st_size for file in folder.rglob("*") if file.is_file()
                        ),
                    }
                )
        return {"checkpoints": found}

    async def delete_checkpoint(self, user: str, model_id: str, kind: str, name: str) -> None:
        path = CheckpointPath.parse(f"tinker://{model_id}/{kind}/{name}")
        self.service.weights(user, path)

        def delete() -> None:
            self.service.trainer.withdraw(str(path))
            self.service.store.drop_checkpoint(model_id, kind, name)

        await self.service.dispatcher.alone(delete)

    def session(self, user: str, session_id: str) -> dict[str, object]:
        record = self.service.sessions.get(session_id)
        if record is None or record.owner != user:
            raise RequestRefused(404, "There is no such session.")
        models = [one.model_id for one in self.service.models.values() if one.session_id == session_id]
        samplers = [one.sampler_id for one in self.service.samplers.values() if one.session_id == session_id]
        return {"training_run_ids": models, "sampler_ids": samplers, "user_metadata": record.metadata}

    def sampler(self, user: str, sampler_id: str) -> dict[str, object]:
        record = self.service.sampler(user, sampler_id)
        return {
            "sampler_id": sampler_id,
            "base_model": self.service.base_model,
            "model_path": record.path,
        }

    def capabilities(self) -> dict[str, object]:
        facts = self.service.trainer.host.facts
        model = {
            "model_name": self.service.base_model,
            "max_context_length": facts.context,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
