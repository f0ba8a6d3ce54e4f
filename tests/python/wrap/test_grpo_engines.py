"""Tests that an engine that generates for TRL's GRPO gets the weights of the training. It stands in for vLLM, which needs a
GPU: it has what TRL calls of vLLM in the same process, and of its own client of a server."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from python.wrap.support.frameworks import as_launched, tiny_model
from python.wrap.support.ranks import FRAMEWORKS, run_ranks
from python.wrap.test_trainers import longest_words, rows_of, tokenizer

pytest.importorskip("trl", reason="trl is not installed: .ci/bootstrap venv frameworks")

Weights = dict[str, torch.Tensor]
COMPLETION = [5, 6, 7, 1]


class Engine:
    """The weights, and how often they came."""

    def __init__(self) -> None:
        self.weights: Weights = {}
        self.syncs = 0

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            self.weights[name] = tensor.detach().clone()

    def reset_prefix_cache(self) -> None:
        self.syncs += 1


class LLM(Engine):
    """An engine in the process of each rank."""

    def __init__(self, **_: Any):
        super().__init__()
        runner = SimpleNamespace(model_runner=SimpleNamespace(model=self))
        executor = SimpleNamespace(driver_worker=runner)
        self.llm_engine = SimpleNamespace(model_executor=executor, model_config=SimpleNamespace(max_model_len=64))

    def generate(self, prompts: list[dict[str, Any]], **_: Any) -> list[Any]:
        assert self.syncs > 0
        logprobs = [{token: SimpleNamespace(rank=1, logprob=-1.0)} for token in COMPLETION]
        output = SimpleNamespace(token_ids=COMPLETION, logprobs=logprobs)
        return [SimpleNamespace(prompt_token_ids=each["prompt_token_ids"], outputs=[output]) for each in prompts]


class VLLMClient(Engine):
    """The first rank's client of a server."""

    def __init__(self, **_: Any):
        super().__init__()

    def init_communicator(self, device: Any) -> None:
        pass

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata: list[tuple[str, str, list[int]]], named_params: Any) -> None:
        announced = [(name, word, list(shape)) for name, word, shape in metadata]
        self.weights.clear()
        self.load_weights(named_params)
        assert [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in self.weights.items()] == announced

    def generate(self, prompts: list[list[int]], n: int, **_: Any) -> dict[str, Any]:
        assert self.syncs > 0
        count = len(prompts) * n
        ids, logprobs = [[token] for token in COMPLETION], [[-1.0]] * len(COMPLETION)
        return {
            "prompt_ids": prompts,
            "completion_ids": [COMPLETION] * count,
            "logprobs": [logprobs] * count,
            "logprob_token_ids": [ids] * count,
        }


def trained(rank: int, folder: str, cases: list[tuple[str, bool]]) -> list[tuple[int, Weights, Weights]]:
    """Train with each engine. Return how often it got weights, the last ones, and those of the training."""
    from trl.generation import vllm_generation

    as_launched(rank)
    vllm_generation.is_vllm_available = lambda: True
    vllm_generation.LLM, vllm_generation.VLLMClient, vllm_generation.SamplingParams = LLM, VLLMClient, dict
    return [train(Path(folder) / f"{mode}-{has_adapters}", mode, has_adapters) for mode, has_adapters in cases]


def train(folder: Path, mode: str, has_adapters: bool) -> tuple[int, Weights, Weights]:
    import datasets
    import peft
    import trl
    from ballast.integrations.transformers import BallastTrainerMixin

    class Trainer(BallastTrainerMixin, trl.GRPOTrainer):
        pass

    model = tiny_model(64)
    model.config._name_or_path = f"{folder}-base"
    model.save_pretrained(model.config._name_or_path)  # rank 0 writes
    dist.barrier()
    if has_adapters:
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    arguments = trl.GRPOConfig(
        **{"output_dir": str(folder), "use_cpu": True, "max_steps": 2, "per_device_train_batch_size": 2},
        **{"num_generations": 2, "max_completion_length": 4, "learning_rate": 1e-2, "beta": 0.0},
        **{"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "use_vllm": True, "vllm_mode": mode},
        vllm_importance_sampling_correction=False,
    )
    rows = datasets.Dataset.from_list(rows_of("grpo"))
    tokens = {"processing_class": tokenizer(), "reward_funcs": longest_words}
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, ballast={"stage": 3}, **tokens)
    trainer.train()
    generation = trainer.vllm_generation
    generation.sync_weights()
    engine = getattr(generation, "vllm_client" if mode == "server" else "llm", None) or Engine()
    trainer.optimizer.close() if hasattr(trainer.optimizer, "close") else trainer.optimizer.optimizer.close()
    plain = model.merge_and_unload() if has_adapters else model
    return engine.syncs, engine.weights, {name: each.detach().clone() for name, each in plain.named_parameters()}


CASES = [("colocate", False), ("colocate", True), ("server", False), ("server", True)]


def test_an_engine_of_grpo_gets_the_weights_of_the_training(tmp_path):
    for rank, results in enumerate(run_ranks(2, trained, str(tmp_path), CASES, imported=FRAMEWORKS)):
        for (mode, has_adapters), (syncs, found, expected) in zip(CASES, results, strict=True):
            if mode == "server" and rank > 0:
                assert syncs == 0  # the first rank alone has the client
                continue
            assert syncs == 3, (mode, has_adapters)  # before each step's completions, and at the end
            assert found.keys() == expected.keys(), (mode, has_adapters)
            for name, tensor in found.items():
                torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-6)
