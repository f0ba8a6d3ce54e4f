"""Tests of experts that ranks with other data share: each has some of them, and tokens go to the rank with their expert."""

from __future__ import annotations

import re
from typing import Any

import ballast
import pytest
import torch
import torch.distributed._functional_collectives as collectives
from ballast.torch.parts import part_of
from python.wrap.support.frameworks import as_launched
from python.wrap.support.ranks import FRAMEWORKS, run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

WIDTH, EXPERTS, STEPS, CLIP = 20, 8, 6, 0.3


class Experts(torch.nn.Module):
    """Experts of one matrix each. With a mesh, each rank computes its own ones, for the tokens of all ranks of the mesh."""

    mesh: DeviceMesh | None = None
    skips = False  # a rank without tokens for its experts does not use them, so that they have no gradients

    def __init__(self, width: int):
        super().__init__()
        self.up = torch.nn.Parameter(torch.randn(EXPERTS, width, width) / width**0.5)
        self.bias = torch.nn.Parameter(torch.zeros(EXPERTS, width))

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        up, bias, first = self.up, self.bias, 0
        if self.mesh is not None:
            assert isinstance(up, DTensor)
            up, bias, group = up.to_local(), bias.to_local(), self.mesh.get_group()
            first = self.mesh.get_local_rank() * len(up)
            tokens, shares = (collectives.all_gather_single_autograd(each, 0, group) for each in (tokens, shares))
            chosen = collectives.all_gather_single(chosen, 0, group)
        result = 0.0 * tokens + 0.0 * shares[:, None]  # ranks exchange gradients in backward, also without tokens
        for number in range(len(up)):
            [those] = torch.nonzero(chosen == first + number, as_tuple=True)
            if not (self.skips and len(those) == 0):
                expert = torch.tanh(tokens[those] @ up[number] + bias[number])
                result = result.index_add(0, those, shares[those, None] * expert)
        return result if self.mesh is None else collectives.reduce_scatter_single_autograd(result, "sum", 0, group)


class Block(torch.nn.Module):
    def __init__(self, width: int, used: int):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.router = torch.nn.Linear(width, EXPERTS)
        self.experts = Experts(width)
        with torch.no_grad():
            self.router.bias[used:] -= 100.0  # no token of any rank chooses these

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        normed = self.norm(tokens)
        shares, chosen = torch.softmax(self.router(normed), dim=-1).max(dim=-1)
        return tokens + self.experts(normed, chosen, shares)


class Mixtures(torch.nn.Module):
    """Blocks of which all, half or a quarter of the experts get tokens; the third one's are frozen."""

    def __init__(self, mesh: DeviceMesh | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.blocks = torch.nn.ModuleList([Block(WIDTH, used) for used in (EXPERTS, EXPERTS // 2, EXPERTS, EXPERTS // 4)])
        self.blocks[2].experts.requires_grad_(False)
        for block in self.blocks if mesh is not None else ():
            block.experts.mesh = mesh
            for name, each in block.experts.named_parameters():
                local = distribute_tensor(each.detach(), mesh, [Shard(0)], src_data_rank=None)
                setattr(block.experts, name, torch.nn.Parameter(local, requires_grad=each.requires_grad))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = self.first(tokens)
        for block in self.blocks:
            tokens = block(tokens)
        return (tokens * tokens.cos()).mean()


def batch_of(step: int, ranks: int, rank: int) -> torch.Tensor:
    return torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]


def plain_training() -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Train on one rank without Ballast. Return losses, norms before clipping, and the parameters."""
    model = Mixtures()
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        loss = model(batch_of(step, 1, 0))
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained(model), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {name: each.detach() for name, each in model.named_parameters()}


def wrapped(model: torch.nn.Module, **options: Any) -> Any:
    return ballast.wrap(torch.optim.AdamW(trained(model), lr=1e-2), model, max_grad_norm=CLIP, **options)


def train(model: Any, optimizer: Any, steps: range, ranks: int, rank: int, *, clips: bool = False) -> list[float]:
    """Return the mean losses over the ranks."""
    losses = []
    for step in steps:
        loss = model(batch_of(step, ranks, rank))
        loss.backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(trained(model), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        [total] = optimizer._ballast.group.all_reduce([round(loss.item() * 2**40)])
        losses.append(total / 2**40 / ranks)
    return losses


FIRST, REST = range(STEPS // 2), range(STEPS // 2, STEPS)


def two_by_two(rank: int, configurations: list[dict[str, Any]], folder: str) -> list[Any]:
    """Train in each configuration, and save after half of the steps."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    results = []
    for number, options in enumerate(configurations):
        model = Mixtures(mesh["ep"])
        for block in model.blocks:
            block.experts.skips = options["stage"] < 3
        optimizer = wrapped(model, **options)
        losses, norms = [], []
        for step in FIRST:
            losses += train(model, optimizer, range(step, step + 1), 4, rank)
            norms.append(optimizer.metrics()["grad_norm"])
        ballast.save(f"{folder}/{number}", model, optimizer, extra=rank)
        ballast.export(model, f"{folder}/{number}.safetensors")
        losses += train(model, optimizer, REST, 4, rank)
        full: dict[str, torch.Tensor] = {}
        ballast.sync_weights(model, lambda name, values: full.update({name: values.clone()}))
        results.append((losses, norms, full))
        optimizer.close()
        local = [each.shape[0] for each in model.blocks[0].experts.parameters()]
        assert local == [EXPERTS // 2] * 2
    return results


def resumed(rank: int, ranks: int, shape: tuple[int, int] | None, stage: int, folders: list[str]) -> list[Any]:
    """Resume on a mesh of another shape, or on ranks with all experts."""
    mesh = None if shape is None else init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))["ep"]
    results = []
    for folder in folders:
        model = Mixtures(mesh)
        optimizer = wrapped(model, stage=stage)
        ballast.load_checkpoint(folder, model, optimizer)
        results.append(train(model, optimizer, REST, ranks, rank))
        optimizer.close()
    return results


def test_two_by_two_ranks_train_as_one_and_others_resume(tmp_path):
    on_host = {"parameters": "host", "gradients": "host", "state": "host"}
    configurations: list[dict[str, Any]] = [{"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, "offload": on_host}]
    losses, norms, parameters = plain_training()
    for ranks in run_ranks(4, two_by_two, configurations, str(tmp_path)):
        for ours, our_norms, full in ranks:
            assert ours == pytest.approx(losses, rel=2e-6)
            assert our_norms == pytest.approx(norms[: STEPS // 2], rel=2e-6)
            for name, values in parameters.items():
                torch.testing.assert_close(full[name], values, atol=1e-5, rtol=1e-4)
    folders = [f"{tmp_path}/{number}" for number in range(len(configurations))]
    for size, shape, stage in [(4, (1, 4), 3), (3, None, 3), (2, (1, 2), 2), (1, None, 0)]:
        for answers in run_ranks(size, resumed, size, shape, stage, folders):
            for ours in answers:
                assert ours == pytest.approx(losses[STEPS // 2 :], rel=2e-6)


# --- Models of transformers ---


def divide_experts(model: Any, mesh: DeviceMesh) -> None:
    """Divide experts among the ranks of the mesh, as the page on mixtures of experts says."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    plan = {}
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            plan |= {f"{name}.{each}": "grouped_gemm" for each, _ in module.named_parameters()}
            plan[name] = "ep_dispatch_experts"
    apply_expert_parallelism(model, mesh["ep"], mesh["tp"], plan)


def losses_of(model: Any, optimizer: Any, ranks: int, rank: int) -> list[float]:
    losses = []
    for step in range(4):
        tokens = torch.randint(64, (4, 12), generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def mixtures_of_transformers(rank: int, names: list[str], folder: str) -> dict[str, tuple[list[float], list[float], bool]]:
    """Return the losses of one rank with all data, those of this rank, and whether an export has the Hub's names."""
    from python.wrap.test_hub_names import model_of
    from safetensors import safe_open

    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "ep", "tp"))
    results = {}
    for name in names:
        plain = model_of(name)
        expected = losses_of(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 1, 0)
        model = model_of(name)
        divide_experts(model, mesh)
        optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=3)
        losses = losses_of(model, optimizer, 4, rank)
        totals = [each / 2**40 / 4 for each in optimizer._ballast.group.all_reduce([round(each * 2**40) for each in losses])]
        ballast.export(model, f"{folder}/{name}.safetensors")
        optimizer.close()
        with safe_open(f"{folder}/{name}.safetensors", "pt") as file:
            last = max(key for key in file.keys() if ".experts." in key and key.endswith("weight"))
            has_names = ".experts.3." in last
            results[name] = (expected, totals, has_names)
    return results


def test_models_of_transformers_divide_their_experts(tmp_path):
    pytest.importorskip("transformers")
    names = ["Mixtral", "Qwen3Moe", "DeepseekV3"]
    for results in run_ranks(4, mixtures_of_transformers, names, str(tmp_path), imported=FRAMEWORKS):
        assert results.keys() == {*names}
        for expected, losses, has_names in results.values():
            assert losses == pytest.approx(expected, rel=1e-4)
            assert has_names


def with_the_same_data(rank: int, folder: str) -> tuple[list[float], list[float]]:
    """Return the losses of one rank, and those where both ranks have the same data, sharded matrices and other experts."""
    as_launched(rank)
    import transformers
    from transformers.distributed import DistributedConfig

    plain = transformers.MixtralForCausalLM.from_pretrained(folder)
    expected = losses_of(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 1, 0)
    both = DistributedConfig(tp_size=2, tp_plan="auto", ep_size=2)
    model = transformers.MixtralForCausalLM.from_pretrained(folder, distributed_config=both)
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=3, mesh=model._device_mesh)
    return expected, losses_of(model, optimizer, 1, 0)


def test_ranks_with_the_same_data_divide_experts_too(tmp_path):
    pytest.importorskip("transformers")
    from python.wrap.test_hub_names import model_of

    model_of("Mixtral").save_pretrained(tmp_path)
    for expected, losses in run_ranks(2, with_the_same_data, str(tmp_path), imported=FRAMEWORKS):
        assert losses == pytest.approx(expected, rel=1e-5)


# --- What is refused ---


def message_of(call: Any) -> str:
    with pytest.raises(ballast.UsageError) as caught:
        call()
    return str(caught.value)


def refusals(rank: int) -> dict[str, str]:
    """Return what is said of experts that cannot be divided. The model stays as it was."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model, found = Mixtures(mesh["ep"]), {}

    def refused(**options: Any) -> str:
        return message_of(lambda: wrapped(model, **options))

    found["stage 0"] = refused(stage=0)
    found["copies"] = refused(stage=3, replicas=2)
    found["run"] = refused(stage=3, run="r", offload={"state": "nvme:."})
    own_step = torch.optim.RMSprop(trained(model))
    found["own step"] = message_of(lambda: ballast.wrap(own_step, model, stage=2))
    assert isinstance(model.blocks[0].experts.up, DTensor) and type(model.blocks[0].experts) is Experts

    def with_meshes(*meshes: Any, experts: int = 8) -> str:
        several = torch.nn.Module()
        for number, each in enumerate(meshes):
            full = torch.ones(experts, 3)
            local = distribute_tensor(full, each, [Shard(0)] * each.ndim, src_data_rank=None)
            several.register_parameter(f"experts_{number}", torch.nn.Parameter(local))
        return message_of(lambda: ballast.wrap(torch.optim.SGD(several.parameters(), lr=0.1), several, stage=2))

    alone = DeviceMesh("cpu", [rank], mesh_dim_names=("ep",))
    all_four = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    found["several meshes"] = with_meshes(mesh["ep"], all_four)
    found["two dimensions"] = with_meshes(init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep_1", "ep_2")))
    found["uneven"] = with_meshes(all_four, experts=6)
    of_three = DeviceMesh("cpu", [0, 1, 2], mesh_dim_names=("ep",))
    found["other sizes"] = with_meshes(of_three if rank < 3 else alone, experts=9)
    return found


def test_experts_that_cannot_be_divided_are_named():
    expected = {
        "stage 0": "in one copy(.|\n)*experts of shape(.|\n)*stage 1, 2 or 3",
        "copies": "in one copy(.|\n)*replicas=1",
        "run": "cannot train DTensors with run=",
        "own step": "cannot train experts with RMSprop",
        "several meshes": "one mesh of one dimension",
        "two dimensions": "one mesh of one dimension",
        "uneven": "a number of experts that its ranks can divide",
        "other sizes": "groups of one size",
    }
    for found in run_ranks(4, refusals):
        assert found.keys() == expected.keys()
        for name, said in found.items():
            assert re.search(expected[name], said), said


def norms_and_values(rank: int) -> list[Any]:
    """Return norms of torch's clipping and of all gradients, and what begins with other values than on other ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))  # ranks with all experts are no neighbours
    model = Mixtures(mesh["ep"])
    with torch.no_grad():
        for each in model.parameters():  # Ballast sends those of the first rank with them
            (each.to_local() if isinstance(each, DTensor) else each).add_(mesh["dp"].get_local_rank())
    optimizer = ballast.wrap(torch.optim.SGD(trained(model), lr=0.0), model, stage=2)
    group = optimizer._ballast.group
    model(batch_of(0, 4, group.rank)).backward()
    norms = [float(optimizer.clip_grad_norm_(1e9)), float(torch.nn.utils.clip_grad_norm_(trained(model), 1e9))]
    norms.append(float(torch.nn.utils.clip_grad_norm_(trained(model), 1e9, norm_type=3.0)))
    optimizer.step()
    with ballast.gather(model):
        values = {name: part_of(each).full(each) if part_of(each) else each for name, each in model.named_parameters()}
        return [norms, {name: each.detach().clone() for name, each in values.items()}]


def test_norms_count_each_expert_once_and_ranks_begin_with_the_same_values():
    model = Mixtures()
    model(batch_of(0, 1, 0)).backward()
    norms = [float(torch.nn.utils.clip_grad_norm_(trained(model), 1e9, norm_type=order)) for order in (2.0, 2.0, 3.0)]
    for ours, values in run_ranks(4, norms_and_values):
        assert ours == pytest.approx(norms, rel=1e-6)
        assert all(values[name].equal(each) for name, each in model.named_parameters())
