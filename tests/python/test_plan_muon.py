"""Tests that plans with Muon count the matrices' updates, and AdamW for all other parameters."""

import ballast
import pytest
import torch
from ballast.sizes import parse_size
from ballast.tools.command_line import main

MACHINE = {"gpu": "h100", "ranks": 4, "host_memory": "64GiB", "drive_space": "1TiB", "stage": 3, "tokens": 1024}
MATRICES = {f"h.{block}.{name}": shape for block in range(3) for name, shape in (("up", (2048, 512)), ("down", (512, 2048)))}
OTHERS = {"h.1.norm": (512,), "wte": (4096, 512), "ln_f": (512,)}
PLACES = ["none", {"state": "host"}, {"gradients": "host", "state": "nvme"}]


def planned(model, **options):
    return ballast.plan(model, **{**MACHINE, **options})


@pytest.mark.parametrize("offload", PLACES)
def test_a_plan_adds_up_the_matrices_and_the_others(offload):
    """The tensors are declared in turns, so that units have tensors of both."""
    options = {"offload": offload, "activations": "1MiB", "reserve": 0}
    both = planned(MATRICES | OTHERS, optimizer="muon", **options)
    matrices = planned(MATRICES, optimizer="muon", **options)
    others = planned(OTHERS, optimizer="adamw", **options)
    for tier, owners in both.memory.items():
        parts = [plan.memory[tier].get(owner, 0) for owner in owners for plan in (matrices, others)]
        twice = sum(others.memory[tier].get(owner, 0) for owner in ("activations (estimated)", "reserved (system, torch)"))
        assert sum(owners.values()) == sum(parts) - twice
    assert both.parameters == matrices.parameters + others.parameters
    assert both.seconds == pytest.approx(matrices.seconds + others.seconds, rel=0.05)


def test_the_products_of_an_update_take_time():
    """They take turns with the products of the model, so twice the flops of a GPU take half of the time."""
    slow, fast = (planned("gpt2", optimizer="muon", flops=flops, rates={"peers": "1TB/s"}) for flops in ("1T", "2T"))
    adamw = planned("gpt2", flops="1T", rates={"peers": "1TB/s"})
    assert slow.seconds > 1.02 * adamw.seconds
    assert slow.seconds == pytest.approx(2 * fast.seconds, rel=0.05)


def test_momentum_takes_less_memory_than_two_moments():
    muon, adamw = (planned("llama-8b", optimizer=name, offload="none") for name in ("muon", "adamw"))
    assert muon.memory["device"]["state"] < 0.75 * adamw.memory["device"]["state"]
    assert muon.memory["device"]["matrices"] > 0


def test_a_plan_with_muon_names_both_optimizers(capsys):
    plan = planned("llama-8b", optimizer="muon")
    assert plan.wrap_call().startswith("ballast.wrap([muon, adamw], model, stage=3")
    assert "AdamW for 1,050,939,392 parameters that are no matrices of blocks" in plan.text()
    assert plan.to_dict()["optimizer"] == "muon"
    assert main(["plan", "llama-70b", "--ranks", "8", "--gpu", "h100", "--host-memory", "2TiB", "--optimizer", "muon"]) == 0
    assert "ballast.wrap([muon, adamw], model" in capsys.readouterr().out


def test_the_timeline_and_the_program_have_both_optimizers():
    plan = planned(MATRICES | OTHERS, optimizer="muon")
    assert {"orthogonalize", "update"} <= {entry.kind for entry in plan.timeline()}
    assert "wte" in {entry.unit for entry in plan.timeline()}
    assert max(entry.end for entry in plan.timeline()) <= plan.seconds * 1.01
    of_matrices, of_others = plan.program().split("\n\n")
    assert "orthogonalize" in of_matrices and "orthogonalize" not in of_others
    assert "update: update" in of_others


def test_tied_embeddings_are_no_matrices_of_blocks():
    tied = {"model_type": "gpt2", "n_layer": 2, "n_embd": 256, "n_head": 4, "n_positions": 512, "vocab_size": 8192}
    plan, adamw = (planned(tied, optimizer=name, flops="1T", rates={"peers": "1TB/s"}) for name in ("muon", "adamw"))
    assert plan.parameters == adamw.parameters
    assert plan.seconds > adamw.seconds  # the head's time counts, although it has no parameters


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(64)
        self.up, self.down = torch.nn.Linear(64, 256, bias=False), torch.nn.Linear(256, 64, bias=False)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(512, 64)
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(3)))
        self.head = torch.nn.Linear(64, 512, bias=False)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))


def test_a_plan_has_the_memory_that_both_optimizers_reserve():
    """Except for the workspace of products, which a GPU and a CPU need in other sizes."""
    model = Model().to(torch.bfloat16)
    plan = ballast.plan(model, optimizer="muon", stage=3, offload="none", activations="1MiB", reserve=0)
    matrices = [each for each in model.blocks.parameters() if each.dim() == 2]
    others = [each for each in model.parameters() if all(each is not matrix for matrix in matrices)]
    wrapped = ballast.wrap([torch.optim.Muon(matrices), torch.optim.AdamW(others)], model, stage=3)
    model(torch.randint(512, (1, 8)))
    reserved = [line.split() for optimizer in wrapped for line in optimizer.memory().splitlines()]
    for owner in ("parameters", "gradients", "reduced", "state", "directions"):
        sizes = [parse_size(" ".join(words[1:])) for words in reserved if words and words[0] == owner]
        assert sum(sizes) == pytest.approx(plan.memory["device"][owner], rel=1e-3), owner  # a size has four digits
    for optimizer in wrapped:
        optimizer.close()


def test_models_without_matrices_and_outer_optimizers_are_refused():
    with pytest.raises(ballast.Error, match="Muon is for the matrices of repeated blocks, and this model has none"):
        planned(OTHERS, optimizer="muon")
    with pytest.raises(ballast.Error, match="outer= exchanges the parameters of one optimizer"):
        planned("gpt2", optimizer="muon", outer=ballast.DiLoCo(every=8), gpus_per_machine=2)
